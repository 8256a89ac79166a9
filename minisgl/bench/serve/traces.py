"""Recorded traffic: which requests came when, how long they were, and which of their prompts began alike.

Two public formats, one JSON object a line, neither with a word of what people wrote. Instead, each block of a prompt
has a number, and equal numbers mean equal tokens.

- **Mooncake** (the traces of the FAST '25 paper): ``timestamp`` in milliseconds, ``input_length``, ``output_length``,
  ``hash_ids`` of blocks of 512 tokens.
- **Qwen** (``qwen-bailian-usagetraces-anon``, of the ATC '25 paper "KVCache Cache in the Wild"): the same names with
  ``timestamp`` in seconds and blocks of 16 tokens, and ``chat_id``, ``parent_chat_id`` (-1 for the first turn of a
  conversation), ``turn`` and ``type``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from minisgl.bench.serve.errors import LoadError

MOONCAKE_BLOCK = 512
QWEN_BLOCK = 16
"""Tokens a block."""

_Count = Annotated[int, Meta(ge=1)]
_Id = Annotated[int, Meta(ge=0, lt=2**62)]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a prompt, the last of which may be shorter.

    Args:
        ids: of each; the same id stands for the same tokens.
        size: tokens a block.
    """

    ids: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A line of a trace.

    Args:
        arrival: seconds since the beginning of the trace.
        input_len, output_len: tokens.
        blocks: of the prompt.
    """

    arrival: float
    input_len: int
    output_len: int
    blocks: Blocks


class _Mooncake(Struct, forbid_unknown_fields=True):
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[_Id, ...]


class _Qwen(Struct, forbid_unknown_fields=True):
    chat_id: int
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[_Id, ...]
    parent_chat_id: int = -1
    type: str = "text"
    turn: int = 1


def read_trace(path: Path) -> list[TraceRequest]:
    """All requests of a trace, in the order of the file, which is that of their arrivals.

    The first line tells the format: Qwen's has a ``chat_id``. A request that follows another one of its conversation
    comes at its own time, answered or not: its prompt holds the answer that was given then.

    Raises:
        LoadError: the file cannot be read, or a line is not what the format says; the message has its number.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise LoadError(f"{path}: cannot be read ({error.strerror}); give the path of a trace") from error
    if not lines:
        raise LoadError(f"{path}: is empty; give a trace with at least one request")
    kind = _Qwen if b'"chat_id"' in lines[0] else _Mooncake
    decoder: msgspec.json.Decoder[_Mooncake | _Qwen] = msgspec.json.Decoder(kind)
    requests: list[TraceRequest] = []
    for number, line in enumerate(lines, start=1):
        try:
            requests.append(_as_request(decoder.decode(line)))
        except (msgspec.MsgspecError, LoadError) as error:
            raise LoadError(f"{path}, line {number}: {error}") from error
        if len(requests) > 1 and requests[-1].arrival < requests[-2].arrival:
            raise LoadError(f"{path}, line {number}: arrives before the line above; sort the trace by timestamp")
    return requests


def _as_request(line: _Mooncake | _Qwen) -> TraceRequest:
    seconds, size = (line.timestamp, QWEN_BLOCK) if isinstance(line, _Qwen) else (line.timestamp / 1e3, MOONCAKE_BLOCK)
    whole, rest = divmod(line.input_length, size)
    if len(line.hash_ids) not in (whole, whole + (rest > 0)):  # some traces leave out a block that is not full
        raise LoadError(
            f"hash_ids: has {len(line.hash_ids)} blocks, but {line.input_length} tokens of input_length "
            f"are {whole + (rest > 0)} blocks of {size}"
        )
    return TraceRequest(seconds, line.input_length, line.output_length, Blocks(line.hash_ids, size))
