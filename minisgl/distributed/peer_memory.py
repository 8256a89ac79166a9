"""Peer memory: each rank of a host allocates a piece, and maps those of the others, for kernels to read and write.

On GPUs a piece is device memory, shared by CUDA's interprocess handles: PyTorch's allocator cuts small tensors out of
large blocks, and its symmetric memory sets up NVLink multicast. On the CPU it is an anonymous file.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from minisgl.errors import ConfigError

_HANDLE_BYTES = 64  # of CUDA's handles
_ENABLE_PEER_ACCESS = 1


class _Mapping(Protocol):
    """How processes on one kind of device share memory."""

    def create(self, nbytes: int) -> bytes:
        """Allocate this rank's piece, zeroed, and return a handle of at most 64 bytes with which others open it."""

    def open(self, handle: bytes | None) -> int:
        """Map a piece, None for this rank's, and return its address."""

    def unmap(self) -> None:
        """Unmap the other ranks' pieces."""

    def free(self) -> None:
        """Free this rank's piece, which no process maps any more."""


@dataclass
class PeerMemory:
    """The mapped pieces of all ranks, of one size and zero at first. ``addresses`` are in the order of the ranks."""

    addresses: list[int]
    _mapping: _Mapping
    _group: dist.ProcessGroup
    _device: torch.device

    def close(self) -> None:
        """Unmap the other ranks' pieces, then free this one's. A collective call, after the last kernel."""
        self.addresses = []
        self._mapping.unmap()
        exchange(b"", self._group, self._device)  # a barrier: CUDA forbids to free a piece that another process maps
        self._mapping.free()


def share_memory(nbytes: int, group: dist.ProcessGroup, device: torch.device) -> PeerMemory:
    """Allocate a piece of ``nbytes`` on every rank of this host and map them all. A collective call.

    Raises `ConfigError`, which names the rank, if one could not allocate or map a piece.
    """
    mapping: _Mapping = _CudaMapping(device) if device.type == "cuda" else _FileMapping()
    rank = dist.get_rank(group)
    handle, problem, addresses = b"", "", []
    try:
        handle = mapping.create(nbytes)
    except (OSError, ConfigError) as error:
        problem = str(error)
    handles = exchange(handle, group, device)
    failed = [peer for peer, each in enumerate(handles) if not each]
    if not failed:
        try:
            addresses = [mapping.open(None if peer == rank else each) for peer, each in enumerate(handles)]
        except (OSError, ConfigError) as error:
            problem = str(error)
        mapped = exchange(b"all" if addresses else b"", group, device)  # no rank writes before all have mapped
        failed = [peer for peer, each in enumerate(mapped) if not each]
    if failed:
        PeerMemory([], mapping, group, device).close()
        raise ConfigError(
            f"peer memory: ranks {failed} could not make or map {nbytes:,} bytes{': ' + problem if problem else ''}; "
            "the ranks must be processes of one host whose devices reach one another; else use NCCL alone"
        )
    return PeerMemory(addresses, mapping, group, device)


def exchange(message: bytes, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """All-gather a message of up to 64 bytes, which must not end in zeros."""
    mine = torch.frombuffer(bytearray(message.ljust(_HANDLE_BYTES, b"\0")), dtype=torch.uint8)
    if dist.get_backend(group) == "nccl":
        mine = mine.to(device)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, mine, group=group)
    return [bytes(each.tolist()).rstrip(b"\0") for each in everyones]


class _FileMapping:
    """Anonymous files, which another process of the same user opens through ``/proc`` (Linux)."""

    def __init__(self) -> None:
        self._maps: list[mmap.mmap] = []
        self._files: list[int] = []

    def create(self, nbytes: int) -> bytes:
        file = os.memfd_create("minisgl-peer-memory")
        self._files.append(file)
        os.ftruncate(file, nbytes)
        return f"/proc/{os.getpid()}/fd/{file}".encode()

    def open(self, handle: bytes | None) -> int:
        file = self._files[0]
        if handle is not None:
            file = os.open(handle, os.O_RDWR | os.O_CLOEXEC)
            self._files.append(file)
        self._maps.append(mmap.mmap(file, 0))
        return ctypes.addressof(ctypes.c_char.from_buffer(self._maps[-1]))

    def unmap(self) -> None:
        self._maps = []

    def free(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_byte * _HANDLE_BYTES),)


class _CudaMapping:
    """Interprocess handles of the CUDA driver, by its C library."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._own: ctypes.c_uint64 | None = None
        self._opened: list[ctypes.c_uint64] = []

    def create(self, nbytes: int) -> bytes:
        own, handle = ctypes.c_uint64(), _Handle()
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # makes the context of this device current in the driver
            self._call("cuMemAlloc_v2", ctypes.byref(own), ctypes.c_size_t(nbytes))
            self._own = own
            self._call("cuMemsetD8_v2", own, ctypes.c_ubyte(0), ctypes.c_size_t(nbytes))
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), own)
            torch.cuda.synchronize()
        return bytes(handle)

    def open(self, handle: bytes | None) -> int:
        if handle is None:
            assert self._own is not None
            return self._own.value
        opened = ctypes.c_uint64()
        padded = _Handle.from_buffer_copy(handle.ljust(_HANDLE_BYTES, b"\0"))
        with torch.cuda.device(self._device):
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(opened), padded, ctypes.c_uint(_ENABLE_PEER_ACCESS))
        self._opened.append(opened)
        return opened.value

    def unmap(self) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            for opened in self._opened:
                self._call("cuIpcCloseMemHandle", opened)
        self._opened = []

    def free(self) -> None:
        if self._own is not None:
            with torch.cuda.device(self._device):
                self._call("cuMemFree_v2", self._own)
        self._own = None

    def _call(self, function: str, *arguments: object) -> None:
        result: int = getattr(self._driver, function)(*arguments)
        if result != 0:
            name = ctypes.c_char_p()
            self._driver.cuGetErrorName(result, ctypes.byref(name))
            raise ConfigError(f"{function} failed: {(name.value or b'').decode() or result}")
