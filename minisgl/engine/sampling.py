"""What a step's sampling needs, stage by stage: as NumPy arrays on the host, packed, and as tensors on the device.

A stage that no row of the batch asks for is None, costs nothing and is not copied. A stage that only some rows ask
for lists those rows; ``rows`` are then indices into the S sampling rows of the batch.
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

A = TypeVar("A")
"""An array: ``np.ndarray`` on the host, ``torch.Tensor`` on the device."""


_TORCH_DTYPE = {np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}


class RandomStage(NamedTuple, Generic[A]):
    """Random sampling. In a batch without it every row is greedy.

    Args:
        temperature: [S] float32, 0 for a greedy row, otherwise at least `MIN_TEMPERATURE`.
        key_low, key_high: [S] int32, the key of the row's draw, see `minisgl.engine.random`.
    """

    temperature: A
    key_low: A
    key_high: A


class TopStage(NamedTuple, Generic[A]):
    """Top-k and top-p.

    Args:
        rows: [F] int32.
        top_k: [F] int32, at least 1; the largest int32 where it is off.
        top_p: [F] float32 in (0, 1].
        max_top_k: the largest entry of ``top_k``.
    """

    rows: A
    top_k: A
    top_p: A
    max_top_k: int


class PenaltyStage(NamedTuple, Generic[A]):
    """Presence, frequency and repetition penalties, and where the tokens that they count are.

    Args:
        rows: [P] int32.
        presence, frequency, repetition: [P] float32.
        slots: [P] int32 row in the token table.
        prompt_len, token_len: [P] int32 as in `TokenHistory`.
        max_token_len: the largest entry of ``token_len``.
    """

    rows: A
    presence: A
    frequency: A
    repetition: A
    slots: A
    prompt_len: A
    token_len: A
    max_token_len: int


class BiasStage(NamedTuple, Generic[A]):
    """Logit biases: ``value`` is added to the logit of ``token`` in ``row``; no pair occurs twice.

    Args:
        rows, tokens: [B] int32; tokens are below the vocabulary size.
        values: [B] float32.
    """

    rows: A
    tokens: A
    values: A


class MaskStage(NamedTuple, Generic[A]):
    """Tokens that may not be sampled yet: stop tokens before ``min_tokens``.

    Args:
        rows, tokens: [M] int32; tokens are below the vocabulary size.
    """

    rows: A
    tokens: A


class ConstraintStage(NamedTuple, Generic[A]):
    """Rows that may sample some tokens only: those that a grammar allows next.

    Args:
        rows: [C] int32.
        masks: [C × words] int32, one bit a token, see `minisgl.request.MaskMaker`.
    """

    rows: A
    masks: A


class LogprobStage(NamedTuple, Generic[A]):
    """Log-probabilities to report.

    Args:
        rows: [L] int32.
        counts: [L] int32, how many of the likeliest tokens each row wants, 0 to 20.
        max_count: the largest entry of ``counts``.
    """

    rows: A
    counts: A
    max_count: int


class TokenHistory(NamedTuple):
    """Tokens so far of the P rows with penalties, in the order of ``PenaltyStage.rows``.

    Args:
        tokens: [slots, max_seq_len] int32, the token table of all running requests.
        slots: [P] int32 row in that table.
        prompt_len: [P] int32.
        token_len: [P] int32, prompt and output, without the token that is about to be sampled.
        max_token_len: the largest entry of ``token_len``.
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    prompt_len: torch.Tensor
    token_len: torch.Tensor
    max_token_len: int


@dataclass(frozen=True, slots=True)
class SamplingStages(Generic[A]):
    """The stages of one step in the order in which they are applied (see `minisgl.engine.sampler`), None where unused.

    Args:
        logprobs, bias, penalties, mask, constraint, random, top: the stages.
        min_p: [S] float32, 0 where it is off.
    """

    logprobs: LogprobStage[A] | None = None
    bias: BiasStage[A] | None = None
    penalties: PenaltyStage[A] | None = None
    mask: MaskStage[A] | None = None
    constraint: ConstraintStage[A] | None = None
    random: RandomStage[A] | None = None
    top: TopStage[A] | None = None
    min_p: A | None = None

    @property
    def all_greedy(self) -> bool:
        """True if every row takes its likeliest token (after bias, penalties, mask and constraint)."""
        return self.random is None

    @property
    def adjusts_logits(self) -> bool:
        """True if a stage between the model's logits and the choice among them changes some: bias to constraint."""
        stages = (self.bias, self.penalties, self.mask, self.constraint)
        return any(stage is not None for stage in stages)

    @property
    def needs_only_temperatures(self) -> bool:
        """True if the random stage is the only one, or there is none."""
        others = (self.logprobs, self.top, self.min_p)
        return not self.adjusts_logits and all(stage is None for stage in others)


