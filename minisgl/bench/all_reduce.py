"""All-reduce between the GPUs of one host: NCCL, our kernels over peer memory, and PyTorch's, by size."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch

from minisgl.bench.report import Cell, Report, Table, Target
from minisgl.errors import ConfigError

WIDTH = 5120
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256, 384, 512, 1024, 2048, 8192)
"""Of WIDTH elements of bfloat16: the hidden states of a step with so many tokens, 10 KB to 84 MB."""

_WAYS = ("NCCL", "one shot", "two shots", "torch one shot", "torch two shots")
_NORMS = ("NCCL, then norm", "peer memory, then norm", "one kernel")
_ONE_ROW = 6.0
_SECONDS = 300.0

Times = Mapping[str, Mapping[str, float]]
"""Microseconds by the way that was taken and the number of rows."""


def run_all_reduce(ranks: Sequence[int]) -> Report:
    """Time of an all-reduce, alone and with the residual addition and norm after it.

    Args:
        ranks: numbers of GPUs that take part, one after the other.

    Raises:
        ConfigError: there are fewer CUDA devices.
    """
    devices = torch.cuda.device_count()
    if max(ranks) > devices:
        raise ConfigError(f"ranks: {max(ranks)} ranks need as many CUDA devices, and there are {devices} here")
    times = {size: _run_ranks(size) for size in ranks}
    tables = [table for size in ranks for table in _tables(size, times[size])]
    targets = [
        Target(f"µs, one row, {size} ranks", times[size]["one shot"]["1"], _ONE_ROW, at_least=False) for size in ranks
    ]
    settings = {"ranks": list(ranks), "width": WIDTH, "dtype": "bfloat16", "rows": list(ROWS)}
    return Report("all-reduce", settings, [_crossings(times), *tables], targets)


def _run_ranks(size: int) -> Times:
    """Start the ranks, `minisgl.bench.all_reduce_rank`, and read what the first has written."""
    with tempfile.TemporaryDirectory() as directory:
        logs = [Path(directory, f"rank-{rank}.log") for rank in range(size)]
        ranks = [_start(rank, size, directory, log) for rank, log in enumerate(logs)]
        end = time.monotonic() + _SECONDS
        try:
            codes: list[int | None] = [None]
            while None in codes:
                codes = [process.poll() for process in ranks]
                failed = [rank for rank, code in enumerate(codes) if code]
                if failed or time.monotonic() > end:
                    said = "".join(logs[rank].read_text(errors="replace") for rank in failed[:1]).strip()
                    raise ConfigError(
                        f"ranks: {failed or 'all'} of {size} failed or did not end in {_SECONDS:.0f} s: {said[-2000:]}"
                    )
                time.sleep(0.05)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        times: Times = json.loads(Path(directory, "times.json").read_text(encoding="utf-8"))
        return times


def _start(rank: int, size: int, directory: str, log: Path) -> subprocess.Popen[bytes]:
    """A rank. What libraries say in it goes to ``log``: it is of interest if the rank fails."""
    command = [sys.executable, "-m", "minisgl.bench.all_reduce_rank", str(rank), str(size), directory]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def _tables(size: int, times: Times) -> list[Table]:
    tables = []
    for title, ways in (("all-reduce", _WAYS), ("all-reduce, residual addition and RMSNorm", _NORMS)):
        rows: list[Sequence[Cell]] = [
            [count, count * WIDTH * 2 / 1e3, *(times[way].get(str(count), "–") for way in ways)]
            for count in ROWS
            if str(count) in times[ways[0]]
        ]
        tables.append(Table(f"{title}, {size} ranks, µs", ["rows", "KB", *ways], rows))
    return tables


def _crossings(times: Mapping[int, Times]) -> Table:
    """From how many bytes another way is faster."""
    rows: list[Sequence[Cell]] = []
    for size, of_size in times.items():
        ours = {rows: min(of_size["one shot"].get(rows, two), two) for rows, two in of_size["two shots"].items()}
        rows.append(
            [
                size,
                crossing(of_size["one shot"], of_size["two shots"]),
                crossing(of_size["peer memory, then norm"], of_size["one kernel"]),
                crossing(ours, of_size["NCCL"]),
            ]
        )
    return Table("from how many KB it pays", ["ranks", "two shots", "norm in the same kernel", "NCCL"], rows)


def crossing(before: Mapping[str, float], after: Mapping[str, float]) -> Cell:
    """KB from which ``after`` is faster, between the two sizes where the lines through the times meet; – if nowhere."""
    lead = [(int(rows), before[rows] - after[rows]) for rows in before if rows in after]
    for (few, less), (many, more) in pairwise(lead):
        if less <= 0 < more:
            return (few + (many - few) * less / (less - more)) * WIDTH * 2 / 1e3
    return "–" if not lead or lead[0][1] <= 0 else lead[0][0] * WIDTH * 2 / 1e3
