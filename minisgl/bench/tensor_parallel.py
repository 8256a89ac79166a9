"""Tensor parallelism: whole workloads over more and more ranks, and all-reduces between GPUs, alone and by size."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes

from minisgl.bench.gpu import microseconds
from minisgl.bench.host import STEPS, measure_planes
from minisgl.bench.report import Cell, Report
from minisgl.bench.workloads import NAMES, WORKLOADS, measure_workloads
from minisgl.errors import ConfigError

TARGETS: dict[tuple[str, int, str], float] = {
    ("Qwen3-32B", 4, "mixed"): 9_300,
    ("Qwen3-32B", 4, "bs1"): 6.0,
    ("Qwen3-32B", 4, "prefix"): 0.60,
}
"""On four H200s in bfloat16, in the workload's unit."""

WIDTH = 5120
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256, 384, 512, 1024, 2048, 8192)
"""Of WIDTH elements of bfloat16: the hidden states of a step with so many tokens, 10 KB to 84 MB."""
_WAYS = ("NCCL", "one shot", "two shots", "torch one shot", "torch two shots")
_NORMS = ("NCCL, then norm", "peer memory, then norm", "one kernel")
_ONE_ROW_MICROS = 6.0
_EPS = 1e-6
_HEAD_START = 500_000  # clock cycles in which the host launches all that is timed, and in which late ranks catch up

Times = Mapping[str, Mapping[str, float]]  # microseconds by the way that was taken and the number of rows


def run_tp(
    models: Sequence[str] = ("Qwen3-14B", "Qwen3-32B"),
    ranks: Sequence[int] = (1, 2, 4),
    workloads: Sequence[str] = NAMES,
    repeat: int = 3,
    steps: int = 300,
    options: Mapping[str, Any] = {},
) -> Report:
    """Every workload on every model over every number of ranks, and the time to send steps over each control plane."""
    report = Report("tp", {"workloads": {name: WORKLOADS[name].summary for name in workloads} | STEPS})
    table = report.table("workloads", "model", "workload", "ranks", "all_reduce", "median", "unit", "of linear, %")
    all_reduce = options.get("all_reduce", "auto")
    medians: dict[tuple[str, int, str], float] = {}
    sizes = sorted(set(ranks))
    # A single rank is an engine in this process, which then keeps some of the first GPU for itself: it comes last.
    for size, model in itertools.product(reversed(sizes), dict.fromkeys(models)):
        how = {**options, "tensor_parallel_size": size}
        for name, values in measure_workloads(model, how, workloads, repeat).items():
            workload, median = WORKLOADS[name], statistics.median(values)
            title = f"{model} over {size}, {name}, {workload.unit}"
            report.samples[title], medians[model, size, name] = values, median
            # Targets are about the engine as it comes, on the machine that they were set for.
            aim = TARGETS.get((model, size, name)) if all_reduce == "auto" else None
            if aim is not None and torch.cuda.is_available():
                report.target(title, median, aim, workload.more_is_better)
    for model, name, size in itertools.product(dict.fromkeys(models), workloads, sizes):
        workload, median, alone = WORKLOADS[name], medians[model, size, name], medians.get((model, 1, name))
        share = "–" if alone is None else scaling_efficiency(alone, median, size, workload.more_is_better)
        table.add(model, name, size, all_reduce if size > 1 else "–", median, workload.unit, share)
    report.tables.append(measure_planes([size for size in sizes if size > 1], steps))
    return report


def scaling_efficiency(alone: float, together: float, ranks: int, more_is_better: bool) -> float:
    """Percent of the ideal speed, which is ``ranks`` times that of one rank."""
    faster = together / alone if more_is_better else alone / together
    return 100 * faster / ranks


