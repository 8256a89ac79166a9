"""The sampling parameters of the running requests, as one array a field, and what a step needs of them."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from minisgl.core.batch import NewRequest
from minisgl.core.request import Int32Array
from minisgl.engine.random import draw_keys, splitmix64
from minisgl.engine.sampling_stages import (
    BiasStage,
    HostSampling,
    LogprobStage,
    MaskStage,
    PenaltyStage,
    RandomStage,
    TopStage,
)

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
