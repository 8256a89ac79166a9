"""The live page's view of an engine: its steps, its prefix cache, and its state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from minisgl.kvcache.block_hash import BlockHashCache
from minisgl.kvcache.prefix import NoPrefixCache, PrefixCache
from minisgl.kvcache.radix import RadixCache
from minisgl.llm import LLM, Generation
from minisgl.request import Int32Array
from minisgl.sampling_params import SamplingParams
from minisgl.server.live import view as live_view
from minisgl.server.live.state import (
    HEAD,
    MOST_CELLS,
    MOST_FINISHED,
    MOST_NODE_PAGES,
    MOST_NODES,
    MOST_SLICES,
    MOST_WAITING,
    LiveNode,
    LiveState,
    PageRun,
)
from minisgl.server.live.view import LONGEST_USER, MOST_VISITED, LiveView, StepWatch, nodes_of
from tests.drafting import KnowsTheAnswers, draft_always
from tests.tiny_text_model import Failing, Scripted, assert_idle_and_clean, directed_llm

PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(params=[False, True], ids=["in turn", "overlap"])
def llm(checkpoint: Path, request: pytest.FixtureRequest) -> LLM:
    return directed_llm(str(checkpoint), page_size=4, num_pages=32, device="cpu", overlap=request.param)


def watch(llm: LLM) -> StepWatch:
    watching = StepWatch(llm.scheduler.table)
    llm.loop.observers.append(watching)
    return watching


def test_nothing_is_recorded_while_nobody_watches(llm: LLM) -> None:
    llm.executor.launcher = Scripted([5])
    watching = watch(llm)
    for prompt in ([1, 2], [3, 4]):
        llm.submit(llm.prepare(prompt, PARAMS)[0])
    for _ in range(3):
        llm.step()
    assert not watching.slices
    assert not watching._launched
    assert not watching.finished()


def test_slices_hold_every_token_of_every_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "SHORTEST_SLICE", 0.0)
    watching = watch(llm)
    watching.look()
    outputs = llm.generate([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [9] * 11], PARAMS)
    slices = watching.slices
    assert [each.number for each in slices] == list(range(1, len(slices) + 1))
    assert all(a.end <= b.start <= b.end for a, b in zip(slices, list(slices)[1:], strict=False))
    fed = {uid: (0, 0) for uid in range(3)}
    for each in slices:
        assert each.prefill == sum(prefill for _, prefill, _ in each.rows)
        assert each.decode == sum(decode for _, _, decode in each.rows)
        for uid, prefill, decode in each.rows:
            fed[uid] = (fed[uid][0] + prefill, fed[uid][1] + decode)
    for uid, output in enumerate(outputs):
        assert fed[uid] == (len(output.prompt_token_ids) - output.cached_tokens, 11)  # the last token is not fed


def test_drafts_are_decode_tokens_and_counted(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "SHORTEST_SLICE", 0.0)
    plain = directed_llm(str(checkpoint), page_size=4, num_pages=32, device="cpu").generate([1, 2, 3, 4, 5], PARAMS)[0]
    monkeypatch.setattr(KnowsTheAnswers, "answers", [plain.prompt_token_ids + plain.token_ids])
    monkeypatch.setattr(KnowsTheAnswers, "errors", 0.0)
    options = {"page_size": 4, "num_pages": 32, "device": "cpu", "num_draft_tokens": 3}
    llm = draft_always(directed_llm(str(checkpoint), **options, drafter="tests.drafting:KnowsTheAnswers"))
    view = LiveView(llm.core)
    assert view.look().drafts == {"drafted": 0, "accepted": 0, "verifications": 0, "paused": 0}
    llm.generate([1, 2, 3, 4, 5], PARAMS)
    state = view.look()
    assert [(each.prefill, each.decode) for each in state.slices] == [(5, 0), (0, 4), (0, 4), (0, 3)]
    assert [each.rows for each in state.slices][1:3] == [[(0, 0, 4)]] * 2
    (request,) = state.requests
    assert (request.accepted, request.rejected) == (8, 0)
    assert state.drafts == {"drafted": 8, "accepted": 8, "verifications": 3, "paused": 0}


def test_short_steps_are_put_together(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "SHORTEST_SLICE", 1000.0)
    watching = watch(llm)
    watching.look()
    llm.generate([[1, 2, 3], [4, 5, 6]], PARAMS)
    (slice_,) = watching.slices
    assert (slice_.number, slice_.prefill, slice_.decode) == (1, 6, 22)
    assert sorted(slice_.rows) == [(0, 3, 11), (1, 3, 11)]
    assert slice_.steps == 12


def test_a_preemption_is_noted_with_the_step_that_it_made_room_for(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), page_size=4, num_pages=8, device="cpu", admission_policy="optimistic", overlap=False)
    watching = watch(llm)
    watching.look()
    params = SamplingParams(max_tokens=18, temperature=0, ignore_eos=True)
    generations = [llm.prepare([prompt] * 9, params)[0] for prompt in (1, 2)]
    for generation in generations:
        llm.submit(generation)
    noted: dict[int, list[int]] = {}
    while llm.scheduler.has_work:
        llm.step()
        noted.update((each.number, each.preempted) for each in watching.slices)
    uids = [uid for preempted in noted.values() for uid in preempted]
    assert uids == [1] * generations[1].request.preemptions != []


def test_a_failed_step_is_a_step(llm: LLM) -> None:
    llm.executor.launcher = Failing(llm.engine, 1, RuntimeError("broken"), late=True)
    watching = watch(llm)
    watching.look()
    (output,) = llm.generate([[1, 2, 3]], PARAMS)
    assert output.finish_reason == "error"
    assert sum(each.steps for each in watching.slices) == 2
    (request,) = watching.finished()
    assert request.error is not None


def test_what_is_kept_is_bounded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "SHORTEST_SLICE", 0.0)
    llm.executor.launcher = Scripted([5])
    watching = watch(llm)
    watching.look()
    llm.generate([[uid + 1] for uid in range(3 * MOST_FINISHED)], PARAMS)
    assert [request.uid for request in watching.finished()] == list(range(2 * MOST_FINISHED, 3 * MOST_FINISHED))
    assert len(watching._seen) == MOST_FINISHED
    assert len(watching.slices) == MOST_SLICES


def tokens(*values: int) -> Int32Array:
    return np.asarray(values, dtype=np.int32)


def pages(first: int, count: int) -> Int32Array:
    return np.arange(first, first + count, dtype=np.int32)


def by_head(cache: PrefixCache) -> dict[tuple[int, ...], LiveNode]:
    return {tuple(node.head): node for node in nodes_of(cache)[0]}


def test_a_split_edge_is_a_parent_and_its_children() -> None:
    cache = RadixCache(page_size=2)
    cache.insert(tokens(1, 2, 3, 4), pages(0, 2))
    cache.lock(cache.insert(tokens(1, 2, 5, 6), pages(0, 1).repeat(2) + pages(0, 2) * 9).handle)
    nodes = by_head(cache)
    assert set(nodes) == {(1, 2), (3, 4), (5, 6)}
    assert nodes[3, 4].parent == nodes[5, 6].parent == nodes[1, 2].uid
    assert nodes[1, 2].parent == 0
    assert [nodes[head].pages for head in ((1, 2), (3, 4), (5, 6))] == [[0], [1], [9]]
    assert [nodes[head].locks for head in ((1, 2), (3, 4), (5, 6))] == [1, 0, 1]
    assert nodes[5, 6].last_used > nodes[3, 4].last_used


def test_of_a_large_tree_the_latest_nodes_are_shown_and_none_without_its_parent() -> None:
    cache = RadixCache(page_size=1)
    cache.insert(tokens(7), pages(0, 1))
    for branch in range(3 * MOST_NODES):
        cache.insert(tokens(7, 1000 + branch), np.asarray([0, 1 + branch], dtype=np.int32))
    nodes, count = nodes_of(cache)
    assert (len(nodes), count) == (MOST_NODES, 3 * MOST_NODES + 1)
    seen = {0}
    for node in nodes:
        assert node.parent in seen
        seen.add(node.uid)
    branches = [node.head[0] for node in nodes[1:]]
    assert branches == list(range(999 + 3 * MOST_NODES, 999 + 2 * MOST_NODES + 1, -1))


def test_no_more_is_looked_at_than_there_is_time_for() -> None:
    cache = RadixCache(page_size=1)
    for branch in range(MOST_VISITED + 50):
        cache.insert(tokens(branch), pages(branch, 1))
    assert nodes_of(cache)[1] == MOST_VISITED


def test_a_long_node_shows_its_beginning() -> None:
    length = MOST_NODE_PAGES + 5
    for cache in (RadixCache(page_size=4), BlockHashCache(page_size=4)):
        cache.insert(pages(0, 4 * length), pages(0, length))
        (node,), _ = nodes_of(cache)
        assert (node.tokens, node.num_pages) == (4 * length, length)
        assert node.head == list(range(HEAD))
        assert node.pages == list(range(MOST_NODE_PAGES))


def test_blocks_in_a_row_are_one_node_until_they_part_or_differ_in_references() -> None:
    cache = BlockHashCache(page_size=1)
    cache.insert(tokens(1, 2, 3, 4), pages(0, 4))
    cache.insert(tokens(1, 2, 8, 9), np.asarray([0, 1, 5, 6], dtype=np.int32))
    cache.lock(cache.match(tokens(1, 2, 8)).handle)
    nodes = by_head(cache)
    assert {head: (node.tokens, node.locks, node.pages) for head, node in nodes.items()} == {
        (1, 2): (2, 1, [0, 1]),
        (3, 4): (2, 0, [2, 3]),
        (8,): (1, 1, [5]),
        (9,): (1, 0, [6]),
    }
    assert nodes[1, 2].parent == 0
    assert nodes[3, 4].parent == nodes[8,].parent == nodes[1, 2].uid
    assert nodes[9,].parent == nodes[8,].uid


def test_a_cache_without_a_tree_shows_none() -> None:
    assert nodes_of(NoPrefixCache(page_size=4)) == ([], 0)


SHARED = list(range(10, 30))
"""Twenty tokens: five pages."""


@pytest.fixture
def viewed_llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), page_size=4, num_pages=64, device="cpu", overlap=False)


def submit(viewed_llm: LLM, *prompts: Sequence[int], user: str = "", max_tokens: int = 30) -> list[Generation]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    generations = [viewed_llm.prepare(prompt, params, user=user)[0] for prompt in prompts]
    for generation in generations:
        viewed_llm.submit(generation)
    return generations


def finish(viewed_llm: LLM) -> None:
    while viewed_llm.scheduler.has_work:
        viewed_llm.step()


def cells(state: LiveState) -> list[PageRun]:
    return [run for run in state.cells for _ in range(run.count)]


def test_two_prompts_with_one_prefix_share_a_node_and_its_pages(viewed_llm: LLM) -> None:
    view = LiveView(viewed_llm.core)
    submit(viewed_llm, [*SHARED, *range(40, 49)], [*SHARED, *range(60, 69)], user="ada")
    for _ in range(3):
        viewed_llm.step()
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


def test_every_page_is_what_the_ledger_says(viewed_llm: LLM) -> None:
    view = LiveView(viewed_llm.core)
    submit(viewed_llm, range(10, 31), max_tokens=4)
    finish(viewed_llm)  # leaves cached pages that nobody reads
    (running,) = submit(viewed_llm, range(50, 71))
    viewed_llm.step()
    state, memory = view.look(), viewed_llm.scheduler.memory
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


def test_a_request_is_seen_waiting_running_and_finished(viewed_llm: LLM) -> None:
    view = LiveView(viewed_llm.core)
    (generation,) = submit(viewed_llm, range(10, 24), max_tokens=6)
    (waiting,) = view.look().requests
    assert (waiting.state, waiting.prompt, waiting.pages, waiting.tail) == ("waiting", 14, 0, list(range(10, 24)))
    viewed_llm.step()
    viewed_llm.step()
    (running,) = view.look().requests
    assert (running.state, running.computed, running.generated, running.room) == ("decode", 15, 2, 6)
    assert running.arrived <= running.admitted <= running.first_token
    finish(viewed_llm)
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


def test_what_a_page_store_has_done_is_told(viewed_llm: LLM, checkpoint: Path) -> None:
    assert LiveView(viewed_llm.core).look().store == {}
    llm = LLM(checkpoint, page_size=4, num_pages=16, device="cpu", page_store="host")
    view = LiveView(llm.core)
    for first in (1, 2, 1):
        llm.generate([[first] * 50], SamplingParams(max_tokens=1))
    evicted, wanted, restored = (view.look().store[event] for event in ("evicted", "wanted", "restored"))
    assert 0 < restored < wanted
    assert restored <= evicted


def test_a_state_travels_as_a_message(viewed_llm: LLM) -> None:
    view = LiveView(viewed_llm.core)
    submit(viewed_llm, [*SHARED, 5], [*SHARED, 6])
    view.look()
    viewed_llm.step()
    state = view.look()
    assert state.slices
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=LiveState) == state


def test_of_many_the_first_are_shown_and_all_are_counted(viewed_llm: LLM) -> None:
    view = LiveView(viewed_llm.core)
    submit(viewed_llm, *[[number % 200 + 10] * 8 for number in range(500)])
    viewed_llm.step()
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


def test_a_name_is_cut_and_made_valid(viewed_llm: LLM) -> None:
    view = LiveView(viewed_llm.core)
    submit(viewed_llm, [5, 6, 7], user="\ud800" + "x" * 10_000)
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
