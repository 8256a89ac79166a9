"""The command from end to end, over two tiny ranks. Nothing that was timed is asserted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from minisgl.bench.host import decode_batch_of, prefill_batch_of
from minisgl.bench.report import Table
from minisgl.bench.tensor_parallel import scaling_efficiency
from tests.bench.test_commands import bench, small_workloads
from tests.model_zoo import tiny_checkpoint

__all__ = ["small_workloads"]


OPTIONS = ["--set", "device=cpu", "max_seq_len=256"]
COLUMNS = ["model", "workload", "ranks", "all_reduce", "median", "unit", "of linear, %"]


@pytest.mark.usefixtures("small_workloads")
def test_tp_runs_every_workload_over_every_number_of_ranks(tmp_path: Path) -> None:
    model, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    sizes = ["--ranks", "1", "2", "--work", "bs1", "prefix", "--repeat", "1", "--steps", "5"]
    record = bench(tmp_path, "tp", "--model", str(model), *sizes, *OPTIONS)
    workloads, planes = record["tables"]
    assert workloads["columns"] == COLUMNS
    assert [row[1:4] for row in workloads["rows"]] == [
        ["bs1", 1, "–"],
        ["bs1", 2, "auto"],
        ["prefix", 1, "–"],
        ["prefix", 2, "auto"],
    ]
    assert all(row[4] > 0 for row in workloads["rows"])
    for alone, together in zip(workloads["rows"][::2], workloads["rows"][1::2], strict=True):
        assert alone[6] == 100.0
        assert together[6] == pytest.approx(100 * alone[4] / together[4] / 2)  # of both, less is better
    assert [row[:2] for row in planes["rows"]] == [
        [plane, kind] for plane in ("shared-memory", "zmq") for kind in ("decode", "prefill")
    ]
    assert [row[3] for row in planes["rows"]] == [2] * 4
    assert all(0 < row[4] <= row[5] for row in planes["rows"])
    assert record["targets"] == []  # they are about four H200s


@pytest.mark.usefixtures("small_workloads")
def test_another_all_reduce_is_named_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And numbers of ranks that are given twice are measured once. The planes know nothing of it: they stay out."""
    monkeypatch.setattr("minisgl.bench.tensor_parallel.measure_planes", lambda ranks, steps: Table("planes", ()))
    model, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    sizes = ["--ranks", "1", "2", "1", "--work", "bs1", "--repeat", "1", "--steps", "5"]
    record = bench(tmp_path, "tp", "--model", str(model), *sizes, *OPTIONS, "all_reduce=ring")
    workloads, _ = record["tables"]
    assert [row[2:4] for row in workloads["rows"]] == [[1, "–"], [2, "ring"]]
    # The last is that of one rank, which keeps some of the first GPU.
    assert list(record["samples"]) == [f"{model} over {ranks}, bs1, ms/token" for ranks in (2, 1)]


def test_efficiency_is_of_what_as_many_ranks_could_do() -> None:
    assert scaling_efficiency(alone=100.0, together=300.0, ranks=4, more_is_better=True) == 75.0
    assert scaling_efficiency(alone=8.0, together=4.0, ranks=4, more_is_better=False) == 50.0


def test_the_steps_are_what_they_are_said_to_be() -> None:
    decode, prefill = decode_batch_of(256), prefill_batch_of(8, 1024)
    assert (decode.num_rows, decode.num_tokens, decode.num_decode, len(decode.page_index)) == (256, 256, 256, 16)
    assert (prefill.num_rows, prefill.num_tokens, prefill.num_decode) == (8, 8192, 0)
    assert sum(len(new.tokens) for new in prefill.new_requests) == 8192
    assert np.array_equal(prefill.q_lens, [1024] * 8)