def run_all_reduce(ranks: Sequence[int] = (2, 4)) -> Report:
    """Time of an all-reduce by NCCL, over peer memory and by PyTorch: alone, and with residual addition and norm."""
    devices = torch.cuda.device_count()
    if max(ranks) > devices:
        raise ConfigError(f"ranks: {max(ranks)} ranks need as many CUDA devices, and there are {devices} here")
    times = {size: _run_ranks(size) for size in ranks}
    report = Report("all-reduce", {"width": WIDTH, "dtype": "bfloat16", "rows": list(ROWS)})
    crossings = report.table("from how many KB it pays", "ranks", "two shots", "norm in the same kernel", "NCCL")
    for size, micros in times.items():
        ours = {rows: min(micros["one shot"].get(rows, two), two) for rows, two in micros["two shots"].items()}
        two_shots = crossing(micros["one shot"], micros["two shots"])
        one_kernel = crossing(micros["peer memory, then norm"], micros["one kernel"])
        crossings.add(size, two_shots, one_kernel, crossing(ours, micros["NCCL"]))
        for title, ways in (("all-reduce", _WAYS), ("all-reduce, residual addition and RMSNorm", _NORMS)):
            table = report.table(f"{title}, {size} ranks, µs", "rows", "KB", *ways)
            for count in ROWS:
                if str(count) in micros[ways[0]]:
                    table.add(count, count * WIDTH * 2 / 1e3, *(micros[way].get(str(count), "–") for way in ways))
        title = f"µs, one row, {size} ranks"
        report.target(title, micros["one shot"]["1"], _ONE_ROW_MICROS, at_least=False)
    return report


def _run_ranks(size: int) -> Times:
    """Start processes that run `measure_all_reduce`, and read the times that the first has written."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            start_processes(measure_all_reduce, (size, directory), size)
        except ProcessException as error:
            raise ConfigError(f"ranks: [{error.error_index}] of {size} failed: {str(error).strip()[-2000:]}") from error
        times: Times = json.loads(Path(directory, "times.json").read_text(encoding="utf-8"))
        return times


def crossing(before: Mapping[str, float], after: Mapping[str, float]) -> Cell:
    """KB from which ``after`` is faster, between the two sizes where the lines through the times meet; – if nowhere."""
    lead = [(int(rows), before[rows] - after[rows]) for rows in before if rows in after]
    for (few, less), (many, more) in itertools.pairwise(lead):
        if less <= 0 < more:
            return (few + (many - few) * less / (less - more)) * WIDTH * 2 / 1e3
    return "–" if not lead or lead[0][1] <= 0 else lead[0][0] * WIDTH * 2 / 1e3


def measure_all_reduce(rank: int, size: int, directory: str) -> None:
    """Be one rank: meet the others through a file in ``directory``, measure, and let rank 0 write ``times.json``."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = FileStore(str(Path(directory, "store")), size)
    limit = timedelta(seconds=60)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=limit, device_id=device)
    with torch.inference_mode():
        times = _rank_times(device)
    if rank == 0:
        Path(directory, "times.json").write_text(json.dumps(times), encoding="utf-8")
    os._exit(0)  # graphs that hold NCCL's kernels keep its communicators from going in order


def _rank_times(device: torch.device) -> Times:
    """Microseconds of every way and number of rows, where it applies, of the slowest rank."""
    import torch.distributed._symmetric_memory as symmetric_memory

    from minisgl.distributed.peer_all_reduce import PeerAllReduce
    from minisgl.kernels.norm import add_and_norm

    world = dist.group.WORLD
    assert world is not None
    x = torch.zeros((max(ROWS), WIDTH), dtype=torch.bfloat16, device=device)
    weight = torch.ones(WIDTH, dtype=torch.bfloat16, device=device)
    one_shot_bytes = (5 << 20) // world.size()
    forced = PeerAllReduce(world, device, x.nbytes, one_shot_bytes)
    chosen = PeerAllReduce(world, device, x.nbytes)
    symmetric = symmetric_memory.empty(x.shape, dtype=x.dtype, device=device)
    symmetric_memory.rendezvous(symmetric, world)
    symmetric.zero_()
    name, torch_ops = world.group_name, torch.ops.symm_mem

    def start_together() -> None:
        """Wait on the device until the host has launched everything, and then for the other ranks."""
        torch.cuda._sleep(_HEAD_START)
        forced.one_shot(x[:1])

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
    times: dict[str, dict[str, float]] = {}
    for way, (run, most_bytes) in ways.items():
        memory = symmetric if way.startswith("torch") else x
        times[way] = {}
        for count in ROWS:
            rows = memory[:count]
            if rows.nbytes <= most_bytes:
                mine = microseconds([partial(run, rows)], before=start_together)
                slowest = torch.tensor([mine], device=device)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                times[way][str(count)] = round(slowest.item(), 2)
    forced.check()
    chosen.check()
    return times
