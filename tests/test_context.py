"""The forward context: whose it is, and what is current after a block is left."""

from __future__ import annotations

import threading

import pytest
import torch

from minisgl.batch import Batch, DeviceBatch
from minisgl.context import AttentionSpec, ForwardContext, forward_context, get_forward_context


class Idle:
    """A backend that is never asked."""

    capturable = False

    def plan(self, batch: Batch, inputs: DeviceBatch) -> None:
        raise NotImplementedError

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        raise NotImplementedError


def a_context() -> ForwardContext:
    nothing = torch.zeros(0, dtype=torch.int32)
    return ForwardContext(DeviceBatch(*[nothing] * 8), Idle())


def assert_no_context() -> None:
    with pytest.raises(RuntimeError, match="no forward context"):
        get_forward_context()


def test_there_is_none_outside_of_a_block() -> None:
    assert_no_context()
    with forward_context(a_context()) as context:
        assert get_forward_context() is context
    assert_no_context()


def test_a_failure_inside_leaves_nothing_behind() -> None:
    with pytest.raises(ZeroDivisionError), forward_context(a_context()):
        raise ZeroDivisionError
    assert_no_context()


def test_an_inner_block_gives_the_outer_one_back() -> None:
    with forward_context(a_context()) as outer:
        with forward_context(a_context()) as inner:
            assert get_forward_context() is inner
        assert get_forward_context() is outer


def test_threads_do_not_meet() -> None:
    """The other thread enters while this one is inside, and neither sees the other's context."""
    entered = threading.Barrier(2, timeout=10)
    seen: list[ForwardContext] = []

    def other() -> None:
        with forward_context(theirs):
            entered.wait()
            seen.append(get_forward_context())
            entered.wait()

    mine, theirs = a_context(), a_context()
    thread = threading.Thread(target=other)
    with forward_context(mine):
        thread.start()
        entered.wait()
        assert get_forward_context() is mine
        entered.wait()
        thread.join()
        assert get_forward_context() is mine
    assert seen == [theirs]
