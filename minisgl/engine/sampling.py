"""What a step's sampling needs, stage by stage: as NumPy arrays on the host, packed, and as tensors on the device.

A stage that no row needs is None and is not copied. One that only some rows need lists them in ``rows``, indices into
the S sampling rows of the batch. Integers are int32, others float32.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from minisgl.batch import NewRequest
from minisgl.engine.random import draw_keys, splitmix64
from minisgl.request import Int32Array

A = TypeVar("A")  # an array: np.ndarray on the host, torch.Tensor on the device

_TORCH_DTYPE = {np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}


class RandomStage(NamedTuple, Generic[A]):
    """Random sampling. In a batch without it every row is greedy."""

    temperature: A  # [S], 0 for a greedy row, otherwise at least `MIN_TEMPERATURE`
    key_low: A  # [S] with `key_high` the 64-bit key of the row's draw, see `draw_keys`
    key_high: A


class TopStage(NamedTuple, Generic[A]):
    """Top-k and top-p of F rows."""

    rows: A
    top_k: A  # at least 1; the largest int32 where it is off
    top_p: A  # in (0, 1]
    max_top_k: int


class PenaltyStage(NamedTuple, Generic[A]):
    """Presence, frequency and repetition penalties of P rows, and where the tokens that they count are."""

    rows: A
    presence: A
    frequency: A
    repetition: A
    slots: A  # row in the token table
    prompt_len: A
    token_len: A  # prompt and output so far
    max_token_len: int


class BiasStage(NamedTuple, Generic[A]):
    """Logit biases: ``values`` are added to the logits of ``tokens`` in ``rows``, [B] each; no pair occurs twice."""

    rows: A
    tokens: A
    values: A


class MaskStage(NamedTuple, Generic[A]):
    """Stop tokens, [M], that ``rows``, [M], may not sample before ``min_tokens``."""

    rows: A
    tokens: A


class ConstraintStage(NamedTuple, Generic[A]):
    """Rows, [C], under a grammar; ``masks`` is int32[C × words], one bit a token (`minisgl.request.MaskMaker`)."""

    rows: A
    masks: A


class LogprobStage(NamedTuple, Generic[A]):
    """Log-probabilities to report for L rows."""

    rows: A
    counts: A  # how many of the likeliest tokens each row wants, 0 to 20
    max_count: int


class TokenHistory(NamedTuple):
    """Tokens so far of the P rows with penalties, in the order of ``PenaltyStage.rows``."""

    tokens: torch.Tensor  # [slots, max_seq_len], the token table of all running requests
    slots: torch.Tensor
    prompt_len: torch.Tensor
    token_len: torch.Tensor
    max_token_len: int


@dataclass(frozen=True, slots=True)
class SamplingStages(Generic[A]):
    """The stages of one step, None where unused."""

    logprobs: LogprobStage[A] | None = None
    bias: BiasStage[A] | None = None
    penalties: PenaltyStage[A] | None = None
    mask: MaskStage[A] | None = None
    constraint: ConstraintStage[A] | None = None
    random: RandomStage[A] | None = None
    top: TopStage[A] | None = None
    min_p: A | None = None  # [S], 0 where it is off

    @property
    def all_greedy(self) -> bool:
        """True if every row takes its likeliest token (after bias, penalties, mask and constraint)."""
        return self.random is None

    @property
    def adjusts_logits(self) -> bool:
        """True if any stage changes the model's logits before the choice: bias, penalties, mask or constraint."""
        stages = (self.bias, self.penalties, self.mask, self.constraint)
        return any(stage is not None for stage in stages)

    @property
    def needs_only_temperatures(self) -> bool:
        """True if there is no stage, or the random stage alone."""
        others = (self.logprobs, self.top, self.min_p)
        return not self.adjusts_logits and all(stage is None for stage in others)


class DeviceSampling(SamplingStages[torch.Tensor]):
    """`SamplingStages` on the device."""

    __slots__ = ()

    def history(self, tokens: torch.Tensor) -> TokenHistory | None:
        """What the penalties read of the token table, int32[slots, max_seq_len]; None without penalties."""
        stage = self.penalties
        if stage is None:
            return None
        return TokenHistory(tokens, stage.slots, stage.prompt_len, stage.token_len, stage.max_token_len)


