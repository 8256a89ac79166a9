"""The compiler takes what the interpreter has tried: it is stricter about types, and pipelines what it understands.

Needs no GPU. In a process of its own, because Triton decides on import whether it interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys

COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from minisgl.attention.triton_decode import decode_kernel
from minisgl.attention.triton_merge import merge_kernel
from minisgl.attention.triton_prefill import prefill_kernel
from minisgl.attention.triton_prefix import prefix_kernel
from minisgl.attention.triton_rows import merge_pieces_kernel, rows_kernel

FLOATS = {"part_out", "part_lse", "prefix_out", "prefix_lse", "out_lse", "piece_out", "piece_lse"}
HALVES = {"queries", "keys", "values", "out"}
COUNTS = {"num_rows", "num_groups", "programs", "token_stride", "head_stride", "table_width"}
MODEL = {"PAGE_SIZE": 16, "GROUP": 5, "KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_N": 64, "BLOCK_R": 256}
MODEL |= {"BLOCK_G": 64, "MAX_PARTS": 8, "PREFIX_PARTS": 8, "BLOCK_P": 4, "BLOCK_W": 1024, "NUM_HEADS": 40}


def build(kernel, num_warps, num_stages, cache="*bf16", **constants):
    constants = {name: value for name, value in (MODEL | constants).items() if name in kernel.arg_names}
    signature = {}
    for name in kernel.arg_names:
        kind = "*i32"
        if name in constants:
            kind = "constexpr"
        elif name == "scale":
            kind = "fp32"
        elif name in COUNTS:
            kind = "i32"
        elif name in FLOATS or (name == "out" and kernel is prefix_kernel):
            kind = "*fp32"
        elif name in HALVES:
            kind = cache if name in ("keys", "values") else "*bf16"
        signature[name] = kind
    indices = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or "stride" in name]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, indices, attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


ALONE = {"SHARED": False, "shared_lens": None, "prefix_parts": None, "prefix_out": None, "prefix_lse": None}
for window, early, shared in ((0, True, ALONE), (100, False, ALONE), (0, True, {"SHARED": True})):
    options = {"WINDOW": window, "USE_PDL": early, **shared}
    loop = build(decode_kernel, 2, 3, BLOCK_M=16, **options)["ttgir"]
    assert loop.count("async_copy_global_to_local") >= 4, "the loop over tiles is pipelined"
    build(merge_kernel, 4, 3, **options)
for window in (0, 100):
    assert "wgmma" in build(prefill_kernel, 8, 3, BLOCK_M=128, WINDOW=window)["ptx"]
for heads in (1, 5):
    loop = build(rows_kernel, 4, 3, BLOCK_M=16, WINDOW=0, HEADS=heads)["ttgir"]
    assert loop.count("async_copy_global_to_local") >= 2, "the loop over tiles is pipelined"
build(merge_pieces_kernel, 4, 3, PIECES=16, BLOCK_P=16)
assert "wgmma" in build(prefix_kernel, 8, 5, BLOCK_M=128, USE_PDL=True)["ptx"]
for built in (
    build(decode_kernel, 2, 3, "*fp8e4nv", BLOCK_M=16, WINDOW=0, USE_PDL=True, **ALONE),
    build(prefill_kernel, 8, 3, "*fp8e4nv", BLOCK_M=128, WINDOW=0),
    build(prefix_kernel, 8, 5, "*fp8e4nv", BLOCK_M=128, USE_PDL=True),
):
    assert built["ttgir"].count("async_copy_global_to_local") >= 4, "the loop over tiles is pipelined"
    assert "cvt.rn.f16x2.e4m3x2" in built["ptx"]
    assert "cvt.bf16.f16" not in built["ptx"], "which is a slow instruction"
"""


def test_all_kernels_compile_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
