"""The life of a request: states, chunks, sharing, aborts, failures and deadlines. No model, see `ShadowExecutor`."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import fields

import numpy as np
import pytest

from minisgl.batch import Batch, PendingStep, StepResult
from minisgl.engine.memory import largest_prefill
from minisgl.errors import InvariantError
from minisgl.request import FinishReason, Int32Array, Request, RequestState, TokenLogprobs
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.batch_builder import BatchBuilder
from minisgl.scheduler.policy import FirstComeFirstServed, MemoryDemand, Policies
from tests.fake_executor import Fault, expected_output
from tests.scheduler.harness import DELAYS, Harness

CACHES = ["radix", "block-hash", "none"]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(seed * 7 + i * i + i // 3) % 5 for i in range(length)]


# -- states and chunks ---------------------------------------------------------------------------------------------


def test_a_request_passes_through_its_states() -> None:
    harness = Harness(max_prefill_tokens=4)
    request = harness.add(prompt_of(10), max_tokens=3)
    states = [request.state]
    while harness.scheduler.has_work:
        harness.step()
        states.append(request.state)
    waiting, prefill, decode, finished = (
        RequestState.WAITING,
        RequestState.PREFILL,
        RequestState.DECODE,
        RequestState.FINISHED,
    )
    assert states == [waiting, prefill, prefill, decode, decode, finished]
    times = request.times
    assert 0.0 < times.arrived <= times.admitted <= times.first_token <= times.finished
    harness.assert_output(request)
    harness.assert_idle_and_clean()


@pytest.mark.parametrize("delay", DELAYS)
def test_only_the_last_chunk_samples(delay: int) -> None:
    harness = Harness(max_prefill_tokens=7, delay=delay, prefix_cache="none")
    request = harness.add(prompt_of(20), max_tokens=2)
    harness.run()
    assert [batch.num_tokens for batch in harness.batches] == [7, 7, 6, 1]
    assert [batch.sample_rows.tolist() for batch in harness.batches] == [[], [], [0], [0]]
    assert [batch.output_index.tolist() for batch in harness.batches] == [[], [], [0], [1]]
    harness.assert_output(request)


def test_a_step_never_feeds_more_prompt_tokens_than_the_limit() -> None:
    for composition in ("prefill-first", "mixed", "static"):
        harness = Harness(max_prefill_tokens=7, batch_policy=composition, num_pages=256)
        requests = [harness.add(prompt_of(3 + 5 * i, seed=i), max_tokens=6) for i in range(12)]
        harness.run()
        prefill_tokens = [batch.num_tokens - batch.num_decode for batch in harness.batches]
        assert max(prefill_tokens) == 7
        for request in requests:
            harness.assert_output(request)


def test_one_step_takes_several_short_prompts() -> None:
    harness = Harness(max_prefill_tokens=16)
    for i in range(4):
        harness.add(prompt_of(5, seed=i), max_tokens=2)
    harness.step()
    assert harness.batches[0].q_lens.tolist() == [5, 5, 5, 1]
    assert harness.batches[0].sample_rows.tolist() == [0, 1, 2]


def test_a_stop_token_ends_a_request_and_nothing_follows() -> None:
    harness = Harness(vocab=4)
    prompt = prompt_of(6)
    unstopped = expected_output(prompt, 20, 4)
    stop = unstopped[4]
    request = harness.add(prompt, max_tokens=20, stop_ids=(99, stop))
    harness.run()
    assert request.finish_reason is FinishReason.STOP
    assert request.output == unstopped[: unstopped.index(stop) + 1]


def test_a_stop_token_in_the_last_place_is_a_stop() -> None:
    harness = Harness(vocab=4)
    unlimited = expected_output(prompt_of(6), 20, 4)
    first = unlimited.index(unlimited[4])
    request = harness.add(prompt_of(6), max_tokens=first + 1, stop_ids=(unlimited[4],))
    harness.run()
    assert len(request.output) == first + 1
    assert request.finish_reason is FinishReason.STOP, "the answer is complete, and as long as it may be"


def test_a_single_token_needs_no_decode_step() -> None:
    harness = Harness()
    request = harness.add(prompt_of(6), max_tokens=1)
    harness.run()
    assert len(harness.batches) == 1
    assert request.finish_reason is FinishReason.LENGTH
    harness.assert_output(request)


def step_of_four(**fields: list[object]) -> tuple[Harness, list[Request], Batch]:
    """A launched step that samples for four watched requests, behind a row that doesn't. No uid is its slot.

    ``fields`` has for some arguments of `Harness.add` what each of the four gets.
    """
    harness = Harness(page_size=4)
    harness.abort(harness.add([1]))
    long = harness.add(prompt_of(5))
    given = [{name: values[i] for name, values in fields.items()} for i in range(4)]
    requests = [harness.add(prompt_of(5, seed=1 + i), watched=True, **each) for i, each in enumerate(given)]
    memory = harness.memory
    memory.fit_chunk = lambda slot, count: min(count, 2) if slot == long.slot else count  # type: ignore[method-assign]
    batch = harness.scheduler.schedule()
    assert batch is not None
    assert batch.sample_rows.tolist() == [1, 2, 3, 4]
    harness.scheduler.take_output()
    return harness, requests, batch


def test_each_token_and_its_logprobs_reach_their_own_request() -> None:
    harness, (elsewhere, aborted, third, preempted), batch = step_of_four()
    slots = [request.slot for request in (elsewhere, aborted, third, preempted)]
    harness.scheduler.finish(aborted.uid, FinishReason.ABORT)
    harness.scheduler._preempt(preempted.slot)
    harness.scheduler.take_output()
    logprobs = [TokenLogprobs(token, -0.5 * token) for token in (10, 11, 12, 13)]
    result = StepResult(np.array([10, 11, 12, 13], dtype=np.int32), logprobs)
    harness.scheduler._append(batch, result, np.array([3, 1, 2], dtype=np.int32))
    assert [harness.table.output(slot) for slot in slots] == [[], [], [12], [13]], (
        "the first row's place isn't asked for, the second has ended, and a preempted one still gets its token"
    )
    events = [(each.request, each.token_id, each.logprobs) for each in harness.scheduler.take_output().events]
    assert events == [(preempted, 13, logprobs[3]), (third, 12, logprobs[2])], "in the order of the places"
    assert [each.logprobs for each in (elsewhere, aborted, third)] == [[], [], [logprobs[2]]]


def test_only_rows_that_go_on_publish_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, (full, stopped, on, preempted), batch = step_of_four(
        max_tokens=[1, 9, 9, 9], stop_ids=[(), (30, 31), (30, 31), ()]
    )
    slots = [on.slot]
    harness.scheduler._preempt(preempted.slot)
    published: list[int] = []
    monkeypatch.setattr(harness.memory, "cache_answers", lambda slots: published.extend(slots.tolist()))
    harness.scheduler.process(batch, StepResult(np.array([30, 31, 32, 30], dtype=np.int32)))
    assert published == slots, "the others stop, are full, or don't run any more"
    output = harness.scheduler.take_output()
    assert [(each.request, each.token_id) for each in output.events] == [
        (full, 30),
        (stopped, 31),
        (on, 32),
        (preempted, 30),
    ], "a row's last token is reported, too"
    assert output.finished == [full, stopped], "in the order of their rows"
    assert [each.finish_reason for each in (full, stopped, on)] == [FinishReason.LENGTH, FinishReason.STOP, None]
    assert [each.output for each in (full, stopped)] == [[30], [31]]


def test_only_the_first_token_of_a_request_is_stamped() -> None:
    harness = Harness()
    request = harness.add(prompt_of(5), max_tokens=4)
    stamps = []
    while harness.scheduler.has_work:
        harness.step()
        stamps.append(request.times.first_token)
    assert stamps == [stamps[0]] * 4
    assert request.times.admitted <= stamps[0] < request.times.finished


def test_a_row_whose_last_token_is_in_flight_is_not_scheduled_again() -> None:
    harness = Harness(delay=1)
    request = harness.add(prompt_of(6), max_tokens=2)
    harness.run()
    assert len(harness.batches) == 2
    harness.assert_output(request)


def test_only_watched_requests_report_tokens_and_all_report_their_end_once() -> None:
    harness = Harness()
    watched = harness.add(prompt_of(5), max_tokens=4, watched=True)
    other = harness.add(prompt_of(5, seed=1), max_tokens=4)
    tokens, finished = [], []
    while harness.scheduler.has_work:
        output = harness.step()
        assert all(event.request is watched for event in output.events)
        tokens += [event.token_id for event in output.events]
        finished += output.finished
    assert tokens == watched.output
    assert finished == [watched, other]


@pytest.mark.parametrize("max_tokens", [5, 9, 10, 11, 27, 30, 99])
def test_the_largest_prefill_is_what_memory_was_reckoned_with(max_tokens: int) -> None:
    """Of more prompts than there are slots, all of the greatest length."""
    harness = Harness(max_running=3, max_prefill_tokens=max_tokens, prefix_cache="none")
    for seed in range(4):
        harness.add(prompt_of(10, seed), max_tokens=1)
    harness.step()
    assert harness.batches[0].q_lens.tolist() == largest_prefill(max_tokens, max_rows=3, max_seq_len=10)


# -- sharing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("delay", DELAYS)
def test_an_uncached_prefix_is_computed_once_a_batch(cache: str, delay: int) -> None:
    harness = Harness(prefix_cache=cache, page_size=4, max_prefill_tokens=1000, num_pages=256, delay=delay)
    prompt = prompt_of(32)
    requests = [harness.add(prompt, max_tokens=1) for _ in range(6)]
    harness.run()
    # The last token is always computed, and its page with it: 28 of 32 tokens can be shared.
    assert harness.executor.fed_tokens == (6 * 32 if cache == "none" else 32 + 5 * 4)
    assert len(harness.batches) == 1
    assert [r.cached_tokens for r in requests] == ([0] * 6 if cache == "none" else [0] + [28] * 5)
    for request in requests:
        harness.assert_output(request)


@pytest.mark.parametrize("cache", ["radix", "block-hash"])
def test_a_prefix_in_chunks_is_computed_once(cache: str) -> None:
    harness = Harness(prefix_cache=cache, page_size=4, max_prefill_tokens=6, num_pages=256, batch_policy="mixed")
    requests = [harness.add([*prompt_of(30), i % 3], max_tokens=3) for i in range(5)]
    harness.run()
    prefilled = sum(batch.num_tokens - batch.num_decode for batch in harness.batches)
    assert prefilled <= 31 + 4 * (31 - 28)
    for request in requests:
        harness.assert_output(request)


@pytest.mark.parametrize("cache", ["radix", "block-hash"])
def test_answers_are_cached_for_the_next_turn(cache: str) -> None:
    harness = Harness(prefix_cache=cache, page_size=4)
    first = harness.add(prompt_of(9), max_tokens=8)
    harness.run()
    second = harness.add([*prompt_of(9), *first.output, 1, 2], max_tokens=2)
    harness.run()
    assert second.cached_tokens == 16  # of 9 + 8 tokens the last was never fed
    harness.assert_output(second)


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("cache", ["radix", "block-hash"])
def test_a_fork_of_a_running_answer_finds_its_full_pages(cache: str, delay: int) -> None:
    harness = Harness(prefix_cache=cache, page_size=4, delay=delay)
    first = harness.add(prompt_of(9), max_tokens=30)
    slot = first.slot
    for length in range(10, 35):
        harness.step()
        slot = first.slot
        while harness.table.known_len[slot] < length:
            harness.step()
        known = harness.table.tokens[slot, :length]
        # The last token is known, and its keys are not computed yet.
        assert len(harness.memory.cache.match(known).pages) == (length - 1) // 4
    answer = expected_output(prompt_of(9), 30, harness.vocab)
    fork = harness.add([*prompt_of(9), *answer[:20], 1, 1], max_tokens=5)
    harness.run()
    assert fork.cached_tokens == 28
    harness.assert_output(first)
    harness.assert_output(fork)
    harness.assert_idle_and_clean()


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("cache", ["radix", "block-hash"])
def test_equal_answers_are_published_once(cache: str, delay: int) -> None:
    """Their pages have equal content; the second row keeps its own to the end."""
    harness = Harness(prefix_cache=cache, page_size=4, delay=delay)
    pair = [harness.add(prompt_of(9), max_tokens=30) for _ in range(2)]
    for _ in range(20):
        harness.step()
    cached = harness.memory.cache.num_pages
    assert cached == (int(harness.table.known_len[pair[0].slot]) - 1) // 4
    harness.run()
    for request in pair:
        harness.assert_output(request)
    harness.assert_idle_and_clean()


@pytest.mark.parametrize("cache", ["radix", "block-hash"])
def test_an_answer_is_not_published_below_pages_of_a_step_that_may_fail(cache: str) -> None:
    """A prompt that overtakes the answer it repeats is cached when it is scheduled, and its step fails."""
    harness = Harness(prefix_cache=cache, page_size=4, delay=1)
    first = harness.add(prompt_of(9), max_tokens=30)
    while harness.table.known_len[first.slot] != 12:
        harness.step()
    answer = expected_output(prompt_of(9), 30, harness.vocab)
    overtaking = harness.add([*prompt_of(9), *answer[:20]], max_tokens=2)
    harness.faulty.fault = Fault(False, RuntimeError("broken"))
    while overtaking.state is not RequestState.FINISHED:
        harness.step()
    harness.run()
    again = harness.add([*prompt_of(9), *answer], max_tokens=5)
    harness.run()
    harness.assert_output(again)
    harness.assert_output(first)


@pytest.mark.parametrize("cache", ["radix", "block-hash"])
def test_a_prompt_in_chunks_skips_what_others_have_computed_meanwhile(cache: str) -> None:
    """The next turn of a conversation has been fed in part when the first turn's answer becomes known to the cache."""
    harness = Harness(prefix_cache=cache, page_size=4, max_prefill_tokens=4, batch_policy="mixed")
    harness.memory.cache.extend = None  # a cache that takes an answer at its end
    first = harness.add(prompt_of(8), max_tokens=20)
    while len(harness.batches) < 18:
        harness.step()
    answer = expected_output(prompt_of(8), 20, harness.vocab)
    second = harness.add([*prompt_of(8), *answer, *prompt_of(9, seed=1)], max_tokens=2)
    fed: list[int] = []
    while harness.scheduler.has_work:
        harness.step()
        batch = harness.batches[-1]
        fed += batch.positions[batch.num_decode :].tolist()
    assert first.finish_reason is FinishReason.LENGTH
    # Its own chunks up to 16, then what the answer has filled of pages, of 8 + 19 computed tokens, and the rest.
    assert fed == [*range(4, 16), *range(24, 37)]
    harness.assert_output(second)


