"""Parts that fail on one rank only, for ranks to find by their paths."""

from __future__ import annotations

import gc
import math
import time
from functools import partial

import torch
import torch.distributed as dist

from minisgl.attention.torch_backend import TorchAttention
from minisgl.context import AttentionSpec
from minisgl.distributed.communicator import TorchCommunicator
from minisgl.distributed.peer_all_reduce import PeerAllReduce
from minisgl.errors import EngineDead
from minisgl.kvcache.page_store import NoPageStore
from minisgl.kvcache.pool import KVCache


class Store(NoPageStore):
    """A page store that is not the default."""


class FailsOnRank1(TorchAttention):
    """Attention that raises after a few steps, on rank 1."""

    def __init__(self, kv_cache: KVCache) -> None:
        super().__init__(kv_cache)
        self.calls = 0

    def attend(self, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        self.calls += 1
        if self.calls > 10 and dist.get_rank() == 1:
            raise ArithmeticError("the abacus is broken")
        return super().attend(q, spec)


class SlowOnce(TorchAttention):
    """Attention whose kernel, as it were, is compiled for three seconds in the first step after the start."""

    compiled = False

    def attend(self, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        if gc.get_freeze_count() and not self.compiled:
            time.sleep(3.0)
            self.compiled = True
        return super().attend(q, spec)


class HangsInAStep(TorchAttention):
    """Attention that hangs in the first step after the start."""

    def attend(self, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        if gc.get_freeze_count():
            time.sleep(3600)
        return super().attend(q, spec)


class CountsWhatIsFrozen(TorchAttention):
    """Attention that says how many objects of a rank are frozen, as soon as any are."""

    def attend(self, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        if frozen := gc.get_freeze_count():
            raise ArithmeticError(f"{frozen} objects are frozen")
        return super().attend(q, spec)


class WrongOnRank1(TorchCommunicator):
    """Rank 1 gathers other numbers than the rest."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = super().all_gather(x)
        return gathered.flip(-1) if self.rank == 1 and x.is_floating_point() else gathered


class LosesAPeer(PeerAllReduce):
    """Stands for sums over peer memory between CPU ranks. On one rank they have waited in vain after some calls.

    A rank that has is silent, for which the others wait in the next barrier.

    Args:
        group: of the ranks.
        left: how many sums are complete on this rank.
        patience: seconds that others wait for a silent rank before they know.
    """

    def __init__(self, group: dist.ProcessGroup, left: float, patience: float) -> None:
        self._rank = group.rank()
        self._group = group
        self._left = left
        self._patience = patience

    def fits(self, x: torch.Tensor) -> bool:
        return True

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=self._group)
        self._left -= 1
        return x if self._left > 0 else x + 1e3

    def barrier(self) -> None:
        heard = torch.tensor([self._left > 0])
        dist.all_reduce(heard, dist.ReduceOp.MIN, group=self._group)
        if not heard and self._left > 0:
            time.sleep(self._patience)
            self._left = 0

    def finish(self) -> None:
        self.check()

    def check(self) -> None:
        if self._left <= 0:
            raise EngineDead(f"rank {self._rank} waited in vain for another rank")


def _losing(rank: int, sums: int, patience: float, group: dist.ProcessGroup, device: torch.device) -> TorchCommunicator:
    left = sums if group.rank() == rank else math.inf
    return TorchCommunicator(group, device, LosesAPeer(group, left, patience))


# The tiny models add up five times a step; the third one is cut short.
rank_0_loses = partial(_losing, 0, 13, 120.0)
rank_1_loses = partial(_losing, 1, 13, 120.0)
loses_while_it_starts = partial(_losing, 1, 0, 0.0)
