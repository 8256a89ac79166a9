"""Communicators over torch.distributed: NCCL between GPUs, gloo between CPU ranks."""

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
"""Of the largest tensor that is added up over peer memory: 2,048 tokens of Qwen3-32B. At 84 MB, what is won over NCCL
is 4 to 7 % (`benchmarks/results/all-reduce.json`), and four times as much memory is shared."""


# The older name of the two warns in versions that have the newer one.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class TorchCommunicator(Communicator):
    """The collectives of torch.distributed. On CUDA they are ordered with the current stream's other work, wait for
    nothing on the host, and can be recorded in graphs.

    Args:
        group: of all ranks.
        device: of this rank.
        peers: adds up what fits it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, peers: PeerAllReduce | None = None) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self.peers = peers
        self._group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_reduce`."""
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
        """See `Communicator.all_gather`."""
        rows, width = x.shape
        stacked = x.new_empty((self.size * rows, width))
        _all_gather(stacked, x.contiguous(), group=self._group)
        if self.peers is not None:  # a rank that gave a sum up has brought nonsense, and cannot answer any more
            self.peers.barrier()
        return stacked.view(self.size, rows, width).transpose(0, 1).reshape(rows, self.size * width)


COMMUNICATORS: Registry[Callable[[dist.ProcessGroup, torch.device], Communicator]] = {
    "torch": TorchCommunicator,
    "ring": "minisgl.distributed.communicator:RingCommunicator",
}
"""For the option ``all_reduce``: what builds each over the ranks' process group, on the rank's device."""


def choose_communicator(
    name: str, device: torch.device, timeout: float
) -> Callable[[dist.ProcessGroup, torch.device], Communicator]:
    """The communicator called ``name``: one of `COMMUNICATORS`, or ``"peer-memory"``, or ``"auto"``, which is
    ``"peer-memory"`` between GPUs that reach one another's memory, and else ``"torch"``.

    Args:
        name: of the options.
        device: of the ranks, by its type.
        timeout: seconds that ranks wait for each other over peer memory; elsewhere that is the process group's.

    Raises:
        ConfigError: there is none of that name, or none on this device.
    """
    has_kernels = device.type == "cuda" and find_spec("triton") is not None
    if name == "auto":
        return partial(_fastest, timeout) if has_kernels else TorchCommunicator
    if name != "peer-memory":
        return resolve("all_reduce", name, COMMUNICATORS)
    if not has_kernels:
        raise ConfigError("all_reduce: 'peer-memory' needs CUDA devices and Triton; use 'torch'")
    return partial(_over_peer_memory, timeout)


def peers_of(communicator: Communicator) -> PeerAllReduce | None:
    """What adds up over peer memory for this communicator, if anything does."""
    return communicator.peers if isinstance(communicator, TorchCommunicator) else None


def _over_peer_memory(timeout: float, group: dist.ProcessGroup, device: torch.device) -> TorchCommunicator:
    """NCCL for what is large, and kernels of our own for the rest."""
    from minisgl.distributed.peer_all_reduce import PeerAllReduce

    return TorchCommunicator(group, device, PeerAllReduce(group, device, _PEER_MEMORY_BYTES, timeout=timeout))


def _fastest(timeout: float, group: dist.ProcessGroup, device: torch.device) -> TorchCommunicator:
    try:
        return _over_peer_memory(timeout, group, device)
    except ConfigError as error:  # which all ranks get if one does
        print(f"minisgl: NCCL adds up everything. {error}", file=sys.stderr)
        return TorchCommunicator(group, device)


class RingCommunicator(Communicator):
    """All ranks in a circle, each sending to the next one and receiving from the one before (Patarasuk and Yuan 2009).

    A tensor is cut into as many parts as there are ranks. In ``size − 1`` turns each part travels around the circle
    and every rank adds its own numbers to it; after that each rank has one part that is complete. In ``size − 1`` more
    turns the complete parts travel around. A rank sends ``2 (size − 1) / size`` times the tensor, however many ranks
    there are, which is the least that is possible; but it takes ``2 (size − 1)`` turns, each as long as a message is
    under way, which is most of the time when messages are small.

    A part is added up once, by one rank after the other, so all ranks get the same bits.

    Args:
        group: of all ranks.
        device: of this rank, a CPU.

    Raises:
        ConfigError: on a GPU, where sends and receives that wait for each other must be launched as one.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        if device.type != "cpu":
            raise ConfigError(f"all_reduce: 'ring' runs between CPU ranks, not on {device.type!r}; use 'auto'")
        self.rank = group.rank()
        self.size = group.size()
        self._group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_reduce`."""
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
        """See `Communicator.all_gather`. What a rank has received it passes on."""
        parts = [x.contiguous()] * self.size
        for turn in range(self.size - 1):
            sent, received = (self.rank - turn) % self.size, (self.rank - turn - 1) % self.size
            parts[received] = self._exchange(parts[sent], torch.empty_like(x))
        return torch.cat(parts, dim=-1)

    def _exchange(self, sent: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """Send to the next rank, and fill ``received`` with what the one before sends; its size says how much."""
        sending = self._group.send([sent], (self.rank + 1) % self.size, 0)
        self._group.recv([received], (self.rank - 1) % self.size, 0).wait()
        sending.wait()
        return received
