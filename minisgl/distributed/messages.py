"""What the driver and its ranks tell each other. Numbers of a step are raw int32; nothing is pickled."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from minisgl.batch import Batch, NewRequest
from minisgl.child_process import ChildOptions
from minisgl.config import EngineConfig
from minisgl.context import AttentionChoice
from minisgl.request import Int32Array, TokenLogprobs
from minisgl.sampling_params import SamplingParams


class Endpoint(msgspec.Struct, frozen=True):
    """Where a rank finds its end of the control plane.

    Args:
        address: whatever the plane makes of it.
        fds: open files that the rank inherits.
    """

    address: str
    fds: list[int] = []


class RankOptions(ChildOptions, frozen=True, kw_only=True):
    """What a rank is told when it is started.

    Args:
        rank: which one it is.
        config: options of the engine.
        path: directory of the checkpoint.
        store_port: of the store where the ranks meet.
        endpoint: of the control plane.
        reports: file to which the rank writes `Stepped` messages.
        threads: of PyTorch on the CPU.
    """

    rank: int
    config: EngineConfig
    path: str
    store_port: int
    endpoint: Endpoint
    reports: int
    threads: int


class EngineInfo(msgspec.Struct, frozen=True):
    """What the driver has to know of a rank's engine.

    Args:
        num_pages: KV pages, the same on all ranks.
        page_bytes, model_bytes, graph_bytes: on this rank, as in `minisgl.engine.engine.Engine`.
        max_seq_len: longest sequence.
        attention: the attention backends, and why it is these.
    """

    num_pages: int
    page_bytes: int
    model_bytes: int
    graph_bytes: int
    max_seq_len: int
    attention: AttentionChoice


class Stepped(msgspec.Struct, frozen=True):
    """A step is complete.

    Args:
        step: its number, from 0.
        tokens: int32[S].
        logprobs: as in `StepResult`.
        digest: of what the rank was told and what it sampled, where ranks are compared; else 0.
    """

    step: int
    tokens: bytes
    logprobs: list[TokenLogprobs | None] | None
    digest: int


_ARRAYS = (
    "slots",
    "cu_seqlens_q",
    "seq_lens",
    "positions",
    "token_slots",
    "out_locs",
    "sample_rows",
    "output_index",
    "page_index",
    "page_value",
    "mask_rows",
    "masks",
)
_PARAM_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}


class _NewRequest(msgspec.Struct, array_like=True):
    slot: int
    tokens: bytes
    prompt_len: int
    params: dict[str, Any]
    stop_ids: tuple[int, ...]
    seed: int


class _Step(msgspec.Struct, array_like=True):
    num_decode: int
    lengths: list[int]
    words: bytes
    new_requests: list[_NewRequest]


_STEPS = msgspec.msgpack.Decoder(_Step)
_REPORTS = msgspec.msgpack.Decoder(Stepped)


def encode_batch(batch: Batch) -> bytes:
    """A step, ready to be sent: all of its arrays as one run of int32, and who is admitted."""
    arrays: list[Int32Array] = [getattr(batch, name) for name in _ARRAYS]
    new_requests = [
        _NewRequest(a.slot, a.tokens.tobytes(), a.prompt_len, _given(a.params), a.stop_ids, a.seed)
        for a in batch.new_requests
    ]
    words = np.concatenate(arrays, dtype=np.int32).tobytes()
    return msgspec.msgpack.encode(_Step(batch.num_decode, [len(array) for array in arrays], words, new_requests))


def decode_batch(message: bytes) -> Batch:
    """What `encode_batch` was given."""
    step = _STEPS.decode(message)
    arrays = np.split(np.frombuffer(step.words, dtype=np.int32).copy(), np.cumsum(step.lengths[:-1]))
    new_requests = tuple(
        NewRequest(
            a.slot,
            np.frombuffer(a.tokens, dtype=np.int32),
            a.prompt_len,
            SamplingParams(**a.params),
            a.stop_ids,
            a.seed,
        )
        for a in step.new_requests
    )
    return Batch(num_decode=step.num_decode, new_requests=new_requests, **dict(zip(_ARRAYS, arrays, strict=True)))


def encode_report(report: Stepped) -> bytes:
    """A message to the driver."""
    return msgspec.msgpack.encode(report)


def decode_report(message: bytes) -> Stepped:
    """What `encode_report` was given."""
    return _REPORTS.decode(message)


def _given(params: SamplingParams) -> dict[str, Any]:
    """The parameters that are not their defaults."""
    return {name: value for name, default in _PARAM_DEFAULTS.items() if (value := getattr(params, name)) != default}
