"""A scheduler over the shadow executor, with every invariant checked after every step."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch

from minisgl.batch import Batch
from minisgl.config import EngineConfig
from minisgl.drafters.protocol import DraftTarget
from minisgl.kvcache import block_hash, radix
from minisgl.kvcache.host_store import host_store
from minisgl.kvcache.page_store import PageStore
from minisgl.kvcache.pool import KVCache
from minisgl.kvcache.prefix import select_prefix_cache
from minisgl.request import FinishReason, Request
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.loop import EngineLoop
from minisgl.scheduler.memory import KVMemory
from minisgl.scheduler.mixed_memory import MixedMemory
from minisgl.scheduler.policy import Policies
from minisgl.scheduler.scheduler import Scheduler, StepOutput
from minisgl.scheduler.speculation import Speculation
from minisgl.table import RunningTable
from tests.drafting import DraftsAreFree, KnowsTheAnswers
from tests.fake_executor import FaultyExecutor, ShadowExecutor, expected_output
from tests.rule import CountingMaskMaker, Rule

assert radix  # imported, as the next one, for their registration
assert block_hash


DELAYS = [0, 1]
"""By how many steps a loop may be late."""


class Harness:
    """Drives a loop whose results are processed ``delay`` steps late."""

    def __init__(
        self,
        *,
        prefix_cache: str = "radix",
        page_size: int = 4,
        num_pages: int = 64,
        max_running: int = 8,
        max_seq_len: int = 128,
        queue_policy: str = "fcfs",
        batch_policy: str = "prefill-first",
        admission_policy: str = "optimistic",
        policies: Policies | None = None,
        max_prefill_tokens: int = 64,
        max_queued: int = 10_000,
        vocab: int = 3,
        delay: int = 0,
        store_slots: int = 0,
        drafter: type[KnowsTheAnswers] | None = None,
        num_draft_tokens: int = 3,
        window: int | None = None,
        num_window_pages: int | None = None,
    ) -> None:
        self.table = RunningTable(max_running, max_seq_len)
        cache, drafts = select_prefix_cache(prefix_cache)(page_size), 0 if drafter is None else num_draft_tokens
        if num_window_pages is None:
            self.memory = KVMemory(num_pages, self.table, cache, window=window, num_draft_tokens=drafts)
        else:
            assert window is not None
            self.memory = MixedMemory(num_pages, num_window_pages, self.table, cache, window, drafts)
        policies = policies or Policies.named(queue_policy, batch_policy, admission_policy)
        self.make_masks = CountingMaskMaker()
        limits = (max_prefill_tokens, max_queued)
        self.speculation = None
        if drafter is not None:
            target = DraftTarget(EngineConfig(), vocab, 8, max_seq_len)
            clock = itertools.repeat(0.0).__next__  # it is not measured whether drafts pay
            self.speculation = Speculation(self.table, drafter(target), num_draft_tokens, vocab, clock=clock)
            self.speculation.costs = DraftsAreFree()
        self.scheduler = Scheduler(self.table, self.memory, policies, *limits, self.make_masks, self.speculation)
        width = self.memory.page_table.rows.shape[1]
        sizes = max_running, max_seq_len, width, num_pages, page_size, vocab
        self.executor = ShadowExecutor(*sizes, window, num_window_pages)
        self.vocab = vocab
        self.faulty = FaultyExecutor(self.executor, self.table)
        self.loop = EngineLoop(self.scheduler, self.faulty, depth=delay)
        if store_slots:
            self.keep_evicted_pages(lambda kv_cache: host_store(kv_cache, store_slots))
        self.finished: dict[int, Request] = {}
        self.seen: dict[int, list[int]] = defaultdict(list)
        """Tokens that were reported of watched requests, by uid."""
        self._rules: dict[int, tuple[int, int | None]] = {}
        """Seed and breaking point of the rules of constrained requests, by uid."""
        self._next_uid = 0

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        stop_ids: tuple[int, ...] = (),
        rule: int | None = None,
        breaks_at: int | None = None,
        **fields: object,
    ) -> Request:
        """Enqueue a request, with a `Rule` of that seed if there is one."""
        if rule is not None:
            fields["constraint"] = Rule(self.vocab, rule, breaks_at)
            self._rules[self._next_uid] = rule, breaks_at
        request = Request(
            uid=self._next_uid,
            prompt=np.asarray(prompt, dtype=np.int32),
            params=SamplingParams(max_tokens=max_tokens),
            max_len=len(prompt) + max_tokens,
            stop_ids=stop_ids,
            **fields,
        )
        self._next_uid += 1
        self.scheduler.add(request)
        return request

    def keep_evicted_pages(self, make_store: Callable[[KVCache], PageStore]) -> None:
        """Give evicted pages to a store. The "KV" of the shadow executor lies where the store looks for it."""
        page_size = self.memory.page_size
        cache = KVCache(1, 1, 1, self.memory.num_pages, page_size, torch.int64, torch.device("cpu"))
        cache.k.fill_(-1)
        cache.v.fill_(0)
        self.executor.kv = cache.k.view(-1).numpy()
        self.memory.offload_to(make_store(cache))

    @property
    def batches(self) -> list[Batch]:
        """All steps so far."""
        return self.faulty.batches

    def step(self) -> StepOutput:
        """One step of the loop, which an interrupt may end early."""
        try:
            output = self.loop.step()
        except KeyboardInterrupt:
            output = self.scheduler.take_output()
        return self._collect(output)

    def _collect(self, output: StepOutput) -> StepOutput:
        self.check()
        for event in output.events:
            assert event.request.uid not in self.finished, "a token of a request that had ended"
            self.seen[event.request.uid].append(event.token_id)
        for request in output.finished:
            assert request.uid not in self.finished, "a request was reported as finished twice"
            assert self.seen[request.uid] == (request.output if request.watched else [])
            self.finished[request.uid] = request
        return output

    def abort(self, request: Request) -> None:
        self.scheduler.finish(request.uid, FinishReason.ABORT)
        self._collect(self.scheduler.take_output())

    def run(self, limit: int = 5_000) -> None:
        """Step until nothing is left; every request must have ended by then."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps: {len(self.scheduler.waiting)} waiting")

    def check(self) -> None:
        if self.faulty.violation is not None:
            raise self.faulty.violation
        self.scheduler.check()
        for slot in self.table.slots.tolist():
            assert not self.memory.pool.is_free[self.memory.row(slot)].any(), "a running request maps a free page"

    def assert_idle_and_clean(self) -> None:
        """After the last request: no slot, no lock and no private page is left."""
        assert len(self.table) == 0
        assert len(self.scheduler.waiting) == 0
        assert self.memory.pool.num_free + self.memory.cache.num_evictable == self.memory.num_pages
        if isinstance(self.memory, MixedMemory):
            assert self.memory.windows.available == self.memory.windows.pool.num_pages

    def assert_output(self, request: Request) -> None:
        """The request generated what its prompt demands: all of it, or a prefix if it was cut short."""
        length = request.max_len - request.prompt_len
        seed = self._rules.get(request.uid)
        rule = None if seed is None else Rule(self.vocab, *seed)
        expected = expected_output(request.prompt.tolist(), length, self.vocab, request.stop_ids, rule)
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert request.output == expected
            assert rule is None or rule.error is None
            stopped = expected[-1] in request.stop_ids or (rule is not None and rule.finished)
            assert request.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        else:
            assert request.output == expected[: len(request.output)]
        if isinstance(request.constraint, Rule):
            assert request.constraint.accepted == request.output, "a constraint follows each token once"
