"""The command from end to end, over two tiny ranks. Nothing that was timed is asserted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from minisgl.bench.control_planes import decode_batch_of, prefill_batch_of
from minisgl.bench.tp import _efficiency
from tests.bench.test_commands import bench, small_workloads
from tests.model_zoo import tiny_checkpoint

__all__ = ["small_workloads"]


@pytest.mark.usefixtures("small_workloads")
def test_tp_runs_every_workload_over_every_number_of_ranks(tmp_path: Path) -> None:
    model, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    sizes = ["--ranks", "1", "2", "--work", "bs1", "prefix", "--repeat", "1", "--steps", "5"]
    record = bench(tmp_path, "tp", "--model", str(model), *sizes, "--set", "device=cpu", "max_seq_len=256")
    workloads, planes = record["tables"]
    assert [row[1:3] for row in workloads["rows"]] == [["bs1", 1], ["bs1", 2], ["prefix", 1], ["prefix", 2]]
    assert all(row[3] > 0 for row in workloads["rows"])
    assert [row[5] for row in workloads["rows"]][::2] == [100.0, 100.0]
    assert [row[:2] for row in planes["rows"]] == [
        [plane, kind] for plane in ("shared-memory", "zmq") for kind in ("decode", "prefill")
    ]
    assert all(0 < row[4] <= row[5] for row in planes["rows"])
    assert record["targets"] == []  # they are about four H200s


def test_efficiency_is_of_what_as_many_ranks_could_do() -> None:
    medians = {("m", 1, "mixed"): 100.0, ("m", 4, "mixed"): 300.0, ("m", 1, "bs1"): 8.0, ("m", 4, "bs1"): 4.0}
    assert _efficiency(medians, "m", 4, "mixed") == 75.0
    assert _efficiency(medians, "m", 4, "bs1") == 50.0
    assert _efficiency({("m", 4, "bs1"): 4.0}, "m", 4, "bs1") == "–"


def test_the_steps_are_what_they_are_said_to_be() -> None:
    decode, prefill = decode_batch_of(256), prefill_batch_of(8, 1024)
    assert (decode.num_rows, decode.num_tokens, decode.num_decode, len(decode.page_index)) == (256, 256, 256, 16)
    assert (prefill.num_rows, prefill.num_tokens, prefill.num_decode) == (8, 8192, 0)
    assert sum(len(admission.tokens) for admission in prefill.admissions) == 8192
    assert np.array_equal(prefill.q_lens, [1024] * 8)
