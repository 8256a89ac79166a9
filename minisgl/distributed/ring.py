"""Collectives out of nothing but sends and receives between neighbours: how a library builds them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from minisgl.core.communicator import Communicator
from minisgl.errors import ConfigError


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