class HostSampling(SamplingStages[npt.NDArray[Any]]):
    """`SamplingStages` on the host, and the way to the device: ``rows.unpack(copy of rows.pack())``."""

    __slots__ = ()

    def constrained(self, rows: Int32Array, masks: Int32Array) -> HostSampling:
        """The same stages and a `ConstraintStage`."""
        stage: ConstraintStage[npt.NDArray[Any]] = ConstraintStage(rows, masks)
        return HostSampling(**self._map(lambda array: array) | {"constraint": stage})

    def pack(self) -> Int32Array:
        """All arrays of all stages as one int32[words]; empty for a batch that is greedy and nothing else."""
        parts: list[Int32Array] = []
        self._map(lambda array: parts.append(array.view(np.int32)))
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)

    def unpack(self, words: torch.Tensor) -> DeviceSampling:
        """The tensors as views of ``words``, a contiguous device copy of what `pack` returned."""
        taken = 0

        def take(array: npt.NDArray[Any]) -> torch.Tensor:
            nonlocal taken
            part = words[taken : taken + len(array)]
            taken += len(part)
            return part.view(_TORCH_DTYPE[array.dtype])

        return DeviceSampling(**self._map(take))

    def _map(self, function: Callable[[npt.NDArray[Any]], Any]) -> dict[str, Any]:
        """Apply ``function`` to each array of each stage, always in the same order."""
        result: dict[str, Any] = {}
        for field in fields(self):
            stage = getattr(self, field.name)
            if isinstance(stage, np.ndarray):
                result[field.name] = function(stage)
            elif stage is not None:
                result[field.name] = type(stage)(*(function(x) if isinstance(x, np.ndarray) else x for x in stage))
        return result


# Lower temperatures are raised to this. At 0.01 a logit gap of 1 is a factor of e**100 already.
MIN_TEMPERATURE = 0.01

_NO_LIMIT = int(np.iinfo(np.int32).max)


class _Needs(enum.IntFlag):
    RANDOM = 1
    TOP = 2
    MIN_P = 4
    PENALTIES = 8
    BIAS = 16
    MASK = 32
    LOGPROBS = 64