# -- aborts and deadlines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("steps", range(9))
def test_an_abort_in_every_state(steps: int, cache: str, delay: int) -> None:
    harness = Harness(max_prefill_tokens=4, delay=delay, prefix_cache=cache)
    victim = harness.add(prompt_of(11), max_tokens=5)
    other = harness.add(prompt_of(11), max_tokens=5)
    for _ in range(steps):
        harness.step()
    finished = victim.state is RequestState.FINISHED
    harness.abort(victim)
    harness.abort(victim)
    assert victim.finish_reason is (FinishReason.LENGTH if finished else FinishReason.ABORT)
    harness.run()
    assert other.finish_reason is FinishReason.LENGTH
    harness.assert_output(victim)
    harness.assert_output(other)
    harness.assert_idle_and_clean()


def test_an_abort_while_preempted_and_in_flight() -> None:
    """The rarest state: the pages are gone, the row waits for a launched step, and the request is in no queue."""
    harness = Harness(num_pages=6, page_size=2, max_prefill_tokens=8)
    launched: deque[tuple[Batch, PendingStep]] = deque()
    first, last = harness.add(prompt_of(4), max_tokens=8), harness.add(prompt_of(4, seed=1), max_tokens=8)
    while not (last.state is RequestState.PREEMPTED and last.slot >= 0):
        batch = harness.scheduler.schedule()
        assert batch is not None
        launched.append((batch, harness.executor.launch(batch)))
        if last.state is not RequestState.PREEMPTED and len(launched) > 1:
            done, pending = launched.popleft()
            harness.scheduler.process(done, pending.wait())
    assert last not in list(harness.scheduler.waiting)
    harness.abort(last)
    for batch, pending in launched:
        harness.scheduler.process(batch, pending.wait())
    harness.run()
    assert last.finish_reason is FinishReason.ABORT
    harness.assert_output(last)
    harness.assert_output(first)
    harness.assert_idle_and_clean()


