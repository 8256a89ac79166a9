"""Ranks as processes of their own, which compare their free memory before there is an engine."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import torch
import torch.distributed as dist

from minisgl.distributed.communicator import TorchCommunicator
from minisgl.distributed.rank_process import init_process_group, open_store
from minisgl.engine.memory import check_memory_balance
from minisgl.errors import ConfigError

_CPU = torch.device("cpu")


class FreeMemory(NamedTuple):
    """What a rank has learnt about all of them: the least and most free bytes, and what `check_memory_balance` says."""

    least: int
    most: int
    error: str


def compare_free_memory(free: Sequence[int]) -> list[FreeMemory]:
    """Start a rank for each number, the bytes that its device is said to have free; return what each rank finds."""
    store = open_store()
    size = len(free)
    with ProcessPoolExecutor(size, mp_context=get_context("spawn")) as ranks:
        return list(ranks.map(_compare, range(size), [size] * size, free, [store.port] * size))


def _compare(rank: int, size: int, free: int, port: int) -> FreeMemory:
    group = init_process_group(port, rank, size, _CPU, timeout=60.0)
    # The least of -free is the most, so one all-reduce of two numbers finds both, and no rank.
    numbers = torch.tensor([free, -free])
    dist.all_reduce(numbers, dist.ReduceOp.MIN, group)
    error = ""
    try:
        check_memory_balance(free, TorchCommunicator(group, _CPU), _CPU)
    except ConfigError as imbalance:
        error = str(imbalance)
    dist.destroy_process_group()
    return FreeMemory(int(numbers[0]), -int(numbers[1]), error)
