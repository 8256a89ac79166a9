"""The scheduler: which requests run in the next step, and what follows from the tokens that a step sampled."""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field

import numpy as np

from minisgl.batch import Batch, StepResult
from minisgl.errors import InvariantError
from minisgl.request import FinishReason, Int32Array, MaskMaker, Request, RequestState, TokenLogprobs
from minisgl.scheduler.admission import Admitter, WaitingQueue
from minisgl.scheduler.batch_builder import BatchBuilder
from minisgl.scheduler.constraints import Constraints
from minisgl.scheduler.memory import KVMemory
from minisgl.scheduler.policy import MAX_BYPASS, Policies, SchedulerLoad
from minisgl.scheduler.speculation import Speculation
from minisgl.table import RunningTable

LOOKAHEAD = 8  # waiting requests that do not fit and are passed over in one step to find one that does


class Scheduler:
    """Owns all requests from `add` until it reports them as finished.

    Call `schedule`, launch its batch, and pass the result to `process`; several batches may be in flight, but are
    processed in order. If a step has no result, call `fail` instead; then every batch launched later must fail too.

    ``max_prefill_tokens`` limits the prompt tokens of a step. Requests with constraints need ``make_masks``.
    With ``speculation``, rows may feed several tokens a step, drafts, of which those are kept that the model sampled.
    """

    def __init__(
        self,
        table: RunningTable,
        memory: KVMemory,
        policies: Policies,
        max_prefill_tokens: int = 8192,
        max_queued_requests: int = 65536,
        make_masks: MaskMaker | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.table = table
        self.memory = memory
        self.policies = policies
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting = WaitingQueue(max_queued_requests)
        self._admitter = Admitter(table, memory, self.waiting, policies)
        self._usage = policies.usage_listener
        self._constraints = Constraints(table, make_masks)
        self.speculation = speculation
        self.requests: dict[int, Request] = {}  # all unfinished ones, by uid
        self._prefill_steps = 0
        self._deadlines: list[tuple[float, int]] = []
        self._output = StepOutput()

    # -- requests come and go ----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Enqueue a new request; raises `QueueFull`, and enqueues nothing, if the queue is full."""
        self.waiting.add(request)
        self.requests[request.uid] = request
        request.times.arrived = time.perf_counter()
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.uid))

    def finish(self, uid: int, reason: FinishReason, error: str | None = None) -> None:
        """End a request in any state. Unknown and finished uids are ignored, since messages may cross.

        A request that a launched step still computes keeps its slot until that step is processed; its token is dropped.
        """
        request = self.requests.pop(uid, None)
        if request is None:
            return
        if request.slot < 0:
            self.waiting.remove(request)
        else:
            request.output = self.table.output(request.slot)
            self.table.ended[request.slot] = True
        preempted_in_flight = request.state is RequestState.PREEMPTED and request.slot >= 0
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.error = error
        request.times.finished = time.perf_counter()
        self._output.finished.append(request)
        if self._usage is not None:
            self._usage.on_finish(request)
        if self.speculation is not None:
            self.speculation.finish(request)
        if request.slot >= 0 and not preempted_in_flight:
            self._stop_running(request.slot)

    def take_output(self) -> StepOutput:
        """Return everything that became known since the last call."""
        output, self._output = self._output, StepOutput()
        return output

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished, or a launched step that is not processed yet holds slots."""
        return bool(self.requests) or len(self.table) > 0

    # -- before a step -----------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """Compose the next step, or return None if nothing can run."""
        self._expire()
        plan = self.policies.batch.plan(self._load())
        builder = BatchBuilder()
        if plan.decode:
            self._add_decodes(builder)
        if plan.prefill_tokens > 0:
            self._add_prefills(builder, plan.prefill_tokens)
        if not builder.slots and not plan.decode:
            self._add_decodes(builder)
        if not builder.slots:
            return self.schedule() if self._unblock() else None
        self._prefill_steps = 0 if builder.num_generating else self._prefill_steps + 1
        self.table.in_flight[builder.slots] += 1
        self._output.decode_tokens += builder.num_generating
        self._output.prefill_tokens += sum(builder.q_lens[builder.num_generating :])
        if self.speculation is not None:
            self.speculation.begin_step()
        batch = self._constraints.add_masks(builder.build(self.table, self.memory.page_table))
        self._output.constrained_rows += len(batch.mask_rows)
        return batch

    def _load(self) -> SchedulerLoad:
        slots = self.table.slots
        prefilling = int(self.table.prefilling[slots].sum())
        return SchedulerLoad(
            decoding=len(slots) - prefilling,
            prefilling=prefilling,
            waiting=len(self.waiting),
            prefill_steps=self._prefill_steps,
            max_prefill_tokens=self.max_prefill_tokens,
        )

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= time.perf_counter():
            _, uid = heapq.heappop(self._deadlines)
            self.finish(uid, FinishReason.ERROR, "the request's time limit passed before it was finished")

    # -- decode rows -------------------------------------------------------------------------------------------

    def _add_decodes(self, builder: BatchBuilder) -> None:
        slots = self._make_room(self._decoding())
        table = self.table
        if self.speculation is None:
            builder.add_decodes(slots.tolist(), table.kv_len[slots].tolist())
            table.kv_len[slots] += 1
            table.token_len[slots] += 1
            return
        drafts = self._drafts(slots, self.speculation)
        lens = np.array([len(draft) for draft in drafts], dtype=np.int32)
        plain, verifying = slots[lens == 0], np.flatnonzero(lens)
        builder.add_decodes(plain.tolist(), table.kv_len[plain].tolist())
        for i in verifying.tolist():
            builder.add_drafts(int(slots[i]), int(table.kv_len[slots[i]]), drafts[i])
        table.kv_len[slots] += lens + 1
        table.token_len[slots] += lens + 1

    def _decoding(self) -> Int32Array:
        slots = self.table.slots
        # A row whose last token is being sampled right now has nothing left to do.
        unfinished = self.table.token_len[slots] < self.table.max_len[slots]
        slots = slots[~self.table.prefilling[slots] & unfinished]
        if self.speculation is not None:
            slots = self.speculation.ready(slots)
        return self._constraints.ready(slots)

    def _drafts(self, slots: Int32Array, speculation: Speculation) -> list[Int32Array]:
        """Drafts of each row, as many as its constraint allows and as fit into pages that nobody has to give up."""
        if len(slots) == 0:
            return []
        drafts = speculation.draft(slots)
        for i, slot in enumerate(slots.tolist()):
            if len(drafts[i]):
                allowed = self._constraints.clip(slot, drafts[i])
                fed = int(self.table.kv_len[slot]) + 1
                drafts[i] = allowed[: self.memory.extend(slot, fed + len(allowed)) - fed]
        return drafts

    def _make_room(self, slots: Int32Array) -> Int32Array:
        """Give rows the page for their next token, preempting the latest arrivals; return the rows that still run."""
        while True:
            growing = self.memory.rows_to_grow(slots)
            if self.memory.can_grow(len(growing)):
                self.memory.grow(growing)
                return slots
            victim = self._victim()
            could_return = self.memory.pages_for(int(self.table.token_len[victim])) <= self.memory.num_pages
            if len(self.table.slots) == 1 or not could_return:
                request = self.table.request(victim)
                message = (
                    f"the request outgrew the KV cache ({self.memory.num_pages} pages of {self.memory.page_size} "
                    "tokens); raise num_pages or memory_ratio, or lower max_tokens"
                )
                self.finish(request.uid, FinishReason.ERROR, message)
            else:
                self._preempt(victim)
            slots = slots[slots != victim]

    def _victim(self) -> int:
        """The slot to preempt: the last to arrive gives way, so the first to arrive always makes progress.

        A request with more tokens than the pool, as a sliding window allows, could not be computed again: it stays.
        """
        slots = self.table.slots
        could_return = slots[self.memory.pages_for(self.table.token_len[slots]) <= self.memory.num_pages]
        return int((could_return if len(could_return) else slots)[-1])

    def _preempt(self, slot: int) -> None:
        """Take the pages of a running request and queue it again, to be recomputed later (vLLM)."""
        request = self.table.request(slot)  # a token that a launched step samples for it is still received
        request.state = RequestState.PREEMPTED
        request.preemptions += 1
        self._stop_running(slot)

    # -- prefill rows ------------------------------------------------------------------------------------------

    def _add_prefills(self, builder: BatchBuilder, budget: int) -> None:
        slots = self.table.slots
        for slot in slots[self.table.prefilling[slots]].tolist():
            if budget == 0:
                return
            self.memory.rematch_prefix(slot)
            budget -= self._add_chunk(builder, slot, budget)
        self._admit(builder, budget)

    def _add_chunk(self, builder: BatchBuilder, slot: int, budget: int) -> int:
        """Feed as many of the row's tokens as the budget allows; returns how many."""
        table = self.table
        kv_len = int(table.kv_len[slot])
        chunk = self.memory.fit_chunk(slot, min(budget, int(table.token_len[slot]) - kv_len))
        if chunk == 0:
            return 0
        last = kv_len + chunk == table.token_len[slot]
        builder.add_prefill(slot, kv_len, chunk, samples=last)
        table.kv_len[slot] += chunk
        self.memory.cache_chunk(slot, kv_len)
        if last:
            table.token_len[slot] += 1
            table.prefilling[slot] = False
            table.request(slot).state = RequestState.DECODE
        return chunk

    def _unblock(self) -> bool:
        """Preempt the last of several prompts that wait for one another's window pages; False if they don't."""
        slots = self.table.slots
        if len(slots) < 2 or not self.table.prefilling[slots].all() or self.table.in_flight.any():
            return False
        self._preempt(int(slots[-1]))
        return True

    def _admit(self, builder: BatchBuilder, budget: int) -> None:
        if budget == 0 or not len(self.waiting) or not self.table.free_slots:
            return
        passed_over = 0
        for request in self._admitter.candidates():
            if budget == 0 or not self.table.free_slots:
                return
            if (new_request := self._admitter.try_admit(request)) is not None:
                builder.new_requests.append(new_request)
                if self.speculation is not None:
                    self.speculation.admit(request)
                budget -= self._add_chunk(builder, request.slot, budget)
                self.waiting.note_bypass(request)
            elif self._admitter.never_fits(request):
                self._reject(request)
            else:
                passed_over += 1
                # A preempted request was running once: nobody newer may take the pages that it waits for.
                must_wait = request.state is RequestState.PREEMPTED or request.bypassed >= MAX_BYPASS
                if must_wait or passed_over == LOOKAHEAD:
                    return

    def _reject(self, request: Request) -> None:
        message = (
            f"prompt: {request.prompt_len} tokens and up to {request.max_len - request.prompt_len} more do not fit the "
            f"KV cache ({self.memory.num_pages} pages of {self.memory.page_size} tokens); shorten the prompt, lower "
            "max_tokens, or raise num_pages or memory_ratio"
        )
        self.finish(request.uid, FinishReason.ERROR, message)

    # -- after a step ------------------------------------------------------------------------------------------

    def process(self, batch: Batch, result: StepResult) -> None:
        """Account for a step's tokens: append them, finish requests, and free what is no longer needed."""
        self.memory.settle()
        self.table.in_flight[batch.slots] -= 1
        if len(batch.drafts):
            self._verify(batch, result)
        else:
            self._append(batch, result, np.arange(len(batch.sample_rows), dtype=np.int32))
        if self.memory.gives_back:
            running = self.table.active[batch.slots]
            slots = batch.slots[running]
            # Queries that come next, or are in flight, are behind this step's, but not behind drafts that were wrong.
            self.memory.give_back(slots, np.minimum(batch.seq_lens[running], self.table.known_len[slots] - 1))
        self._end_step(batch)
        self._release_idle(batch.slots)

    def _verify(self, batch: Batch, result: StepResult) -> None:
        """Take in the drafts that are right, then what was sampled behind them, or behind a row's newest token."""
        assert self.speculation is not None, "drafts come from there"
        right, last = self.speculation.verify(batch, result.tokens)
        slots, tokens = batch.slots[batch.sample_rows[right]], result.tokens[right]
        self._constraints.accept(slots, tokens)  # none ends: drafts are clipped before
        self._report(slots, tokens, right.tolist(), result)
        self._output.decode_tokens += len(right)
        self._append(batch, result, last)

    def _append(self, batch: Batch, result: StepResult, rows: Int32Array) -> None:
        """Append the tokens of these sampling rows, one a request, unless the request has ended."""
        table = self.table
        live = rows[~table.ended[batch.slots[batch.sample_rows[rows]]]]
        slots, tokens = batch.slots[batch.sample_rows[live]], result.tokens[live]

        known = table.known_len[slots]
        table.tokens[slots, known] = tokens
        table.known_len[slots] = known + 1
        stopped = (table.stop_ids[slots] == tokens[:, None]).any(axis=1)
        full = known + 1 >= table.max_len[slots]
        ends = self._constraints.accept(slots, tokens)
        stopped[list(ends)] = True

        self.memory.cache_answers(slots[~(stopped | full) & table.active[slots]])
        self._stamp_first_tokens(slots[known == table.prompt_len[slots]])
        self._report(slots, tokens, live.tolist(), result)
        for i in np.flatnonzero(stopped | full).tolist():
            error = ends.get(i)
            reason = FinishReason.ERROR if error else FinishReason.STOP if stopped[i] else FinishReason.LENGTH
            self.finish(table.request(int(slots[i])).uid, reason, error)

    def _end_step(self, batch: Batch) -> None:
        if self.speculation is not None:
            prefills = batch.num_tokens > len(batch.sample_rows) or len(batch.new_requests) > 0
            self.speculation.end_step(batch, prefills)

    def fail(self, batch: Batch, error: str) -> None:
        """End the requests of a step that could not be computed, with an error; none of its KV is cached."""
        self.table.in_flight[batch.slots] -= 1
        for slot in batch.slots[~self.table.ended[batch.slots]].tolist():
            if self.table.active[slot]:
                self.memory.free_row(slot, cache=False)
            self.finish(self.table.request(slot).uid, FinishReason.ERROR, error)
        self._end_step(batch)
        self._release_idle(batch.slots)
        self.memory.forget_unlocked()

    def _stamp_first_tokens(self, slots: Int32Array) -> None:
        if len(slots):
            now = time.perf_counter()
            for slot in slots.tolist():
                self.table.request(slot).times.first_token = now

    def _report(self, slots: Int32Array, tokens: Int32Array, live: list[int], result: StepResult) -> None:
        watched = np.flatnonzero(self.table.watched[slots])
        for i, slot, token in zip(watched.tolist(), slots[watched].tolist(), tokens[watched].tolist(), strict=True):
            request = self.table.request(slot)
            logprobs = result.logprobs[live[i]] if result.logprobs is not None else None
            if logprobs is not None:
                request.logprobs.append(logprobs)
            self._output.events.append(TokenEvent(request, token, logprobs))

    def _stop_running(self, slot: int) -> None:
        """Stop scheduling a row and free its pages. The slot stays taken while a launched step writes to it."""
        self.memory.free_row(slot, cache=True)
        self.table.deactivate(slot)
        if self.table.in_flight[slot] == 0:
            self._release(slot)

    def _release_idle(self, slots: Int32Array) -> None:
        for slot in slots[~self.table.active[slots] & (self.table.in_flight[slots] == 0)].tolist():
            if self.table.requests[slot] is not None:
                self._release(slot)

    def _release(self, slot: int) -> None:
        request = self.table.release(slot)
        if request.state is RequestState.PREEMPTED:
            self.waiting.put_back(request)

    def check(self) -> None:
        """Raise `InvariantError` unless requests, slots and pages are accounted for. Cheap enough for every step."""
        self.table.check()
        self.memory.check()
        placed = [r.uid for r in self.waiting] + [
            r.uid for r in self.table.requests if r is not None and r.state is not RequestState.FINISHED
        ]
        if sorted(placed) != sorted(self.requests):
            raise InvariantError("a request is neither waiting nor running, or both")


@dataclass(slots=True)
class TokenEvent:
    """One new token of a watched request."""

    request: Request
    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class StepOutput:
    """What became known since the last step."""

    events: list[TokenEvent] = field(default_factory=list)  # in batch order
    finished: list[Request] = field(default_factory=list)  # each exactly once in the engine's life
    prefill_tokens: int = 0
    decode_tokens: int = 0
    constrained_rows: int = 0  # rows scheduled to sample under a constraint, each with a mask
