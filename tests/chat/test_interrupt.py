from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from minisgl.chat.engine import EnginePartner
from minisgl.chat.interrupt import Interrupt
from minisgl.scheduler import StepOutput
from tests.tiny_text_model import assert_idle_and_clean, text_checkpoint

HELLO = [{"role": "user", "content": "the quick brown fox"}]


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


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
    step = llm.loop.step

    def interrupted_step() -> StepOutput:
        press_ctrl_c()
        monkeypatch.setattr(llm.loop, "step", step)
        return step()

    monkeypatch.setattr(llm.loop, "step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        list(partner.answer(HELLO))
    assert llm.scheduler.memory.cache.num_pages >= cached
    assert_idle_and_clean(llm)
