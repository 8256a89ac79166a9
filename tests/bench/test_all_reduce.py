"""The benchmark of all-reduces. Nothing that was timed is asserted."""

from __future__ import annotations

import pytest
import torch

from minisgl.bench import tensor_parallel
from minisgl.bench.tensor_parallel import crossing, run_all_reduce
from minisgl.errors import ConfigError


def test_it_says_how_many_gpus_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"ranks: 4 ranks need .* and there are 2 here"):
        run_all_reduce([2, 4])


def test_where_lines_cross() -> None:
    kilobytes = tensor_parallel.WIDTH * 2 / 1e3
    falling, rising = {"1": 1.0, "3": 5.0, "9": 9.0}, {"1": 3.0, "3": 3.0, "9": 3.0}
    assert crossing(falling, rising) == pytest.approx(2 * kilobytes)
    assert crossing(rising, falling) == 1 * kilobytes  # faster from the smallest size on
    assert crossing({"1": 1.0, "3": 1.0}, rising) == "–"
    assert crossing({"1": 1.0}, {"4": 0.5}) == "–"


def test_a_rank_that_fails_ends_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here that they could run on; it is said at once, and not after the time that they have."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"(?s)ranks: \[.*\] of 2 failed: .*Traceback .*Error"):
        run_all_reduce([2])


def test_the_report_has_a_row_a_size_and_the_crossings(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = ["NCCL", "one shot", "two shots", "torch one shot", "torch two shots"]
    ways += ["NCCL, then norm", "peer memory, then norm", "one kernel"]
    times = {way: {str(rows): float(number + 1) for rows in tensor_parallel.ROWS} for number, way in enumerate(ways)}
    times["one shot"] = {"1": 3.5}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(tensor_parallel, "_run_ranks", lambda size: times)
    report = run_all_reduce([2])
    crossings, plain, norms = report.tables
    assert [row[0] for row in plain.rows] == list(tensor_parallel.ROWS) == [row[0] for row in norms.rows]
    assert plain.rows[0][3:5] == [3.5, 3.0]
    assert plain.rows[1][3] == "–"
    smallest = tensor_parallel.WIDTH * 2 / 1e3
    assert crossings.rows == [[2, smallest, "–", smallest]]
    assert report.targets[0].value == 3.5


@pytest.mark.gpu
@pytest.mark.needs("2 GPUs")
def test_every_way_is_measured() -> None:
    report = run_all_reduce([2])
    assert all(isinstance(cell, float) for table in report.tables[1:] for row in table.rows[:4] for cell in row[2:])