def test_a_deadline_ends_waiting_and_running_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.perf_counter()
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    harness = Harness(max_running=1, max_prefill_tokens=4)
    running = harness.add(prompt_of(6), max_tokens=20, deadline=now + 2)
    waiting = harness.add(prompt_of(6), max_tokens=20, deadline=now + 1)
    patient = harness.add(prompt_of(6), max_tokens=20)
    for _ in range(4):
        harness.step()
    now += 1
    harness.step()
    assert waiting.finish_reason is FinishReason.ERROR
    assert "time limit" in (waiting.error or "")
    assert running.state is RequestState.DECODE
    now += 1
    harness.run()
    assert running.finish_reason is FinishReason.ERROR
    assert patient.finish_reason is FinishReason.LENGTH
    for request in (running, waiting, patient):
        harness.assert_output(request)
    harness.assert_idle_and_clean()


# -- steps that fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("steps", range(7))
def test_a_failed_step_ends_its_requests_and_leaves_nothing_in_the_cache(steps: int, cache: str) -> None:
    harness = Harness(prefix_cache=cache, max_prefill_tokens=6, batch_policy="mixed")
    failed = [harness.add(prompt_of(11), max_tokens=6) for _ in range(3)]
    for _ in range(steps):
        harness.step()
    batch = harness.scheduler.schedule()
    assert batch is not None
    in_step = [harness.table.request(slot) for slot in batch.slots.tolist()]
    harness.executor.kv[:] = -1  # the step wrote nothing, and what was there before is lost as well
    harness.scheduler.fail(batch, "the step failed: no reason")
    harness.check()
    for request in in_step:
        assert request.finish_reason is FinishReason.ERROR
        assert request.error == "the step failed: no reason"
    for request in failed:
        harness.abort(request)
    assert harness.memory.cache.num_pages == 0
    again = harness.add(prompt_of(11), max_tokens=6)
    harness.run()
    assert again.cached_tokens == 0
    assert again.finish_reason is FinishReason.LENGTH
    harness.assert_output(again)
    harness.assert_idle_and_clean()


