"""Communicators over torch.distributed: NCCL between GPUs, gloo between CPU ranks."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.distributed as dist

from minisgl.core.communicator import Communicator
from minisgl.core.registry import Registry
from minisgl.errors import ConfigError

_PEER_MEMORY_BYTES = 24 << 20
"""Of the largest tensor that is added up over peer memory: 2,048 tokens of Qwen3-32B. Beyond, what is won over NCCL is
less than a twentieth (`benchmarks/results/all-reduce.json`), and four times as much memory is shared."""


class SmallAllReduce(Protocol):
    """A way to add up small tensors that is faster than the general one."""

    def fits(self, x: torch.Tensor) -> bool:
        """Whether it can add these up, and is the faster one. All ranks answer the same."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_reduce`. On CUDA it can be recorded in a graph."""
        ...


COMMUNICATORS: Registry[Callable[[dist.ProcessGroup, torch.device], Communicator]] = Registry("communicator")
"""By the name that ``all_reduce`` has in the options: built over the ranks' process group, on the rank's device."""

# The older name of the two warns in versions that have the newer one.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@COMMUNICATORS.register("torch")
class TorchCommunicator:
    """The collectives of torch.distributed. On CUDA they are ordered with the current stream's other work, wait for
    nothing on the host, and can be recorded in graphs.

    Args:
        group: of all ranks.
        device: of this rank.
        small: adds up what fits it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, small: SmallAllReduce | None = None) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self._group = group
        self._small = small

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_reduce`."""
        if self._small is not None and self._small.fits(x):
            return self._small.all_reduce(x)
        x = x.contiguous()
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_gather`."""
        rows, width = x.shape
        stacked = x.new_empty((self.size * rows, width))
        _all_gather(stacked, x.contiguous(), group=self._group)
        return stacked.view(self.size, rows, width).transpose(0, 1).reshape(rows, self.size * width)


def choose_communicator(name: str, device: torch.device) -> Callable[[dist.ProcessGroup, torch.device], Communicator]:
    """The communicator called ``name``: registered, or ``"peer-memory"``; ``"auto"`` is ``"torch"``.

    Raises:
        ConfigError: there is none of that name, or none on this device.
    """
    if name != "peer-memory":
        return COMMUNICATORS.get("torch" if name == "auto" else name)
    if device.type != "cuda" or find_spec("triton") is None:
        raise ConfigError("all_reduce: 'peer-memory' needs CUDA devices and Triton; use 'torch'")
    return _over_peer_memory


def _over_peer_memory(group: dist.ProcessGroup, device: torch.device) -> TorchCommunicator:
    """NCCL for what is large, and kernels of our own for the rest."""
    from minisgl.distributed.peer_all_reduce import PeerAllReduce

    return TorchCommunicator(group, device, PeerAllReduce(group, device, _PEER_MEMORY_BYTES))