class DeviceSampling(SamplingStages[torch.Tensor]):
    """`SamplingStages` on the device."""

    __slots__ = ()

    def history(self, tokens: torch.Tensor) -> TokenHistory | None:
        """What the penalties read of the token table; None if no row has a penalty.

        Args:
            tokens: [slots, max_seq_len] int32 token table on the device.
        """
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
        """The tensors as views of ``words`` (int32[words], contiguous), a copy of what `pack` returned."""
        taken = 0

        def take(array: npt.NDArray[Any]) -> torch.Tensor:
            nonlocal taken
            part = words[taken : taken + len(array)]
            taken += len(part)
            return part.view(_TORCH_DTYPE[array.dtype])

        return DeviceSampling(**self._map(take))

    def _map(self, function: Callable[[npt.NDArray[Any]], Any]) -> dict[str, Any]:
        """The stages with ``function`` applied to each array, always in the same order."""
        result: dict[str, Any] = {}
        for field in fields(self):
            stage = getattr(self, field.name)
            if isinstance(stage, np.ndarray):
                result[field.name] = function(stage)
            elif stage is not None:
                result[field.name] = type(stage)(*(function(x) if isinstance(x, np.ndarray) else x for x in stage))
        return result


MIN_TEMPERATURE = 0.01
"""Lower temperatures are raised to this. At 0.01 a logit gap of 1 is a factor of e**100 already."""


_NO_LIMIT = int(np.iinfo(np.int32).max)


class _Needs(enum.IntFlag):
    """The stages that a request needs."""

    RANDOM = 1
    TOP = 2
    MIN_P = 4
    PENALTIES = 8
    BIAS = 16
    MASK = 32
    LOGPROBS = 64


class SamplingTable:
    """Host state of sampling, one row a slot. `admit` writes a row, `rows` reads those of a step.

    Which stages a slot needs is one small integer; the OR of a batch's integers tells `rows` which arrays to gather.
    Biases and masked stop tokens are of any length and rare; they are kept in dicts by slot.

    Args:
        max_running: number of slots.
    """

    def __init__(self, max_running: int) -> None:
        self._needs = np.zeros(max_running, dtype=np.uint8)
        self.temperature = np.zeros(max_running, dtype=np.float32)
        self.key = np.zeros(max_running, dtype=np.uint64)
        """Hash of the seed, see `draw_keys`."""
        self.top_k = np.full(max_running, _NO_LIMIT, dtype=np.int32)
        self.top_p = np.ones(max_running, dtype=np.float32)
        self.min_p = np.zeros(max_running, dtype=np.float32)
        self.presence = np.zeros(max_running, dtype=np.float32)
        self.frequency = np.zeros(max_running, dtype=np.float32)
        self.repetition = np.ones(max_running, dtype=np.float32)
        self.logprobs = np.full(max_running, -1, dtype=np.int32)
        self.min_tokens = np.zeros(max_running, dtype=np.int32)
        self.prompt_len = np.zeros(max_running, dtype=np.int32)
        self._bias: dict[int, tuple[Int32Array, npt.NDArray[np.float32]]] = {}
        self._stop_ids: dict[int, Int32Array] = {}

    def admit(self, new: NewRequest) -> None:
        """Write every field of the slot, so that nothing of an earlier request is left.

        Token ids of ``logit_bias`` and ``stop_ids`` must be below the vocabulary size; requests are checked for that
        where they enter the engine.
        """
        slot, params = new.slot, new.params
        greedy = params.greedy
        self.temperature[slot] = 0.0 if greedy else max(params.temperature, MIN_TEMPERATURE)
        self.key[slot] = splitmix64(np.array([new.seed], dtype=np.uint64))[0]
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
        """What the sampler needs for a step.

        Args:
            slots: int32[S], the slot of each sampling row.
            output_index: int32[S], how many tokens each has generated before this one.
        """
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
    """Each row once for every entry of its list."""
    return np.repeat(rows, [len(entries) for entries in lists])
