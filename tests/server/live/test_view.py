from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from minisgl import LLM, SamplingParams
from minisgl.generation import Generation
from minisgl.server.live.state import MOST_CELLS, MOST_WAITING, LiveState, PageRun
from minisgl.server.live.view import LONGEST_USER, LiveView
from tests.tiny_text_model import assert_idle_and_clean

SHARED = list(range(10, 30))
"""Twenty tokens: five pages."""


@pytest.fixture
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), page_size=4, num_pages=64, device="cpu", overlap=False)


def submit(llm: LLM, *prompts: Sequence[int], user: str = "", max_tokens: int = 30) -> list[Generation]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    generations = [llm.prepare(prompt, params, user=user)[0] for prompt in prompts]
    for generation in generations:
        llm.submit(generation)
    return generations


def finish(llm: LLM) -> None:
    while llm.scheduler.has_work:
        llm.step()


def cells(state: LiveState) -> list[PageRun]:
    return [run for run in state.cells for _ in range(run.count)]


def test_two_prompts_with_one_prefix_share_a_node_and_its_pages(llm: LLM) -> None:
    view = LiveView(llm.core)
    submit(llm, [*SHARED, *range(40, 49)], [*SHARED, *range(60, 69)], user="ada")
    for _ in range(3):
        llm.step()
    state = view.look()
    first, second = state.requests
    assert (state.num_running, state.num_waiting) == (2, 0)
    nodes = {node.uid: node for node in state.nodes}
    (shared,) = (node for node in state.nodes if node.locks == 2)
    assert shared.head == SHARED
    assert nodes[first.node].parent == nodes[second.node].parent == shared.uid
    assert (first.cached, second.cached) == (0, 20)
    assert first.shared == second.shared == 5
    assert [cells(state)[page].number for page in shared.pages] == [2] * 5
    assert first.user == "ada"


def test_every_page_is_what_the_ledger_says(llm: LLM) -> None:
    view = LiveView(llm.core)
    submit(llm, range(10, 31), max_tokens=4)
    finish(llm)  # leaves cached pages that nobody reads
    (running,) = submit(llm, range(50, 71))
    llm.step()
    state, memory = view.look(), llm.scheduler.memory
    uses = np.asarray([cell.use for cell in cells(state)])
    assert (uses == "free").tolist() == memory.pool.is_free.tolist()
    assert (uses == "cached").tolist() == memory.is_cached.tolist()
    slot = running.request.slot
    row = memory.row(slot).tolist()
    for page, cell in enumerate(cells(state)):
        if cell.use == "private":
            assert (page in row, cell.number) == (True, running.request.uid)
        if cell.use == "cached":
            assert cell.number == (page in row)
    assert (state.free, state.cached) == (memory.pool.num_free, memory.cache.num_pages)
    assert state.evictable == memory.cache.num_evictable > 0


def test_a_request_is_seen_waiting_running_and_finished(llm: LLM) -> None:
    view = LiveView(llm.core)
    (generation,) = submit(llm, range(10, 24), max_tokens=6)
    (waiting,) = view.look().requests
    assert (waiting.state, waiting.prompt, waiting.pages, waiting.tail) == ("waiting", 14, 0, list(range(10, 24)))
    llm.step()
    llm.step()
    (running,) = view.look().requests
    assert (running.state, running.computed, running.generated, running.room) == ("decode", 15, 2, 6)
    assert running.arrived <= running.admitted <= running.first_token
    finish(llm)
    (finished,) = view.look().requests
    assert (finished.state, finished.reason, finished.generated) == ("finished", "length", 6)
    assert finished.tail == generation.request.output
    assert finished.finished > finished.first_token


def test_looking_changes_nothing(checkpoint: Path, reference: LLM) -> None:
    llm = LLM(str(checkpoint), page_size=4, num_pages=64, device="cpu")
    view = LiveView(llm.core)
    generations = submit(llm, [*SHARED, 5], [*SHARED, 6], range(70, 99))
    while llm.scheduler.has_work:
        view.look()
        llm.step()
        llm.scheduler.check()
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    expected = reference.generate([g.request.prompt for g in generations], params)
    assert [g.request.output for g in generations] == [output.token_ids for output in expected]
    assert_idle_and_clean(llm)


def test_a_state_travels_as_a_message(llm: LLM) -> None:
    view = LiveView(llm.core)
    submit(llm, [*SHARED, 5], [*SHARED, 6])
    view.look()
    llm.step()
    state = view.look()
    assert state.slices
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=LiveState) == state


def test_of_many_the_first_are_shown_and_all_are_counted(llm: LLM) -> None:
    view = LiveView(llm.core)
    submit(llm, *[[number % 200 + 10] * 8 for number in range(500)])
    llm.step()
    state = view.look()
    assert state.num_running + state.num_waiting == 500
    shown = [request.uid for request in state.requests]
    waiting = [request for request in state.requests if request.state == "waiting"]
    assert shown == sorted(shown)
    assert len(waiting) == MOST_WAITING
    assert len(msgspec.json.encode(state)) < 200_000


def test_a_large_pool_is_shown_in_part(checkpoint: Path) -> None:
    pages = 3 * MOST_CELLS
    llm = LLM(str(checkpoint), page_size=1, num_pages=pages, device="cpu")
    view = LiveView(llm.core)
    submit(llm, range(20, 40))
    llm.step()
    state = view.look()
    assert (state.stride, state.num_pages, len(cells(state))) == (3, pages, MOST_CELLS)
    assert [cell.use == "free" for cell in cells(state)] == llm.scheduler.memory.pool.is_free[::3].tolist()


def test_a_name_is_cut_and_made_valid(llm: LLM) -> None:
    view = LiveView(llm.core)
    submit(llm, [5, 6, 7], user="\ud800" + "x" * 10_000)
    (request,) = view.look().requests
    assert request.user == "?" + "x" * (LONGEST_USER - 1)


@pytest.mark.parametrize("cache", ["block-hash", "none"])
def test_other_caches_show_what_there_is(checkpoint: Path, cache: str) -> None:
    llm = LLM(str(checkpoint), page_size=4, num_pages=64, device="cpu", prefix_cache=cache)
    view = LiveView(llm.core)
    submit(llm, [*SHARED, 5], [*SHARED, 6])
    for _ in range(3):
        llm.step()
    state = view.look()
    assert state.cache == cache
    assert [node.head for node in state.nodes] == ([SHARED] if cache == "block-hash" else [])
    assert {request.node for request in state.requests} == {state.nodes[0].uid if state.nodes else 0}
    assert {cell.use for cell in cells(state)} - {"cached"} == {"free", "private"}
    assert state.cached == (5 if cache == "block-hash" else 0)
