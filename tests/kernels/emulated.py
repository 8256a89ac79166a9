"""CUDA C++ on the CPU, to test what a kernel computes where there is no GPU.

A C++ compiler translates a kernel's text behind emulated.h, which defines what CUDA adds to the language. Threads of a
block take turns and wait for each other as on a GPU: at ``__syncthreads``, in shuffles, and in products of matrices.
Functions with ``asm`` can't be translated; functions of emulated.h for the same instructions take their places.

The emulation notices threads that wait in vain, addresses that aren't aligned and indices beyond an array. It can't
tell how long a kernel takes, or what happens when blocks or warps run at the same time.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from minisgl.errors import ConfigError

_FOLDER = tempfile.TemporaryDirectory(prefix="emulated-kernels-")
_OPTIONS = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-fvisibility=hidden", "-U_FORTIFY_SOURCE", "-nodefaultlibs"]
_OPTIONS += ["-fsanitize=alignment,bounds", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing"]
_INSTRUCTIONS = {  # that functions of emulated.h stand for
    "scale_of": "cvt.f32.f16",
    "pair": "cvt.rn.bf16x2.f32",
    "larger": "max.NaN.f32",
    "less_8": "lop3.b32 0xf0f0f0f0 0x80808080 0x6a",  # the last one is & and ^
    "halves": "cvt.rn.f16x2.f32",
    "lower_halves": "cvt.rn.f16x2.e4m3x2",
    "upper_halves": "cvt.rn.f16x2.e4m3x2",
    "multiply_add": "fma.rn.bf16x2",
    "read_once": "ld.global.nc.L1::no_allocate.v4.u32",
    "multiply_matrices": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "multiply_halves": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "multiply_bytes": "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32",
    "launch_dependents": "griddepcontrol.launch_dependents",
    "wait_for_inputs": "griddepcontrol.wait",
}
_ASM = re.compile(r"\basm\s*(?:volatile\s*)?\(")
_FUNCTION = re.compile(r"__device__[^;{}()]*?(\w+)\s*\((?:[^()]|\([^()]*\))*\)[^;{}()]*{")
_BRACES = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|[{}]')
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:(?:alignas|__align__)\(\w+\)\s+)?(\w+)\s+(\w+)\[\];")


class EmulatedKernel:
    """Takes the place of `minisgl.kernels.nvrtc.CudaKernel`; the tensors of a launch are on the CPU.

    Raises:
        ConfigError: there is no C++ compiler, or the source doesn't compile.
    """

    def __init__(self, source: str, name: str, constants: Mapping[str, int], threads: int, shared_memory: int) -> None:
        assert threads in range(32, 1025, 32), f"{name}: {threads} threads are no whole warps of a block"
        self.name, self.threads = name, threads
        prefix = "".join(f"constexpr int {key} = {value};\n" for key, value in constants.items())
        self._library = _compiled(name, f'{prefix}#line 1 "{name}.cu"\n{without_asm(source)}', shared_memory)

    def launch(self, blocks: int, arguments: list[torch.Tensor | int | float], early: bool = False) -> None:
        """Run the blocks one after the other.

        Raises:
            RuntimeError: a thread waits in vain or uses a wrong address, or the arguments aren't what the kernel takes.
        """
        kinds, values = zip(*(_c_value(each) for each in arguments), strict=True)
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        message = self._library.emulate(blocks, self.threads, "".join(kinds).encode(), addresses)
        if message is not None:
            raise RuntimeError(f"{self.name}: {message.decode()}")


def _c_value(argument: torch.Tensor | int | float) -> tuple[str, ctypes.c_void_p | ctypes.c_int | ctypes.c_float]:
    if isinstance(argument, torch.Tensor):
        assert argument.device.type == "cpu", f"an emulated kernel can't read a tensor on {argument.device}"
        return "p", ctypes.c_void_p(argument.data_ptr())
    return ("i", ctypes.c_int(argument)) if isinstance(argument, int) else ("f", ctypes.c_float(argument))


def without_asm(source: str) -> str:
    """The source, with functions of emulated.h for its own that have ``asm``; lines keep their numbers."""
    text, copied = "", 0
    for match in _FUNCTION.finditer(source):
        end = _end_of_body(source, match.end())
        body, name = source[match.end() : end], match[1]
        if not _ASM.search(body):
            continue
        if name not in _INSTRUCTIONS or not set(_INSTRUCTIONS[name].split()) <= set(re.findall(r"[\w.:]+", body)):
            raise ConfigError(f"{name!r} has asm, and tests/kernels/emulated.h has no function for it:\n{body}")
        lines = (match[0] + body).count("\n")
        text += source[copied : match.start()] + f"using replacements::{name};" + "\n" * lines
        copied = end
    if _ASM.search(text := text + source[copied:]):
        raise ConfigError("asm stands outside of __device__ functions, where the emulation can't replace it")
    return _DYNAMIC.sub(r"\1* \2 = (\1*)emulated::dynamic;", text)


def _end_of_body(source: str, start: int) -> int:
    """Behind the brace that closes the one before ``start``."""
    depth = 1
    for token in _BRACES.finditer(source, start):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    raise ConfigError("a brace of the source is never closed")


@cache
def _compiled(name: str, text: str, shared_memory: int) -> ctypes.CDLL:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(f"emulated kernels need a C++ compiler and there is no {compiler}; install it, or set CXX")
    parameters = "int blocks, int threads, const char* kinds, void** arguments"
    runner = f'extern "C" __attribute__((visibility("default"))) const char* emulate({parameters}) {{ return '
    runner += f"emulated::launch({name}, blocks, threads, kinds, arguments); }}\n"
    library = tempfile.mkdtemp(dir=_FOLDER.name) + "/kernel.so"
    header = ["-include", str(Path(__file__).with_suffix(".h")), f"-DDYNAMIC_BYTES={shared_memory}"]
    command = [compiler, *_OPTIONS, *header, "-o", library, "-x", "c++", "-", "-lm", "-lc"]
    done = subprocess.run(command, input=text + runner, capture_output=True, text=True)
    if done.returncode != 0:
        raise ConfigError(f"CUDA C++ of {name!r} doesn't compile:\n{done.stderr}")
    loaded = ctypes.CDLL(library)
    loaded.emulate.restype = ctypes.c_char_p
    return loaded
