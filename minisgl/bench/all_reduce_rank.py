"""One rank of the benchmark of all-reduces: ``python -m minisgl.bench.all_reduce_rank RANK RANKS DIRECTORY``."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch.distributed import FileStore  # type: ignore[attr-defined]

from minisgl.bench.all_reduce import ROWS, WIDTH
from minisgl.bench.gpu_timing import Call
from minisgl.distributed.peer_all_reduce import PeerAllReduce
from minisgl.kernels.norm import add_and_norm

_EPS = 1e-6
_CALLS_IN_GRAPH = 20
_REPLAYS = 11
_HEAD_START = 500_000
"""Clock cycles in which the host launches all that is timed, and in which late ranks catch up."""


def microseconds(call: Call, meet: Call) -> float:
    """Median time of one of the calls that are replayed one after the other from a graph.

    Ranks start together: each waits on the device until the host has launched all, and for the others. Then only the
    device is timed.

    Args:
        meet: waits for all ranks on the device.
    """
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS_IN_GRAPH):
            call()
    times: list[float] = []
    for _ in range(_REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_HEAD_START)
        meet()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / _CALLS_IN_GRAPH)
    return statistics.median(times)


def measure(device: torch.device) -> dict[str, dict[str, float]]:
    """Microseconds of every way and number of rows, where it applies, of the slowest rank."""
    world = dist.group.WORLD
    assert world is not None
    size = world.size()
    x = torch.zeros((max(ROWS), WIDTH), dtype=torch.bfloat16, device=device)
    weight = torch.ones(WIDTH, dtype=torch.bfloat16, device=device)
    one_shot_bytes = (5 << 20) // size
    forced = PeerAllReduce(world, device, x.nbytes, one_shot_bytes)
    chosen = PeerAllReduce(world, device, x.nbytes)
    symmetric = symmetric_memory.empty(x.shape, dtype=x.dtype, device=device)
    symmetric_memory.rendezvous(symmetric, world)
    symmetric.zero_()
    name = world.group_name
    torch_ops = torch.ops.symm_mem

    def nccl_and_norm(rows: torch.Tensor) -> None:
        dist.all_reduce(rows)
        add_and_norm(rows, rows, weight, _EPS)

    ways: dict[str, tuple[Callable[[torch.Tensor], object], int]] = {
        "NCCL": (dist.all_reduce, x.nbytes),
        "one shot": (forced.one_shot, one_shot_bytes),
        "two shots": (forced.two_shot, x.nbytes),
        "torch one shot": (lambda rows: torch_ops.one_shot_all_reduce(rows, "sum", name), 6 << 20),
        "torch two shots": (lambda rows: torch_ops.two_shot_all_reduce_(rows, "sum", name), x.nbytes),
        "NCCL, then norm": (nccl_and_norm, 12 << 20),
        "peer memory, then norm": (lambda rows: add_and_norm(chosen.all_reduce(rows), rows, weight, _EPS), 12 << 20),
        "one kernel": (lambda rows: chosen.add_and_norm(rows, rows, weight, _EPS), 12 << 20),
    }
    meeting = x[:1]
    times: dict[str, dict[str, float]] = {}
    for way, (run, most_bytes) in ways.items():
        memory = symmetric if way.startswith("torch") else x
        times[way] = {}
        for count in ROWS:
            rows = memory[:count]
            if rows.nbytes <= most_bytes:
                mine = microseconds(partial(run, rows), partial(forced.one_shot, meeting))
                slowest = torch.tensor([mine], device=device)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                times[way][str(count)] = round(slowest.item(), 2)
    forced.check()
    chosen.check()
    return times


def main() -> None:
    """Meet the other ranks, measure, and leave the times to `minisgl.bench.all_reduce`."""
    rank, size, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = FileStore(str(directory / "store"), size)
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60), device_id=device
    )
    with torch.inference_mode():
        times = measure(device)
    if rank == 0:
        (directory / "times.json").write_text(json.dumps(times), encoding="utf-8")
    os._exit(0)  # graphs that hold NCCL's kernels keep its communicators from going in order


if __name__ == "__main__":
    main()
