"""Several ranks in one process: a thread each, joined by gloo. Enough for everything but faults, and much quicker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from minisgl.distributed.communicator import TorchCommunicator
from minisgl.layers.sharding import Communicator

CPU = torch.device("cpu")
T = TypeVar("T")
MakeCommunicator = Callable[[dist.ProcessGroup, torch.device], Communicator]


def on_ranks(size: int, job: Callable[[Communicator], T], make: MakeCommunicator = TorchCommunicator) -> list[T]:
    """What ``job`` returns on each of ``size`` ranks, in their order. An error of any is raised.

    No group goes before all ranks are done: it would cut off a rank that is still connecting.
    """
    store = dist.HashStore()

    def run(rank: int) -> tuple[T, dist.ProcessGroup]:
        group = process_group(store, rank, size)
        return job(make(group, CPU)), group

    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(run, rank) for rank in range(size)]
        return [rank.result(60)[0] for rank in ranks]


def process_group(store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    """A group of gloo that is not the process's only one."""
    limit = timedelta(seconds=20)
    group = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, limit)
    group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


class TakingTurns(Communicator):
    """Only one rank computes at a time, until it waits for the others: Triton's interpreter is not for several threads.

    Args:
        ranks: between which this is one.
        turn: held by the rank that computes.
    """

    def __init__(self, ranks: Communicator, turn: threading.Lock) -> None:
        self.rank = ranks.rank
        self.size = ranks.size
        self._ranks = ranks
        self._turn = turn

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._wait(self._ranks.all_reduce, x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._wait(self._ranks.all_gather, x)

    def _wait(self, collective: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        self._turn.release()
        try:
            return collective(x)
        finally:
            self._turn.acquire()


def in_turns(size: int, job: Callable[[Communicator], T]) -> list[T]:
    """`on_ranks`, one rank at a time."""
    turn = threading.Lock()

    def locked(ranks: Communicator) -> T:
        with turn:
            return job(TakingTurns(ranks, turn))

    return on_ranks(size, locked)


class Position(Communicator):
    """The place of a rank among others that are not there."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nobody is there")

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nobody is there")
