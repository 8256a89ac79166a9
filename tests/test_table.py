"""The running table: what a request's row says, the order of rows, and that `check` sees what is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.errors import InvariantError
from minisgl.request import Request, RequestState
from minisgl.sampling_params import SamplingParams
from minisgl.table import RunningTable


def admit(table: RunningTable, uid: int, prompt_len: int = 5, cached_len: int = 0) -> Request:
    prompt = np.arange(prompt_len, dtype=np.int32)
    request = Request(uid=uid, prompt=prompt, params=SamplingParams(), max_len=prompt_len + 3, stop_ids=(7, 8))
    table.admit(request, cached_len)
    table.check()
    return request


def release(table: RunningTable, request: Request) -> None:
    slot = request.slot
    table.deactivate(slot)
    table.release(slot)
    table.check()


def test_admission_sets_every_length() -> None:
    table = RunningTable(2, 16)
    table.stop_ids[:] = 5  # of requests that had these slots before
    request = admit(table, uid=3, prompt_len=9, cached_len=4)
    slot = request.slot
    assert request.state is RequestState.PREFILL
    lengths = (table.kv_len, table.token_len, table.known_len, table.prompt_len, table.max_len)
    assert [int(array[slot]) for array in lengths] == [4, 9, 9, 9, 12]
    assert table.tokens[slot, :9].tolist() == list(range(9))
    assert table.stop_ids[slot].tolist() == [7, 8] + [-1] * 62


def test_a_request_that_comes_back_brings_its_output() -> None:
    table = RunningTable(2, 16)
    request = admit(table, uid=0)
    table.tokens[request.slot, 5:7] = [11, 12]
    table.token_len[request.slot] = table.known_len[request.slot] = 7
    release(table, request)
    assert (request.slot, request.output) == (-1, [11, 12])
    slot = table.admit(request, cached_len=0)
    assert table.tokens[slot, :7].tolist() == [0, 1, 2, 3, 4, 11, 12]
    assert table.output(slot) == [11, 12]


def test_rows_are_in_order_of_arrival_whatever_their_slots() -> None:
    table = RunningTable(3, 16)
    first, second, third = (admit(table, uid) for uid in (0, 1, 2))
    release(table, second)
    late = admit(table, uid=9)
    release(table, first)
    early = admit(table, uid=4)
    assert [table.request(slot).uid for slot in table.slots.tolist()] == [2, 4, 9]
    assert late.slot < third.slot, "the freed slot is used again, so the order is not the slots' own"
    assert early.slot == 0


def test_a_slot_in_use_is_not_released() -> None:
    table = RunningTable(1, 16)
    slot = admit(table, uid=0).slot
    with pytest.raises(InvariantError, match="still in use"):
        table.release(slot)
    table.deactivate(slot)
    table.in_flight[slot] = 1
    with pytest.raises(InvariantError, match="still in use"):
        table.release(slot)


@pytest.mark.parametrize(("field", "value"), [("kv_len", 6), ("known_len", 6), ("token_len", 9), ("token_len", 4)])
def test_check_sees_lengths_that_cannot_be(field: str, value: int) -> None:
    table = RunningTable(2, 16)
    slot = admit(table, uid=0).slot
    getattr(table, field)[slot] = value
    with pytest.raises(InvariantError, match="kv_len or known_len"):
        table.check()
