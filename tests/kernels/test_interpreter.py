"""What Triton's interpreter prepares: once a launch, and put back at its end."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from minisgl.kernels.interpreter import prepare_once_a_launch
from minisgl.kernels.launch import INTERPRETED
from tests.kernels.loading import DEVICE


@triton.jit
def add_up(x_ptr: tl.tensor, out_ptr: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Program p: the sum of block p."""
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + here), axis=0) + tl.cdiv(BLOCK, BLOCK) - 1)


def launch(programs: int) -> None:
    x, out = torch.arange(4.0 * programs, device=DEVICE), torch.zeros(programs, device=DEVICE)
    add_up[(programs,)](x, out, BLOCK=4)
    assert torch.equal(out, x.view(programs, 4).sum(dim=1))


def test_programs_do_not_look_through_the_language_again(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    launch(1)  # the first one rewrites functions, which gives their modules more names
    searched: list[Any] = []
    search = interpreter._patch_builtin
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda *arguments: searched.append(1) or search(*arguments))
    launch(1)
    once = len(searched)
    launch(9)
    assert len(searched) == 2 * once, "as often for nine programs as for one"
    assert (once > 0) == INTERPRETED.value


def test_the_language_is_put_back_behind_each_launch() -> None:
    before = tl.load, tl.range, tl.tensor.sum
    launch(2)
    assert (tl.load, tl.range, tl.tensor.sum) == before


def test_an_interpreter_that_works_in_another_way_is_left_alone() -> None:
    other = SimpleNamespace(GridExecutor=object)
    prepare_once_a_launch(other)
    assert vars(other) == {"GridExecutor": object}
