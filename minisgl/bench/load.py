"""Which requests a load test sends: lengths, arrivals, traces, prompts and bodies. All of it follows from a seed.

Traces come in two public formats, one JSON object a line. Each block of a prompt has a number, and equal numbers mean
equal tokens; the words that people wrote are not in them.

- **Mooncake** (the traces of the FAST '25 paper): ``timestamp`` in milliseconds, ``input_length``, ``output_length``,
  ``hash_ids`` of blocks of 512 tokens.
- **Qwen** (``qwen-bailian-usagetraces-anon``, of the ATC '25 paper "KVCache Cache in the Wild"): the same names with
  ``timestamp`` in seconds and blocks of 16 tokens, and ``chat_id``, ``parent_chat_id`` (-1 for the first turn of a
  conversation), ``turn`` and ``type``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from minisgl.errors import MiniSGLError

_OWN_TOKENS = 2**62  # block ids from here on belong to single requests; those of traces are smaller

_encode = msgspec.json.encode
_Count = Annotated[int, Meta(ge=1)]
Times = NDArray[np.float64]  # seconds since the beginning, never decreasing
Range = tuple[int, int]  # the least and the most

MALFORMED: dict[str, Callable[[Mapping[str, Any]], bytes]] = {
    "cut off": lambda body: _encode(body)[:-7],
    "no JSON": lambda body: b"prompt=hello&max_tokens=5",
    "no UTF-8": lambda body: _encode({**body, "prompt": "x"}).replace(b'"x"', b'"\xff\xfe"'),
    "no object": lambda body: _encode([body]),
    "no prompt": lambda body: _encode({key: value for key, value in body.items() if key != "prompt"}),
    "empty prompt": lambda body: _encode({**body, "prompt": []}),
    "negative token": lambda body: _encode({**body, "prompt": [1, -5]}),
    "unknown token": lambda body: _encode({**body, "prompt": [2**31 - 1]}),
    "prompt of objects": lambda body: _encode({**body, "prompt": [{"token": 1}]}),
    "negative max_tokens": lambda body: _encode({**body, "max_tokens": -5}),
    "max_tokens in words": lambda body: _encode({**body, "max_tokens": "many"}),
    "endless max_tokens": lambda body: _encode({**body, "max_tokens": 10**12}),
    "temperature below zero": lambda body: _encode({**body, "temperature": -1.0}),
    "unsupported field": lambda body: _encode({**body, "guided_json": {}}),
    "unknown model": lambda body: _encode({**body, "model": "no such model"}),
}
"""Bodies that a server must refuse, by what is wrong with them."""


class LoadError(MiniSGLError, ValueError):
    """The load that was asked for cannot be made. The message names the option or the file, and what to do."""


def poisson(rate: float, count: int, rng: np.random.Generator) -> Times:
    """Arrival times of many independent users, ``rate`` a second on average: gaps are exponentially distributed."""
    return np.cumsum(rng.exponential(1.0 / rate, size=count))


def constant(rate: float, count: int) -> Times:
    """Arrival times at equal distances."""
    return np.arange(1, count + 1) / rate


def scaled(times: Times, rate: float) -> Times:
    """Recorded arrivals, the first at 0, sped up or slowed down to a mean rate of ``rate``. Bursts stay bursts."""
    duration = float(times[-1])
    if duration == 0.0:
        raise LoadError("rate: all requests of the trace arrive at once, which no factor changes; leave --rate out")
    return times * ((len(times) - 1) / duration / rate)


class Blocks(NamedTuple):
    """The blocks of a prompt, ``size`` tokens each; the last may be shorter, and the same id means the same tokens."""

    ids: tuple[int, ...]
    size: int


class TraceRequest(NamedTuple):
    """A line of a trace: seconds since its beginning, lengths in tokens, and the blocks of the prompt."""

    arrival: float
    input_len: int
    output_len: int
    blocks: Blocks


class _Mooncake(Struct, forbid_unknown_fields=True):
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[Annotated[int, Meta(ge=0, lt=_OWN_TOKENS)], ...]


class _Qwen(_Mooncake, forbid_unknown_fields=True, kw_only=True):
    chat_id: int
    parent_chat_id: int = -1
    type: str = "text"
    turn: int = 1


def read_trace(path: Path) -> list[TraceRequest]:
    """All requests of a trace, in the order of their arrivals.

    The first line tells the format: Qwen's has a ``chat_id``. A later turn of a conversation comes at its own time,
    answered or not: its prompt holds the answer that was given then. Raises `LoadError` if the file cannot be read, or
    a line, whose number the message has, is not what the format says.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise LoadError(f"{path}: cannot be read ({error.strerror}); give the path of a trace") from error
    if not lines:
        raise LoadError(f"{path}: is empty; give a trace with at least one request")
    decoder: msgspec.json.Decoder[_Mooncake] = msgspec.json.Decoder(_Qwen if b'"chat_id"' in lines[0] else _Mooncake)
    requests: list[TraceRequest] = []
    for number, line in enumerate(lines, start=1):
        try:
            requests.append(_as_request(decoder.decode(line)))
        except (msgspec.MsgspecError, LoadError) as error:
            raise LoadError(f"{path}, line {number}: {error}") from error
        if len(requests) > 1 and requests[-1].arrival < requests[-2].arrival:
            raise LoadError(f"{path}, line {number}: arrives before the line above; sort the trace by timestamp")
    return requests


