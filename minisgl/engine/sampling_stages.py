"""What a step's sampling needs, stage by stage: as NumPy arrays on the host, packed, and as tensors on the device.

A stage that no row of the batch asks for is None, costs nothing and is not copied. A stage that only some rows ask
for lists those rows; ``rows`` are then indices into the S sampling rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from minisgl.core.request import Int32Array

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
        masks: [C × words] int32, one bit a token, see `minisgl.core.MaskMaker`.
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
