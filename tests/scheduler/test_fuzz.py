"""Random lives of random requests: every invariant holds after every step, and every request gets its own answer.

``pytest tests/scheduler/test_fuzz.py --hypothesis-profile=long`` takes over 20,000 steps.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from minisgl.kvcache.sizing import most_window_pages
from minisgl.request import FinishReason, Request
from tests.drafting import KnowsTheShadow
from tests.fake_executor import Fault
from tests.scheduler.harness import DELAYS, Harness

VOCAB = 2  # a vocabulary this small makes shared prefixes and duplicates the rule


class EngineLife(RuleBasedStateMachine):
    """Arrivals, aborts in every state, steps, and steps that fail, in any order."""

    @initialize(
        prefix_cache=st.sampled_from(["radix", "block-hash", "none"]),
        page_size=st.sampled_from([1, 2, 4]),
        num_pages=st.integers(8, 40),
        queue_policy=st.sampled_from(["fcfs", "lpm"]),
        batch_policy=st.sampled_from(["prefill-first", "mixed", "static"]),
        admission_policy=st.sampled_from(["optimistic", "reserve"]),
        max_prefill_tokens=st.sampled_from([3, 7, 64]),
        max_running=st.integers(1, 5),
        delay=st.sampled_from(DELAYS),
        store_slots=st.sampled_from([0, 3, 40]),
        drafter=st.sampled_from([None, KnowsTheShadow]),
        num_draft_tokens=st.integers(1, 5),
        window=st.sampled_from([None, 1, 6, 20]),
        more_window_pages=st.sampled_from([None, 0, 2, 20]),
    )
    def start(self, more_window_pages: int | None, **options: Any) -> None:
        if options["window"] is not None and more_window_pages is not None:  # layers of both kinds
            needed = int(most_window_pages(64, options["page_size"], options["window"])) + more_window_pages
            options |= {"num_window_pages": min(needed, options["num_pages"]), "store_slots": 0}
        self.harness = Harness(vocab=VOCAB, max_seq_len=64, **options)
        self.requests: list[Request] = []

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24),
        max_tokens=st.integers(1, 20),
        stop=st.sampled_from([(), (), (0,)]),
        watched=st.booleans(),
        rule_seed=st.none() | st.integers(0, 20),
    )
    def arrive(
        self, prompt: list[int], max_tokens: int, stop: tuple[int, ...], watched: bool, rule_seed: int | None
    ) -> None:
        self.requests.append(self.harness.add(prompt, max_tokens, stop, rule_seed, watched=watched))

    @rule(copy_of=st.integers(0, 30), extra=st.lists(st.integers(0, VOCAB - 1), max_size=6))
    def arrive_with_shared_prefix(self, copy_of: int, extra: list[int]) -> None:
        if self.requests:
            prompt = self.requests[copy_of % len(self.requests)].prompt.tolist() + extra
            self.requests.append(self.harness.add(prompt[:40], 8))

    @rule(which=st.integers(0, 30), extra=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3))
    def fork(self, which: int, extra: list[int]) -> None:
        """A running conversation goes on in another way."""
        slots = self.harness.table.slots
        if len(slots):
            slot = int(slots[which % len(slots)])
            known = self.harness.table.tokens[slot, : self.harness.table.known_len[slot]].tolist()
            self.requests.append(self.harness.add((known + extra)[-40:], 8))

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        if self.requests:
            self.harness.abort(self.requests[which % len(self.requests)])

    @rule(at_launch=st.booleans(), error=st.sampled_from([RuntimeError, KeyboardInterrupt]))
    def break_the_next_step(self, at_launch: bool, error: type[BaseException]) -> None:
        self.harness.faulty.fault = Fault(at_launch, error())
        self.harness.step()

    @rule(count=st.integers(1, 6))
    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        assert sorted(self.harness.finished) == [request.uid for request in self.requests]
        for request in self.requests:
            self.harness.assert_output(request)
            if request.finish_reason is FinishReason.ERROR and "KV cache" not in (request.error or ""):
                assert request.uid in self.harness.faulty.doomed, "an error of a request that no broken step touched"
        self.harness.assert_idle_and_clean()


def test_random_lives() -> None:
    profile = settings.get_current_profile_name()
    limits = settings() if profile == "long" else settings(max_examples=60, stateful_step_count=30)
    run_state_machine_as_test(EngineLife, settings=settings(limits, suppress_health_check=list(HealthCheck)))