def test_requests_outside_of_a_failed_step_go_on() -> None:
    harness = Harness(max_prefill_tokens=64)
    decoding = harness.add(prompt_of(9), max_tokens=8)
    harness.step()
    harness.step()
    prefilling = harness.add(prompt_of(9), max_tokens=8)
    batch = harness.scheduler.schedule()
    assert batch is not None
    assert batch.num_decode == 0
    harness.scheduler.fail(batch, "out of luck")
    harness.run()
    assert prefilling.finish_reason is FinishReason.ERROR
    assert decoding.finish_reason is FinishReason.LENGTH
    harness.assert_output(decoding)
    harness.assert_idle_and_clean()


# -- the check itself ----------------------------------------------------------------------------------------------


def test_check_notices_a_lost_request() -> None:
    harness = Harness()
    request = harness.add(prompt_of(5))
    harness.scheduler.waiting.remove(request)
    with pytest.raises(InvariantError, match="neither waiting nor running"):
        harness.scheduler.check()


def test_the_seed_and_parameters_travel_with_the_admission() -> None:
    harness = Harness()
    request = harness.add(prompt_of(5), max_tokens=4, stop_ids=(9,), seed=77)
    harness.step()
    (admission,) = harness.batches[0].new_requests
    assert admission.tokens.tolist() == prompt_of(5)
    assert (admission.slot, admission.prompt_len, admission.stop_ids, admission.seed) == (request.slot, 5, (9,), 77)
    assert admission.params == SamplingParams(max_tokens=4)


