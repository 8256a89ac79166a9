"""The communicators, and which one to use: torch.distributed, peer memory between GPUs, or a ring of CPU ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from minisgl.errors import ConfigError
from minisgl.layers.sharding import Communicator
from minisgl.registry import Registry, resolve

if TYPE_CHECKING:
    from minisgl.distributed.peer_all_reduce import PeerAllReduce


_PEER_MEMORY_BYTES = 24 << 20
"""Largest tensor that is reduced over peer memory: 2,048 tokens of Qwen3-32B. At 84 MB the gain over NCCL is only 4 to
7 % (`benchmarks/results/all-reduce.json`), and the shared memory is four times the largest tensor."""

# Versions that have the newer name warn about the older one.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class TorchCommunicator(Communicator):
    """The collectives of torch.distributed: NCCL between GPUs, gloo between CPUs. ``peers`` reduces what fits it.

    On CUDA they run on the current stream without blocking the host, and can be captured in CUDA graphs.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, peers: PeerAllReduce | None = None) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self.peers = peers
        self._group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.peers is not None and self.peers.fits(x):
            return self.peers.all_reduce(x)
        x = x.contiguous()
        dist.all_reduce(x, group=self._group)
        return x

    def fuses_norm(self, x: torch.Tensor) -> bool:
        return self.peers is not None and self.peers.fits_norm(x)

    def all_reduce_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.peers is not None, "`fuses_norm` is false"
        return self.peers.add_and_norm(x, residual, weight, eps)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape
        stacked = x.new_empty((self.size * rows, width))
        _all_gather(stacked, x.contiguous(), group=self._group)
        if self.peers is not None:  # fails if a rank gave up an all-reduce, so its data is wrong
            self.peers.barrier()
        return stacked.view(self.size, rows, width).transpose(0, 1).reshape(rows, self.size * width)


COMMUNICATORS: Registry[Callable[[dist.ProcessGroup, torch.device], Communicator]] = {
    "torch": TorchCommunicator,
    "ring": "minisgl.distributed.communicator:RingCommunicator",
}


def select_communicator(
    name: str, device: torch.device, timeout: float
) -> Callable[[dist.ProcessGroup, torch.device], Communicator]:
    """Return a function that builds the communicator ``name``: a key of `COMMUNICATORS` or ``"peer-memory"``.

    ``"auto"`` is ``"peer-memory"`` between GPUs that can access each other's memory, else ``"torch"``. ``timeout`` is
    that of peer memory, in seconds. Raises `ConfigError` if the name is unknown or cannot run on this device.
    """
    has_kernels = device.type == "cuda" and find_spec("triton") is not None
    if name == "auto":
        return partial(_over_peer_memory_if_possible, timeout) if has_kernels else TorchCommunicator
    if name != "peer-memory":
        return resolve("all_reduce", name, COMMUNICATORS)
    if not has_kernels:
        raise ConfigError("all_reduce: 'peer-memory' needs CUDA devices and Triton; use 'torch'")
    return partial(_over_peer_memory, timeout)


def peer_all_reduce_of(communicator: Communicator) -> PeerAllReduce | None:
    """The all-reduce over peer memory, if the communicator uses one."""
    return communicator.peers if isinstance(communicator, TorchCommunicator) else None


def _over_peer_memory(timeout: float, group: dist.ProcessGroup, device: torch.device) -> TorchCommunicator:
    from minisgl.distributed.peer_all_reduce import PeerAllReduce

    return TorchCommunicator(group, device, PeerAllReduce(group, device, _PEER_MEMORY_BYTES, timeout=timeout))


def _over_peer_memory_if_possible(timeout: float, group: dist.ProcessGroup, device: torch.device) -> TorchCommunicator:
    try:
        return _over_peer_memory(timeout, group, device)
    except ConfigError as error:  # on all ranks alike
        print(f"minisgl: all-reduces go through NCCL alone. {error}", file=sys.stderr)
        return TorchCommunicator(group, device)


class RingCommunicator(Communicator):
    """A ring of CPU ranks, each sending to the next and receiving from the one before (Patarasuk and Yuan 2009).

    The tensor has one part for each rank. In ``size − 1`` turns (reduce-scatter) every part travels around the ring and
    each rank adds its numbers; in ``size − 1`` more (all-gather) the sums travel. A rank sends ``2 (size − 1) / size``
    times the tensor, the least possible, with as many latencies as turns. All ranks get the same bits.

    Raises `ConfigError` on a GPU, where a send and its receive must be one launch.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        if device.type != "cpu":
            raise ConfigError(f"all_reduce: 'ring' runs between CPU ranks, not on {device.type!r}; use 'auto'")
        self.rank = group.rank()
        self.size = group.size()
        self._group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        parts = x.view(-1).tensor_split(self.size)
        for turn in range(self.size - 1):
            sent, received = parts[(self.rank - turn) % self.size], parts[(self.rank - turn - 1) % self.size]
            received += self._exchange(sent, torch.empty_like(received))
        for turn in range(self.size - 1):
            sent, received = parts[(self.rank - turn + 1) % self.size], parts[(self.rank - turn) % self.size]
            self._exchange(sent, received)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = [x.contiguous()] * self.size
        for turn in range(self.size - 1):
            sent, received = (self.rank - turn) % self.size, (self.rank - turn - 1) % self.size
            parts[received] = self._exchange(parts[sent], torch.empty_like(x))
        return torch.cat(parts, dim=-1)

    def _exchange(self, sent: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """Send to the next rank while filling ``received`` from the one before."""
        sending = self._group.send([sent], (self.rank + 1) % self.size, 0)
        self._group.recv([received], (self.rank - 1) % self.size, 0).wait()
        sending.wait()
        return received
