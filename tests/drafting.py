"""Drafters whose guesses a test decides."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from minisgl.drafters.protocol import DraftRow, DraftTarget
from minisgl.llm import LLM
from minisgl.request import Int32Array
from minisgl.scheduler.speculation import StepCosts
from tests.fake_executor import expected_output


class KnowsTheAnswers:
    """Drafts from ``answers``, prompt and output each; every draft is wrong with probability ``errors``."""

    answers: ClassVar[list[list[int]]] = []
    errors: ClassVar[float] = 0.3

    def __init__(self, target: DraftTarget) -> None:
        self.vocab = target.vocab_size
        self.rng = np.random.default_rng(0)

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        return [self._guess(row.tokens.tolist(), row.count) for row in rows]

    def _guess(self, tokens: list[int], count: int) -> list[int]:
        known = [answer for answer in self.answers if answer[: len(tokens)] == tokens]
        # Drafts behind the known answer go on somehow: a request must end where it ends without them.
        sequel = (known[0][len(tokens) :] if known else []) + [0] * count
        wrong = self.rng.random(count) < self.errors
        return [(token + int(shift)) % self.vocab for token, shift in zip(sequel, wrong, strict=False)]

    def finish(self, uid: int, prompt_len: int, tokens: Int32Array) -> None:
        pass


class KnowsTheShadow(KnowsTheAnswers):
    """Drafts what a `ShadowExecutor` without constraints would say."""

    def _guess(self, tokens: list[int], count: int) -> list[int]:
        wrong = self.rng.random(count) < self.errors
        sequel = expected_output(tokens, count, self.vocab)
        return [(token + int(shift)) % self.vocab for token, shift in zip(sequel, wrong, strict=True)]


class Fails(KnowsTheAnswers):
    """Misbehaves in the way ``how`` for prompts that begin with token 9."""

    how: ClassVar[str] = "raises"

    def _guess(self, tokens: list[int], count: int) -> list[int]:
        drafts = super()._guess(tokens, count)
        if tokens[0] != 9:
            return drafts
        if self.how == "raises":
            raise RuntimeError("no idea")
        if self.how == "stands still":
            time.sleep(30)
        nonsense = {"too many": [1] * (count + 1), "not a token": [self.vocab], "negative": [-1], "text": ["a"]}
        return nonsense.get(self.how, drafts)


class DraftsAreFree(StepCosts):
    """Drafts from the first step on, and for ever."""

    def wants_plain_step(self, num_rows: int) -> bool:
        return False

    def of_verification(self, num_rows: int) -> float:
        return 1.0


def draft_always(llm: LLM) -> LLM:
    """Let the engine draft, whether it pays or not."""
    assert llm.scheduler.speculation is not None
    llm.scheduler.speculation.costs = DraftsAreFree()
    return llm


def drafts_of(llm: LLM) -> tuple[int, int]:
    """How many drafts an engine has verified, and accepted."""
    assert llm.scheduler.speculation is not None
    return llm.scheduler.speculation.stats.drafted, llm.scheduler.speculation.stats.accepted
