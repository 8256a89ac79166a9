from __future__ import annotations

import torch

from minisgl.book.launches import Launches, Tape, bytes_moved, launch_graph, needs
from tests.book.drawing import assert_sound


def test_views_are_free_and_everything_else_is_launched() -> None:
    x = torch.ones(2, 3)
    with Launches() as launches:
        y = x.view(3, 2).t() + 1
        y.mul_(2)
        torch.empty(3)
    assert [call.name for call in launches.calls] == ["add", "mul_"]
    assert bytes_moved(launches.calls) == 24 + 24 + 24 + 24


def test_a_replay_reads_what_its_inputs_hold_now() -> None:
    x = torch.ones(3)
    tape = Tape(lambda: ((x * 2 + 1) * 10,))
    outputs = tape.outputs
    x.fill_(5.0)
    tape.replay()
    assert tape.outputs is outputs
    assert outputs[0].tolist() == [110.0] * 3
    x.fill_(0.0)
    tape.replay()
    assert outputs[0].tolist() == [10.0] * 3


def test_a_replay_repeats_what_was_done_in_place_once() -> None:
    total = torch.zeros(2)
    tape = Tape(lambda: (total.add_(1.0),))
    assert total.tolist() == [1.0, 1.0]
    tape.replay()
    tape.replay()
    assert total.tolist() == [3.0, 3.0]


def test_a_replay_repeats_all_results_of_a_call() -> None:
    x = torch.tensor([3.0, 1.0, 2.0])
    tape = Tape(lambda: tuple(torch.sort(x)))
    x.copy_(torch.tensor([4.0, 6.0, 5.0]))
    tape.replay()
    values, order = tape.outputs
    assert values.tolist() == [4.0, 5.0, 6.0]
    assert order.tolist() == [0, 2, 1]


def test_calls_need_those_whose_results_they_read() -> None:
    x, y = torch.ones(2, 2), torch.ones(2, 2)
    with Launches() as launches:
        gate, up = x @ y, x @ x
        gate = torch.nn.functional.silu(gate)
        gate.mul_(up)
        gate + 1
    assert needs(launches.calls) == [set(), set(), {0}, {1, 2}, {3}]
    picture = launch_graph(launches.calls, "An MLP")
    assert_sound(picture)
    assert "4. mul_ needs 2, 3." in picture.text