def _as_request(line: _Mooncake) -> TraceRequest:
    seconds, size = (line.timestamp, 16) if isinstance(line, _Qwen) else (line.timestamp / 1e3, 512)
    whole, rest = divmod(line.input_length, size)
    if len(line.hash_ids) not in (whole, whole + (rest > 0)):  # some traces leave out a block that is not full
        wanted = f"{line.input_length} tokens of input_length are {whole + (rest > 0)} blocks of {size}"
        raise LoadError(f"hash_ids: has {len(line.hash_ids)} blocks, but {wanted}")
    return TraceRequest(seconds, line.input_length, line.output_length, Blocks(line.hash_ids, size))


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request before it is sent."""

    index: int  # unique in a run; its prompt depends on it
    input_len: int  # tokens of the prompt, and to generate
    output_len: int
    due: float = 0.0  # seconds after the beginning at which it is sent in an open loop
    blocks: Blocks | None = None  # that the prompt is made of, if it comes from a trace
    leave_after: int | None = None  # disconnect after so many pieces of the answer; 0: once the request is written
    malformed: str | None = None  # a name in `MALFORMED` if its body is wrong
    stream: bool = True  # whether the answer comes in pieces


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is sent, at any load."""

    requests: int | None = None  # how many; None is all of the trace, or 100
    input_len: Range = (128, 128)  # tokens of prompts and answers, uniformly distributed. A trace has its own
    output_len: Range = (64, 64)
    arrivals: str = "poisson"  # ``"poisson"`` or ``"constant"`` in an open loop
    trace: Path | None = None  # file of recorded requests, in place of the lengths and the arrivals
    disconnects: float = 0.0  # share of the requests whose client leaves before the end
    malformed: float = 0.0  # share of the requests whose body is wrong
    seed: int = 0  # of everything

    def plan(self, rate: float | None, run: int) -> list[PlannedRequest]:
        """The requests of run number ``run``. Without a ``rate`` they keep the times of a trace, or have none."""
        rng = np.random.default_rng([self.seed, run])
        if self.trace:
            lines = read_trace(self.trace)
            if self.requests is not None and self.requests > len(lines):
                raise LoadError(f"requests: {self.trace} has {len(lines)}, got {self.requests}; ask for fewer")
            chosen = enumerate(lines[: self.requests])
            requests = [PlannedRequest(i, at.input_len, at.output_len, at.arrival, at.blocks) for i, at in chosen]
        else:
            count = 100 if self.requests is None else self.requests
            inputs, outputs = (rng.integers(*each, count, endpoint=True) for each in (self.input_len, self.output_len))
            requests = [PlannedRequest(i, int(inputs[i]), int(outputs[i])) for i in range(count)]
        times = np.array([each.due for each in requests]) - requests[0].due
        if rate is not None and self.trace:
            times = scaled(times, rate)
        elif rate is not None:
            constantly = self.arrivals == "constant"
            times = constant(rate, len(requests)) if constantly else poisson(rate, len(requests), rng)
        on_time = [replace(each, due=float(due)) for each, due in zip(requests, times, strict=True)]
        return _with_faults(on_time, self.disconnects, self.malformed, rng)


def _with_faults(
    requests: Sequence[PlannedRequest], disconnects: float, malformed: float, rng: np.random.Generator
) -> list[PlannedRequest]:
    """Give exactly these shares of the requests, rounded and chosen at random, one fault each."""
    faulty = list(requests)
    order, names = rng.permutation(len(requests)).tolist(), list(MALFORMED)
    leaving, wrong = round(disconnects * len(requests)), round(malformed * len(requests))
    for index in order[:leaving]:
        pieces = int(rng.integers(0, -(-requests[index].output_len // 4)))  # a busy server sends few, of several tokens
        faulty[index] = replace(requests[index], leave_after=pieces, stream=True)
    for number, index in enumerate(order[leaving : leaving + wrong]):
        faulty[index] = replace(requests[index], malformed=names[number % len(names)])
    return faulty


def prompt_tokens(index: int, length: int, blocks: Blocks | None, vocab_size: int, seed: int) -> list[int]:
    """The prompt of one request: the tokens of its blocks, and then as many of its own as it takes.

    A token is a hash of its block, its place in the block, and ``seed``. So two prompts share exactly the prefix that
    their blocks share, and prompts under another seed share nothing with what a server still has in its cache.
    """
    size = blocks.size if blocks else length
    ids = np.array([*(blocks.ids if blocks else ()), _OWN_TOKENS + index], dtype=np.uint64)
    places = np.arange(length, dtype=np.uint64)
    block_of = np.minimum(places // np.uint64(size), np.uint64(len(ids) - 1)).astype(np.intp)
    of_block = _hash(_hash(np.uint64(seed)) ^ ids[block_of])
    tokens: list[int] = (_hash(of_block ^ (places % np.uint64(size))) % np.uint64(vocab_size)).tolist()
    return tokens


def _hash(value: Any) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014): every bit of the result depends on every bit given."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(value, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


def completion_body(model: str, prompt: list[int], max_tokens: int, stream: bool, malformed: str | None) -> bytes:
    """A request for exactly ``max_tokens`` greedy tokens, made wrong in the way that ``malformed`` names."""
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "stream": stream}
    body |= {"temperature": 0.0, "ignore_eos": True}
    if stream:
        body["stream_options"] = {"include_usage": True}
    return _encode(body) if malformed is None else MALFORMED[malformed](body)
