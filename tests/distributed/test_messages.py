"""Messages say what was meant, to the last field, and never more than data."""

from __future__ import annotations

import os
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from minisgl.batch import Batch, NewRequest
from minisgl.child_process import Ready
from minisgl.config import EngineConfig
from minisgl.context import AttentionChoice
from minisgl.distributed import control_plane, rank_process
from minisgl.distributed.messages import (
    Endpoint,
    EngineInfo,
    RankOptions,
    StepReport,
    decode_batch,
    decode_report,
    encode_batch,
    encode_report,
)
from minisgl.distributed.rank_process import RankWorker, ReportReader, send_report
from minisgl.errors import EngineDead
from minisgl.request import TokenLogprobs
from minisgl.sampling_params import SamplingParams

ODD = SamplingParams(
    max_tokens=7,
    min_tokens=2,
    temperature=0.3,
    top_k=5,
    top_p=0.9,
    min_p=0.1,
    presence_penalty=-1.0,
    frequency_penalty=0.5,
    repetition_penalty=1.5,
    logit_bias={7: -2.5, 100000: 1.0},
    stop="end",
    stop_token_ids=[3, 5],
    ignore_eos=True,
    seed=2**63 - 1,
    logprobs=3,
    n=2,
)


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def batch(*new_requests: NewRequest) -> Batch:
    """A decode row, and one that verifies two drafts."""
    return Batch(
        slots=ints(3, 1),
        cu_seqlens_q=ints(0, 1, 4),
        seq_lens=ints(9, 3),
        positions=ints(8, 0, 1, 2),
        token_slots=ints(3, 1, 1, 1),
        out_locs=ints(40, 16, 17, 2**31 - 1),
        sample_rows=ints(0, 1, 1, 1),
        output_index=ints(5, 2, 3, 4),
        num_decode=1,
        new_requests=new_requests,
        page_index=ints(),
        page_value=ints(),
        drafts=ints(8, 2**31 - 1),
    )


def test_a_batch_survives_the_way() -> None:
    sent = batch(
        NewRequest(1, ints(5, 6, 7), 3, ODD, (2, 9), 2**62), NewRequest(3, ints(1), 1, SamplingParams(), (), 0)
    )
    received = decode_batch(encode_batch(sent))
    for field in fields(Batch):
        if field.name != "new_requests":
            np.testing.assert_array_equal(getattr(received, field.name), getattr(sent, field.name), strict=True)
    for ours, theirs in zip(received.new_requests, sent.new_requests, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens, strict=True)
        assert (ours.slot, ours.prompt_len, ours.stop_ids, ours.seed) == (
            theirs.slot,
            theirs.prompt_len,
            theirs.stop_ids,
            theirs.seed,
        )
        assert ours.params == theirs.params


def test_a_decode_step_is_small() -> None:
    """Ten arrays of one int32 a row, and a few bytes more."""
    rows = np.arange(256, dtype=np.int32)
    step = Batch(rows, np.arange(257, dtype=np.int32), rows, rows, rows, rows, rows, rows, 256)
    assert len(encode_batch(step)) < 8 * 4 * 257 + 64


def test_the_options_of_a_rank_survive_the_way() -> None:
    config = EngineConfig(model="x", graph_batches=(1, 2), memory_ratio=1, tensor_parallel_size=2)
    options = RankOptions(
        name="rank-1",
        rank=1,
        config=config,
        path="/models/x",
        model_config=b"its sizes",
        store_port=4711,
        endpoint=Endpoint("1 of 2", [5, 6]),
        reports=7,
        threads=2,
    )
    assert msgspec.json.decode(msgspec.json.encode(options), type=RankOptions) == options


def test_what_a_rank_says_of_its_engine_survives_the_way() -> None:
    info = EngineInfo(5, None, 6, 7, 8, 9, AttentionChoice("torch", "torch", "it was asked for"))
    report = msgspec.json.encode(Ready(msgspec.to_builtins(info)))
    assert msgspec.convert(msgspec.json.decode(report, type=Ready).info, EngineInfo) == info


@pytest.mark.parametrize(
    "report",
    [
        StepReport(3, ints(4, 5).tobytes(), None, 2**64 - 1),
        StepReport(4, b"", [None, TokenLogprobs(4, -0.5, ((4, -0.5), (5, float("-inf"))))], 0),
    ],
)
def test_a_report_survives_the_way(report: StepReport) -> None:
    assert decode_report(encode_report(report)) == report


def test_reports_are_read_as_they_come_in_pieces() -> None:
    reader, writer = os.pipe()
    alarm, bell = os.pipe()
    inbox = ReportReader(reader, alarm, lambda: None)
    sent = [StepReport(number, bytes(number * 100), None, 0) for number in range(30)]
    for report in sent[:20]:
        send_report(writer, report)
    message = encode_report(sent[20])
    whole = len(message).to_bytes(4, "little") + message
    os.write(writer, whole[:3])
    assert [inbox.read_nowait() for _ in range(21)] == [*sent[:20], None]
    os.write(writer, whole[3:10])
    assert inbox.read_nowait() is None
    os.write(writer, whole[10:])
    assert inbox.read(1.0) == sent[20]
    with pytest.raises(TimeoutError):
        inbox.read(0.05)
    inbox.close()
    for fd in (writer, alarm, bell):
        os.close(fd)


def test_an_alarm_ends_the_wait_for_a_report() -> None:
    reader, writer = os.pipe()
    alarm, bell = os.pipe()
    rung = False

    def check() -> None:
        if rung:
            raise EngineDead("rank 1 was killed")

    inbox = ReportReader(reader, alarm, check)
    os.close(bell)
    rung = True
    with pytest.raises(EngineDead):
        inbox.read(60.0)
    inbox.close()
    os.close(writer)
    os.close(alarm)


class NothingToDo:
    """A control plane that ends after two receives without a step."""

    left = 2

    def receive(self, timeout: float | None = None) -> bytes | None:
        self.left -= 1
        if self.left < 0:
            raise EOFError
        return None

    def close(self) -> None:
        """Has nothing to close."""


def test_a_rank_at_rest_and_a_driver_that_waits_send_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the server the driver is a child, too."""
    beats: list[str] = []
    monkeypatch.setattr(rank_process, "beat", lambda: beats.append("rank or reader"))
    monkeypatch.setattr(control_plane, "beat", lambda: beats.append("control plane"))
    engine: Any = SimpleNamespace(communicator=None)
    none: dict[str, Any] = {"name": "", "path": "", "model_config": b"", "store_port": 0, "reports": 0}
    options = RankOptions(rank=0, config=EngineConfig(), endpoint=Endpoint(""), threads=1, **none)
    with pytest.raises(EOFError):
        RankWorker(engine, NothingToDo(), options).run()
    assert len(beats) == 3, "one a turn"
    reader, writer = os.pipe()
    inbox = ReportReader(reader, reader, lambda: None)
    with pytest.raises(TimeoutError):
        inbox.read(0.05)
    assert len(beats) > 3
    inbox.close()
    os.close(writer)
    with pytest.raises(TimeoutError):
        control_plane.wait_until(lambda: False, 0.01, lambda: None, "ranks")
    assert "control plane" in beats
