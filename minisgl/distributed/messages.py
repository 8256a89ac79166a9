"""Messages between the driver and its ranks. The arrays of a step travel as raw int32; nothing is pickled."""

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
    """Where a rank finds its end of the control plane: an address of the plane's format, and files to inherit."""

    address: str
    fds: list[int] = []


class RankOptions(ChildOptions, frozen=True, kw_only=True):
    """What a rank's process gets when it starts."""

    rank: int
    config: EngineConfig
    path: str  # directory of the checkpoint
    model_config: bytes  # pickled: the driver has read it, for which it needs seconds and half of transformers
    store_port: int
    endpoint: Endpoint
    reports: int  # file for its `StepReport` messages
    threads: int  # of PyTorch on the CPU


class EngineInfo(msgspec.Struct, frozen=True):
    """What the driver needs to know about a rank's engine; sizes in bytes are those of this rank."""

    num_pages: int
    num_window_pages: int | None
    page_bytes: int
    model_bytes: int
    graph_bytes: int
    max_seq_len: int
    attention: AttentionChoice


class StepReport(msgspec.Struct, frozen=True):
    """The result of a complete step."""

    step: int  # its number, from 0
    tokens: bytes  # int32[S]
    logprobs: list[TokenLogprobs | None] | None  # as in `StepResult`
    digest: int  # of the step and its tokens, to compare ranks; 0 without `verify_ranks`


_ARRAYS = (
    "slots", "cu_seqlens_q", "seq_lens", "positions", "token_slots", "out_locs",
    "sample_rows", "output_index", "page_index", "page_value", "mask_rows", "masks", "page_moves",
    "drafts",
)  # fmt: skip
_PARAM_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}


_NewRequest = tuple[int, bytes, int, dict[str, Any], tuple[int, ...], int]
"""The fields of a `NewRequest`: tokens as bytes, and of its sampling parameters only those that are no defaults."""


class _Step(msgspec.Struct, array_like=True):
    num_decode: int
    lengths: list[int]
    words: bytes
    new_requests: list[_NewRequest]


_STEPS = msgspec.msgpack.Decoder(_Step)
_REPORTS = msgspec.msgpack.Decoder(StepReport)


def encode_batch(batch: Batch) -> bytes:
    """Encode a step: all of its arrays as one run of int32, and its new requests."""
    arrays: list[Int32Array] = [getattr(batch, name) for name in _ARRAYS]
    new_requests = [
        (new.slot, new.tokens.tobytes(), new.prompt_len, _non_defaults(new.params), new.stop_ids, new.seed)
        for new in batch.new_requests
    ]
    words = np.concatenate(arrays, dtype=np.int32).tobytes()
    return msgspec.msgpack.encode(_Step(batch.num_decode, [len(array) for array in arrays], words, new_requests))


def decode_batch(message: bytes) -> Batch:
    """The inverse of `encode_batch`."""
    step = _STEPS.decode(message)
    arrays = np.split(np.frombuffer(step.words, dtype=np.int32).copy(), np.cumsum(step.lengths[:-1]))
    new_requests = tuple(
        NewRequest(slot, np.frombuffer(tokens, dtype=np.int32), prompt_len, SamplingParams(**params), stop_ids, seed)
        for slot, tokens, prompt_len, params, stop_ids, seed in step.new_requests
    )
    return Batch(num_decode=step.num_decode, new_requests=new_requests, **dict(zip(_ARRAYS, arrays, strict=True)))


def encode_report(report: StepReport) -> bytes:
    """Encode a report for the driver."""
    return msgspec.msgpack.encode(report)


def decode_report(message: bytes) -> StepReport:
    """The inverse of `encode_report`."""
    return _REPORTS.decode(message)


def _non_defaults(params: SamplingParams) -> dict[str, Any]:
    return {name: value for name, default in _PARAM_DEFAULTS.items() if (value := getattr(params, name)) != default}