def two_decodes_and_two_prefills() -> tuple[Harness, Batch]:
    """A mixed step over 4-token pages: rows of requests 0, 1 decode, 2 continues in chunks, 3 is admitted."""
    harness = Harness(batch_policy="mixed", page_size=4, max_prefill_tokens=8, prefix_cache="none", num_pages=64)
    harness.add([0] * 3, max_tokens=9)
    harness.add([1] * 4, max_tokens=9)
    harness.step()
    harness.add([2] * 14, max_tokens=9)
    harness.step()
    harness.add([3] * 9, max_tokens=9)
    harness.step()
    return harness, harness.batches[-1]


def test_a_mixed_step_is_laid_out_as_documented() -> None:
    harness, batch = two_decodes_and_two_prefills()
    slots = [harness.table.slots.tolist().index(slot) for slot in batch.slots.tolist()]
    assert slots == [0, 1, 2, 3]
    assert batch.num_decode == 2
    assert batch.cu_seqlens_q.tolist() == [0, 1, 2, 8, 10]
    assert batch.q_lens.tolist() == [1, 1, 6, 2]
    assert batch.seq_lens.tolist() == [5, 6, 14, 2]
    assert batch.positions.tolist() == [4, 5, 8, 9, 10, 11, 12, 13, 0, 1]
    assert batch.token_slots.tolist() == np.repeat(batch.slots, batch.q_lens).tolist()
    assert batch.sample_rows.tolist() == [0, 1, 2]  # the last row has seven tokens to go
    assert batch.output_index.tolist() == [2, 2, 0]
    rows = harness.memory.page_table.rows
    expected = [
        int(rows[slot, position // 4]) * 4 + position % 4
        for slot, position in zip(batch.token_slots.tolist(), batch.positions.tolist(), strict=True)
    ]
    assert batch.out_locs.tolist() == expected
    assert [new.slot for new in batch.new_requests] == [batch.slots[3]]
    assert (batch.num_rows, batch.num_tokens, batch.max_q_len, batch.max_seq_len) == (4, 10, 6, 14)


def test_a_long_prompt_comes_in_chunks_of_which_the_last_samples() -> None:
    harness = Harness(max_prefill_tokens=4)
    request = harness.add([1, 2, 0, 1, 2, 2, 1, 0, 1, 1], max_tokens=2)
    batches = []
    for _ in range(3):  # results may come in later
        batch = harness.scheduler.schedule()
        assert batch is not None
        batches.append(batch)
    assert [batch.q_lens.tolist() for batch in batches] == [[4], [4], [2]]
    assert [batch.positions.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [batch.sample_rows.tolist() for batch in batches] == [[], [], [0]]
    assert [len(batch.new_requests) for batch in batches] == [1, 0, 0]
    assert request.state is RequestState.DECODE


def test_the_page_of_a_prompts_last_token_is_not_published() -> None:
    harness = Harness(page_size=4)
    harness.add(prompt_of(8), max_tokens=4)
    harness.scheduler.schedule()
    assert harness.memory.cache.num_pages == 1, "whoever finds the prompt computes its last token anyway"


def test_a_request_may_take_the_last_page() -> None:
    harness = Harness(page_size=4, num_pages=2)
    request = harness.add(prompt_of(8), max_tokens=1)
    batch = harness.scheduler.schedule()
    assert batch is not None, "two pages are free, and two are wanted"
    assert batch.slots.tolist() == [request.slot]


def test_a_request_that_is_not_admitted_leaves_everything_as_it_was() -> None:
    harness = Harness(page_size=4, num_pages=6, batch_policy="mixed")
    first = harness.add(prompt_of(9), max_tokens=1)
    harness.scheduler.schedule()
    harness.scheduler.finish(first.uid, FinishReason.ABORT)  # two of its pages stay in the cache
    assert harness.memory.cache.num_evictable == 2
    harness.add(prompt_of(12, seed=1), max_tokens=4)
    harness.scheduler.schedule()
    large = harness.add(prompt_of(20), max_tokens=2)
    harness.scheduler.schedule()
    assert (large.state, large.slot) == (RequestState.WAITING, -1), "five pages are wanted, and three could be had"
    assert list(harness.scheduler.waiting) == [large]
    assert harness.memory.cache.num_evictable == 2, "the cached pages that it has found can still be evicted"


class AdmitsAll:
    """An admission policy that asks nothing."""

    def can_admit(self, demand: MemoryDemand) -> bool:
        return True


class AdmitsFew:
    """An admission policy that wants to see many pages available."""

    def can_admit(self, demand: MemoryDemand) -> bool:
        return demand.available > 5


@pytest.mark.parametrize(
    ("policy", "available", "is_let_in"),
    [
        (AdmitsAll(), [3, 3], True),
        (AdmitsAll(), [3, 2], False),
        (AdmitsAll(), [2, 3], False),
        (AdmitsFew(), [6, 6], True),
        (AdmitsFew(), [6, 5], False),
        (AdmitsFew(), [5, 6], False),
    ],
)
def test_every_demand_must_be_met_and_admitted(
    policy: AdmitsAll | AdmitsFew, available: list[int], is_let_in: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with two kinds of pages, of which a request wants three each."""
    harness = Harness(policies=Policies(admission=policy))
    request, admitter = harness.add(prompt_of(9)), harness.scheduler._admitter
    demands = [MemoryDemand(now=3, at_most=3, available=each, promised=0, running=0) for each in available]
    monkeypatch.setattr(admitter, "_demands", lambda *of_request: demands)
    assert (admitter.try_admit(request) is not None) == is_let_in
    assert (request.slot >= 0) == is_let_in
    assert len(harness.scheduler.waiting) == (0 if is_let_in else 1)


class Counts(FirstComeFirstServed):
    """Notes the requests that it hears of, and how much of each was cached."""

    def __init__(self) -> None:
        self.admitted: list[tuple[int, int]] = []

    def on_admit(self, request: Request) -> None:
        self.admitted.append((request.uid, request.cached_tokens))

    def on_finish(self, request: Request) -> None: ...


def test_a_first_admission_is_noted_and_a_second_is_not() -> None:
    counts = Counts()
    harness = Harness(page_size=4, policies=Policies(queue=counts))
    table, admitter = harness.table, harness.scheduler._admitter
    known = harness.add(prompt_of(9))
    assert admitter.try_admit(known) is not None
    table.kv_len[known.slot] = 9
    harness.abort(known)  # two full pages stay in the cache

    before = time.perf_counter()
    request = harness.add(prompt_of(13), stop_ids=(99,), seed=7)
    assert admitter.try_admit(request) is not None
    assert before <= request.times.arrived <= request.times.admitted <= time.perf_counter()
    assert (request.cached_tokens, type(request.cached_tokens)) == (8, int)
    assert int(table.kv_len[request.slot]) == 8, "two pages of four tokens"
    assert counts.admitted == [(known.uid, 0), (request.uid, 8)], "it hears what was cached, too"
    assert harness.memory.cache.num_evictable == 0, "a request that runs keeps its lock"

    admitted = request.times.admitted
    table.tokens[request.slot, 13:15] = [1, 2]  # two tokens of an answer
    table.known_len[request.slot] = 15
    table.kv_len[request.slot] = 14
    harness.scheduler._preempt(request.slot)
    assert (request.slot, request.output) == (-1, [1, 2])
    again = admitter.try_admit(request)
    assert again is not None
    assert table.kv_len[request.slot] == 12, "its own pages were cached meanwhile"
    assert (request.times.admitted, request.cached_tokens) == (admitted, 8), "they tell of the first admission"
    assert len(counts.admitted) == 2, "its prompt was counted already"
    assert again.tokens.tolist() == [*prompt_of(13), 1, 2], "the answer so far is fed again, behind the prompt"
    assert (again.slot, again.prompt_len, again.params) == (request.slot, 13, request.params)
    assert (again.stop_ids, again.seed) == ((99,), 7)


def test_tokens_that_a_store_has_filled_count_as_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnePage:
        def restore(self, tokens: Int32Array, first: int, pages: Int32Array) -> int:
            return 1

    harness = Harness(page_size=4)
    monkeypatch.setattr(harness.memory, "offload", OnePage())
    request = harness.add(prompt_of(9))
    assert harness.scheduler._admitter.try_admit(request) is not None
    assert request.cached_tokens == 4, "the prefix cache was empty, and a store had one page"


def test_a_chunk_is_as_long_as_budget_and_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(page_size=4)
    request, table, builder = harness.add(prompt_of(10)), harness.table, BatchBuilder()
    assert harness.scheduler._admitter.try_admit(request) is not None
    slot, room = request.slot, [2, 0, 9]
    wanted, published = [], []

    def fit_chunk(slot: int, count: int) -> int:
        wanted.append(count)
        return min(count, room[len(wanted) - 1])

    def cache_chunk(slot: int, kv_len_before: int) -> None:
        published.append((kv_len_before, int(table.kv_len[slot]), int(table.token_len[slot])))

    monkeypatch.setattr(harness.memory, "fit_chunk", fit_chunk)
    monkeypatch.setattr(harness.memory, "cache_chunk", cache_chunk)
    assert [harness.scheduler._add_chunk(builder, slot, budget) for budget in (4, 5, 100)] == [2, 0, 8]
    assert wanted == [4, 5, 8], "no more than the budget, and no more than there is"
    assert (builder.kv_lens, builder.q_lens, builder.samples) == ([0, 2], [2, 8], [0, 1]), "an empty chunk is no row"
    assert published == [(0, 2, 10), (2, 10, 10)], "before one more token exists"
    assert (table.token_len[slot], table.prefilling[slot]) == (11, False)
    assert request.state is RequestState.DECODE


def test_a_request_that_comes_back_samples_behind_its_answer() -> None:
    harness = Harness(page_size=4)
    request, builder = harness.add(prompt_of(6)), BatchBuilder()
    assert harness.scheduler._admitter.try_admit(request) is not None
    harness.table.tokens[request.slot, 6:8] = [1, 2]
    harness.table.known_len[request.slot] = 8
    harness.scheduler._preempt(request.slot)
    assert harness.scheduler._admitter.try_admit(request) is not None
    assert [harness.scheduler._add_chunk(builder, request.slot, budget) for budget in (6, 6)] == [6, 2]
    assert builder.samples == [0, 1], "the prompt's last token is not its last"


def test_every_array_is_int32() -> None:
    _, batch = two_decodes_and_two_prefills()
    arrays = {f.name: getattr(batch, f.name) for f in fields(batch) if isinstance(getattr(batch, f.name), np.ndarray)}
    assert len(arrays) == 14
    assert {name: array.dtype for name, array in arrays.items()} == dict.fromkeys(arrays, np.dtype(np.int32))


@pytest.mark.parametrize("cache", ["radix", "block-hash", "none"])
def test_the_changes_of_all_batches_add_up_to_the_page_table(cache: str) -> None:
    """An executor that applies them has, for each row of each batch, the pages that the scheduler means."""
    harness = Harness(prefix_cache=cache, page_size=2, num_pages=24, max_prefill_tokens=5, batch_policy="mixed")
    for i in range(20):
        harness.add([i % 2] * (1 + i % 9), max_tokens=2 + i % 7)
    while harness.scheduler.has_work:
        harness.step()
        for slot in harness.table.slots.tolist():
            pages = harness.memory.row(slot)
            assert harness.executor.page_table[slot, : len(pages)].tolist() == pages.tolist()


def test_changes_are_sent_once() -> None:
    harness = Harness(page_size=4, prefix_cache="none")
    harness.add([0] * 5, max_tokens=9)
    while harness.scheduler.has_work:
        harness.step()
    changed = [len(batch.page_index) for batch in harness.batches]
    # Two pages with the prompt, a third for position 8, a fourth for position 12.
    assert changed == [2, 0, 0, 0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize("composition", ["prefill-first", "mixed", "static"])
def test_rows_are_in_order_of_arrival_decodes_first(composition: str) -> None:
    harness = Harness(batch_policy=composition, num_pages=24, page_size=2, max_prefill_tokens=6, max_running=5)
    for i in range(25):
        harness.add([i % 3] * (1 + i % 6), max_tokens=1 + i % 8)
    batches = 0
    while harness.scheduler.has_work:
        batch = harness.scheduler.schedule()
        if batch is None:
            continue
        batches += 1
        arrival = harness.table.arrival[batch.slots].tolist()
        decodes, prefills = arrival[: batch.num_decode], arrival[batch.num_decode :]
        assert decodes == sorted(decodes)
        assert prefills == sorted(prefills)
        assert (batch.q_lens[: batch.num_decode] == 1).all()
        assert len(set(batch.slots.tolist())) == batch.num_rows
        harness.scheduler.process(batch, harness.executor.launch(batch).wait())
    assert batches > 20


def test_the_same_requests_give_the_same_batches() -> None:
    """Nothing depends on addresses, hashes or the clock, so every rank of a group composes the same steps."""

    def batches() -> list[Batch]:
        harness = Harness(
            queue_policy="lpm", batch_policy="mixed", num_pages=20, page_size=2, max_prefill_tokens=6, max_running=5
        )
        requests = [harness.add([i % 3] * (1 + i % 6), max_tokens=1 + i % 8) for i in range(25)]
        for i in range(5):
            harness.step()
            harness.abort(requests[2 * i])
        harness.run()
        return harness.batches

    first, second = batches(), batches()
    assert len(first) == len(second) > 20
    for a, b in zip(first, second, strict=True):
        for f in fields(a):
            if isinstance(getattr(a, f.name), np.ndarray):
                assert np.array_equal(getattr(a, f.name), getattr(b, f.name)), f.name


def test_nothing_to_do_is_no_batch() -> None:
    harness = Harness()
    assert harness.scheduler.schedule() is None
    assert not harness.scheduler.has_work
    harness.add([1, 2], max_tokens=1)
    assert harness.scheduler.has_work
    harness.run()
    assert harness.scheduler.schedule() is None
