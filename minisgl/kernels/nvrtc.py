"""CUDA C++ at run time: compiled by NVRTC, launched by the driver, through NVIDIA's `cuda.bindings`."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from triton.runtime.cache import get_cache_manager

from minisgl.errors import ConfigError


def has_nvrtc() -> bool:
    """Whether NVIDIA's `cuda.bindings` are installed."""
    try:
        from cuda.bindings import driver, nvrtc  # noqa: F401
    except ImportError:
        return False
    return True


def source_of(*names: str) -> str:
    """The .cu files of this folder with these names, one behind the other; lines keep their files and numbers."""
    folder = Path(__file__).parent
    return "".join(f'#line 1 "{name}.cu"\n{(folder / name).with_suffix(".cu").read_text()}' for name in names)


class CudaKernel:
    """A kernel of some CUDA C++ for the current GPU.

    Args:
        source: as `source_of` has it; without includes, since NVRTC comes without a toolkit's headers.
        name: of the kernel, which is ``extern "C"``.
        constants: integers that the source finds as ``constexpr int``.
        threads: of a block.
        shared_memory: of a block, dynamic, bytes.

    Raises:
        ConfigError: the package is missing, or the source doesn't compile; the compiler's log is in it.
    """

    def __init__(self, source: str, name: str, constants: Mapping[str, int], threads: int, shared_memory: int) -> None:
        try:
            from cuda.bindings import driver, nvrtc
        except ImportError:
            raise ConfigError(
                "CUDA C++ is compiled through NVIDIA's cuda.bindings, which isn't here: pip install cuda-bindings"
            ) from None
        self._driver, self.threads, self.shared_memory = driver, threads, shared_memory
        prefix = "".join(f"constexpr int {key} = {value};\n" for key, value in constants.items())
        text = prefix + source
        major, minor = torch.cuda.get_device_capability()
        options = [f"--gpu-architecture=sm_{major}{minor}".encode(), b"--std=c++17", b"-lineinfo"]
        binary = _compiled(nvrtc, name, text, options)
        torch.cuda.current_stream().synchronize()  # the driver needs PyTorch's context
        module = _checked(driver.cuModuleLoadData(binary))
        self._function = _checked(driver.cuModuleGetFunction(module, name.encode()))
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(self._function, most, shared_memory))

    def clusters_at_once(self, blocks: int) -> int:
        """How many clusters of ``blocks`` blocks have room on the GPU at the same time.

        A cluster lies in one part of the GPU, and parts have unlike numbers of multiprocessors, so a few stay over.
        """
        driver = self._driver
        config = self._config(blocks)
        value = driver.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = blocks, 1, 1
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value = value
        config.attrs, config.numAttrs = [attribute], 1
        return int(_checked(driver.cuOccupancyMaxActiveClusters(self._function, config)))

    def launch(self, blocks: int, arguments: list[torch.Tensor | int | float], early: bool = False) -> None:
        """Launch on PyTorch's current stream.

        Tensors are given as their addresses, numbers as ``int`` and ``float`` of C. ``early``: the kernel itself waits,
        with ``griddepcontrol.wait``, for what the one in front writes (see `minisgl.kernels.launch.pdl_launch_args`).
        """
        driver = self._driver
        config = self._config(blocks)
        if early:
            attribute, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
            value.programmaticStreamSerializationAllowed = 1
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value = value
            config.attrs, config.numAttrs = [attribute], 1
        _checked(driver.cuLaunchKernelEx(config, self._function, _c_values(arguments), 0))

    def launch_cooperatively(self, blocks: int, arguments: list[torch.Tensor | int | float]) -> None:
        """As `launch`, if all blocks fit on the GPU at the same time; else raise."""
        stream = torch.cuda.current_stream().cuda_stream
        size = (blocks, 1, 1, self.threads, 1, 1, self.shared_memory)
        _checked(self._driver.cuLaunchCooperativeKernel(self._function, *size, stream, _c_values(arguments)))

    def _config(self, blocks: int) -> Any:
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.shared_memory
        config.hStream = torch.cuda.current_stream().cuda_stream
        return config


def _compiled(nvrtc: ModuleType, name: str, text: str, options: list[bytes]) -> bytes:
    """The machine code; Triton's cache keeps it, among that of its own kernels."""
    version = _checked(nvrtc.nvrtcVersion())
    cache = get_cache_manager(hashlib.sha256(repr((version, options, text)).encode()).hexdigest())
    if (path := cache.get_file(f"{name}.cubin")) is not None:
        return Path(path).read_bytes()
    program = _checked(nvrtc.nvrtcCreateProgram(text.encode(), f"{name}.cu".encode(), 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise ConfigError(f"CUDA C++ of {name!r} doesn't compile:\n{log.decode()}")
    binary: bytes = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, binary))
    cache.put(binary, f"{name}.cubin", binary=True)
    return binary


def _c_values(arguments: list[torch.Tensor | int | float]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    kinds = {int: ctypes.c_int, float: ctypes.c_float}
    values = tuple(each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments)
    return values, tuple(kinds.get(type(each), ctypes.c_void_p) for each in arguments)


def most_shared_memory(device: int) -> int:
    """Bytes that a block can have on a GPU, if it asks."""
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    return int(_checked(driver.cuDeviceGetAttribute(attribute, _checked(driver.cuDeviceGet(device)))))


def matrix_map(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """What the GPU's copy engine needs to bring boxes of [rows, columns] of a bfloat16 matrix: 128 bytes, on the CPU.

    Without it every row of a box is a copy of its own, and the engine takes about 20 ns for each.
    """
    from cuda.bindings import driver

    height, width = matrix.shape
    tensor_map = _checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            matrix.data_ptr(),
            [driver.cuuint64_t(width), driver.cuuint64_t(height)],
            [driver.cuuint64_t(matrix.stride(0) * matrix.element_size())],
            [driver.cuuint32_t(columns), driver.cuuint32_t(rows)],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return torch.frombuffer(bytearray(ctypes.string_at(tensor_map.getPtr(), 128)), dtype=torch.uint8)


def _checked(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if status.value != 0:
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if values else None
