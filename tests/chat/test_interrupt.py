from __future__ import annotations

import os
import signal
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from minisgl.chat.engine import EnginePartner
from minisgl.chat.interrupt import Interrupt
from minisgl.core.batch import Batch, StepPhase
from minisgl.core.request import Request
from tests.tiny_text_model import assert_idle_and_clean, text_checkpoint

HELLO = [{"role": "user", "content": "the quick brown fox"}]


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Interrupting:
    """Presses Ctrl-C within the first step that it observes."""

    pressed = False

    def begin(self, phase: StepPhase, batch: Batch | None) -> None:
        if not self.pressed:
            self.pressed = True
            press_ctrl_c()

    def end(self, phase: StepPhase, batch: Batch | None) -> None: ...

    def finish(self, requests: Sequence[Request]) -> None: ...


def test_the_first_waits_and_the_second_does_not() -> None:
    with Interrupt() as interrupt:
        interrupt.look()
        press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            interrupt.look()
        interrupt.look()
        press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()


def test_afterwards_all_is_as_usual() -> None:
    usual = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="trouble"), Interrupt():
        raise ValueError("trouble")
    assert signal.getsignal(signal.SIGINT) is usual


def test_an_interrupt_within_a_step_leaves_the_prefix_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partner = EnginePartner(str(text_checkpoint(tmp_path)))
    llm = partner._llm
    first: Generator[str, None, str] = partner.answer(HELLO)
    next(first)
    first.close()
    cached = llm.scheduler.memory.cache.num_pages
    assert cached > 0
    with llm.core.observe(Interrupting()), pytest.raises(KeyboardInterrupt):
        list(partner.answer(HELLO))
    assert llm.scheduler.memory.cache.num_pages >= cached
    assert_idle_and_clean(llm)