class SamplingTable:
    """Host state of sampling, one row a slot: `admit` writes a row, `rows` reads those of a step."""

    def __init__(self, max_running: int) -> None:
        self._needs = np.zeros(max_running, dtype=np.uint8)
        self.temperature = np.zeros(max_running, dtype=np.float32)
        self.key = np.zeros(max_running, dtype=np.uint64)  # hash of the seed, see `draw_keys`
        self.top_k = np.full(max_running, _NO_LIMIT, dtype=np.int32)
        self.top_p = np.ones(max_running, dtype=np.float32)
        self.min_p = np.zeros(max_running, dtype=np.float32)
        self.presence = np.zeros(max_running, dtype=np.float32)
        self.frequency = np.zeros(max_running, dtype=np.float32)
        self.repetition = np.ones(max_running, dtype=np.float32)
        self.logprobs = np.full(max_running, -1, dtype=np.int32)
        self.min_tokens = np.zeros(max_running, dtype=np.int32)
        self.prompt_len = np.zeros(max_running, dtype=np.int32)
        # Of any length and rare, so kept by slot.
        self._bias: dict[int, tuple[Int32Array, npt.NDArray[np.float32]]] = {}
        self._stop_ids: dict[int, Int32Array] = {}

    def admit(self, *new_requests: NewRequest) -> None:
        """Write every field of the slots. Ids in ``logit_bias`` and ``stop_ids`` must be below the vocabulary size."""
        seeds = np.array([new.seed for new in new_requests], dtype=np.uint64)
        self.key[[new.slot for new in new_requests]] = splitmix64(seeds)  # one by one, it would take most of the time
        for new in new_requests:
            self._write(new)

    def _write(self, new: NewRequest) -> None:
        slot, params = new.slot, new.params
        greedy = params.greedy
        self.temperature[slot] = 0.0 if greedy else max(params.temperature, MIN_TEMPERATURE)
        self.top_k[slot] = params.top_k or _NO_LIMIT
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.repetition[slot] = params.repetition_penalty
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.min_tokens[slot] = params.min_tokens
        self.prompt_len[slot] = new.prompt_len

        self._bias.pop(slot, None)
        self._stop_ids.pop(slot, None)
        if params.logit_bias:
            tokens = np.fromiter(params.logit_bias.keys(), dtype=np.int32)
            self._bias[slot] = tokens, np.fromiter(params.logit_bias.values(), dtype=np.float32)
        if params.min_tokens > 0 and new.stop_ids:
            self._stop_ids[slot] = np.unique(np.array(new.stop_ids, dtype=np.int32))

        needs = _Needs(0)
        if not greedy:
            needs |= _Needs.RANDOM
            if params.top_k > 0 or params.top_p < 1.0:
                needs |= _Needs.TOP
            if params.min_p > 0.0:
                needs |= _Needs.MIN_P
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            needs |= _Needs.PENALTIES
        if slot in self._bias:
            needs |= _Needs.BIAS
        if slot in self._stop_ids:
            needs |= _Needs.MASK
        if params.logprobs is not None:
            needs |= _Needs.LOGPROBS
        self._needs[slot] = needs

    def rows(self, slots: Int32Array, output_index: Int32Array) -> HostSampling:
        """Gather a step's sampling from slots, int32[S]; ``output_index``, int32[S], counts tokens so far."""
        needs = self._needs[slots]
        any_needs = int(np.bitwise_or.reduce(needs))
        if not any_needs:
            return HostSampling()

        def rows_with(stage: _Needs) -> Int32Array:
            return np.flatnonzero(needs & np.uint8(stage)).astype(np.int32)

        return HostSampling(
            logprobs=self._logprobs(slots, rows_with(_Needs.LOGPROBS)) if any_needs & _Needs.LOGPROBS else None,
            bias=self._biases(slots, rows_with(_Needs.BIAS)) if any_needs & _Needs.BIAS else None,
            penalties=(
                self._penalties(slots, output_index, rows_with(_Needs.PENALTIES))
                if any_needs & _Needs.PENALTIES
                else None
            ),
            mask=self._mask(slots, output_index, rows_with(_Needs.MASK)) if any_needs & _Needs.MASK else None,
            random=self._random(slots, output_index) if any_needs & _Needs.RANDOM else None,
            top=self._top(slots, rows_with(_Needs.TOP)) if any_needs & _Needs.TOP else None,
            min_p=self.min_p[slots] if any_needs & _Needs.MIN_P else None,
        )

    def _random(self, slots: Int32Array, output_index: Int32Array) -> RandomStage[npt.NDArray[np.generic]]:
        return RandomStage(self.temperature[slots], *draw_keys(self.key[slots], output_index))

    def _top(self, slots: Int32Array, rows: Int32Array) -> TopStage[npt.NDArray[np.generic]]:
        of = slots[rows]
        top_k = self.top_k[of]
        return TopStage(rows, top_k, self.top_p[of], int(top_k.max()))

    def _penalties(
        self, slots: Int32Array, output_index: Int32Array, rows: Int32Array
    ) -> PenaltyStage[npt.NDArray[np.generic]]:
        of = slots[rows]
        prompt_len = self.prompt_len[of]
        token_len = prompt_len + output_index[rows]
        return PenaltyStage(
            rows,
            self.presence[of],
            self.frequency[of],
            self.repetition[of],
            of,
            prompt_len,
            token_len,
            int(token_len.max()),
        )

    def _biases(self, slots: Int32Array, rows: Int32Array) -> BiasStage[npt.NDArray[np.generic]]:
        entries = [self._bias[slot] for slot in slots[rows].tolist()]
        tokens = [entry[0] for entry in entries]
        return BiasStage(_repeat(rows, tokens), np.concatenate(tokens), np.concatenate([e[1] for e in entries]))

    def _mask(
        self, slots: Int32Array, output_index: Int32Array, rows: Int32Array
    ) -> MaskStage[npt.NDArray[np.generic]] | None:
        rows = rows[output_index[rows] < self.min_tokens[slots[rows]]]
        if not len(rows):
            return None
        tokens = [self._stop_ids[slot] for slot in slots[rows].tolist()]
        return MaskStage(_repeat(rows, tokens), np.concatenate(tokens))

    def _logprobs(self, slots: Int32Array, rows: Int32Array) -> LogprobStage[npt.NDArray[np.generic]]:
        counts = self.logprobs[slots[rows]]
        return LogprobStage(rows, counts, int(counts.max()))


def _repeat(rows: Int32Array, lists: Sequence[Int32Array]) -> Int32Array:
    return np.repeat(rows, [len(entries) for entries in lists])  # each row once for every entry of its list
