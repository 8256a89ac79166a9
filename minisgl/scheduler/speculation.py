"""Speculative decoding on the host: which rows get drafts, whether drafting pays, and drafters that misbehave."""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from minisgl.batch import Batch
from minisgl.drafters.protocol import Drafter, DraftRow
from minisgl.request import Int32Array, Request
from minisgl.table import NO_TOKEN, RunningTable

logger = logging.getLogger(__name__)

T = TypeVar("T")

TIME_LIMIT = 1.0  # seconds for a drafter's answer
_MAX_ABANDONED = 4  # threads in which a drafter stands still, before it is asked nothing more
_NO_DRAFT: Int32Array = np.zeros(0, dtype=np.int32)

# Pauses, in steps that decode. They begin and end at multiples of their length, so that rows probe together: a step
# that may draft for one row has to wait for the tokens of all.
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 512
_WEIGHT = 0.15  # of a row's newest verification in its own mean, and in that of all rows
_WEIGHT_OF_NONE = 0.03  # of a step in which the drafter had no guess, which costs only the overlap
_FIRST_MEAN = 1.0  # accepted drafts that are expected at first
_PROBE_MARGIN = 1.2  # how much above its bound a mean starts after a pause: one or two misses end the probe
_HOPELESS = 0.05  # a row whose mean is lower pauses alone, though steps with drafts pay
_ALL = -1  # all rows together: one step verifies the drafts of all, so it pays or does not pay for all
_NEWCOMERS = 0.25  # share of running rows that have come since a pause of all began, and end it


@dataclass(slots=True)
class DraftStats:
    """Counts since the engine started."""

    drafted: int = 0  # tokens that were verified
    accepted: int = 0  # of those, tokens that became output
    verifications: int = 0  # rows with drafts, one for each step: accepted / verifications is the mean length
    pauses: int = 0


class Speculation:
    """Asks a drafter for the rows of the running table, while drafts are accepted often enough.

    A row that may get drafts needs the host to know its tokens, so its steps do not overlap; a paused row's do.
    Whatever the drafter does, answers are not affected: a draft is verified, and a drafter that raises, answers
    nonsense or takes over `TIME_LIMIT` seconds is asked nothing more about the request.
    """

    def __init__(
        self,
        table: RunningTable,
        drafter: Drafter,
        num_draft_tokens: int,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.stats = DraftStats()
        self._table = table
        self._drafter: Drafter | None = drafter  # None once closed
        self._num_draft_tokens = num_draft_tokens
        self._vocab_size = vocab_size
        self._worker = DraftThread(TIME_LIMIT)
        self.costs = StepCosts()
        self._clock = clock
        self._started: deque[float] = deque()  # when each step in flight was scheduled
        self._processed = 0.0  # when the last one was processed
        self._asked: float | None = None  # when the drafts of the step under construction were asked for
        self._off: set[int] = set()  # uids about which the drafter is asked nothing more
        self._step = 0  # steps that decode
        rows = table.max_running
        self._limit = np.zeros(rows, dtype=np.int32)  # most drafts of a row
        # Of each row, and behind them of all rows together (`_ALL`):
        self._resume_at = np.zeros(rows + 1, dtype=np.int64)  # step at which a pause ends
        self._mean = np.full(rows + 1, _FIRST_MEAN)  # accepted drafts of a verification
        self._pause = np.full(rows + 1, _FIRST_PAUSE, dtype=np.int64)  # length of the next pause
        self._newcomers = 0  # rows since a pause of all began

    # -- requests come and go ----------------------------------------------------------------------------------

    def admit(self, request: Request) -> None:
        """Begin with a request that has just got its slot."""
        wanted = request.params.num_draft_tokens
        most = self._num_draft_tokens
        slot = request.slot
        self._limit[slot] = 0 if request.uid in self._off else most if wanted is None else min(wanted, most)
        self._resume_at[slot] = 0
        self._mean[slot] = _FIRST_MEAN
        self._pause[slot] = _FIRST_PAUSE
        self._newcomers += int(self._limit[slot] > 0)
        if self._newcomers >= _NEWCOMERS * len(self._table.slots):
            self._newcomers = 0
            self._resume_at[_ALL] = 0
            self._mean[_ALL] = max(self._mean[_ALL], _FIRST_MEAN)
            self._pause[_ALL] = _FIRST_PAUSE

    def finish(self, request: Request) -> None:
        """Forget a request that has ended, with its output."""
        if request.uid in self._off:
            self._off.remove(request.uid)
        elif (drafter := self._drafter) is not None and request.params.num_draft_tokens != 0:
            tokens = request.tokens()
            try:
                self._worker.call(lambda: drafter.finish(request.uid, request.prompt_len, tokens))
            except Exception:
                logger.exception("the drafter failed when request %d had ended", request.uid)

    def close(self) -> None:
        """Let go of the drafter, which may have the memory of a model; nothing is drafted any more."""
        self._drafter = None
        self._limit[:] = self._num_draft_tokens = 0

    @property
    def num_paused(self) -> int:
        """Running requests whose drafting pauses now."""
        slots = self._table.slots
        return int(((self._limit[slots] > 0) & ~self._drafting(slots)).sum())

    @property
    def counts(self) -> dict[str, int]:
        """`DraftStats` without the pauses that are over, and how many requests are ``paused`` now."""
        stats = self.stats
        counts = {"drafted": stats.drafted, "accepted": stats.accepted, "verifications": stats.verifications}
        return counts | {"paused": self.num_paused}

    # -- before a step -----------------------------------------------------------------------------------------

    def ready(self, slots: Int32Array) -> Int32Array:
        """Return the ``slots``, all of which could decode, or none if one's drafts need a token that is on its way.

        Rows do not go ahead of each other: two steps would read the model's weights twice.
        """
        unseen = self._table.known_len[slots] < self._table.token_len[slots]
        return slots[:0] if (unseen & self._drafting(slots)).any() else slots

    def draft(self, slots: Int32Array) -> list[Int32Array]:
        """Drafts for each of the ``slots`` of a step, none where drafting pauses or there is no guess."""
        drafts = [_NO_DRAFT] * len(slots)
        table = self._table
        # The row samples one token behind its drafts, and may not outgrow its request.
        counts = np.minimum(self._limit[slots], table.max_len[slots] - table.token_len[slots] - 1)
        wanted = np.flatnonzero(self._drafting(slots) & (counts > 0))
        self._step += (
            1  # not before: `ready` has made sure that rows which draft in this step, and only they, are known
        )
        if len(wanted) == 0 or self.costs.wants_plain_step(len(slots)):
            return drafts
        asked = self._clock()
        rows = [
            DraftRow(table.request(slot).uid, slot, table.tokens[slot, : table.known_len[slot]], count)
            for slot, count in zip(slots[wanted].tolist(), counts[wanted].tolist(), strict=True)
        ]
        for i, row, guess in zip(wanted.tolist(), rows, self._ask(rows), strict=True):
            drafts[i] = guess
            if len(guess) == 0:
                self._learn(row.slot, 0, _WEIGHT_OF_NONE, _HOPELESS)
            else:
                self._asked = asked
        if self._asked is None:
            self._learn(_ALL, 0, _WEIGHT_OF_NONE, self._break_even(len(slots)))
        return drafts

    def begin_step(self) -> None:
        """Note the time at which a step was scheduled, or the drafts that it has were asked for: they take time too."""
        self._started.append(self._clock() if self._asked is None else self._asked)
        self._asked = None

    def _drafting(self, slots: Int32Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
        paused = self._resume_at > self._step
        drafting: np.ndarray[Any, np.dtype[np.bool_]] = (self._limit[slots] > 0) & ~paused[slots] & ~paused[_ALL]
        return drafting

    # -- the drafter -------------------------------------------------------------------------------------------

    def _ask(self, rows: Sequence[DraftRow]) -> list[Int32Array]:
        """The drafter's guesses. If it fails for several rows, ask for each alone, to find whose fault it is."""
        drafter = self._drafter
        assert drafter is not None, "without one, no row wants drafts"
        try:
            guesses = self._worker.call(lambda: drafter.propose(rows))
            if len(guesses) != len(rows):
                raise ValueError(f"{len(guesses)} guesses for {len(rows)} rows")
            return [self._checked(row, guess) for row, guess in zip(rows, guesses, strict=True)]
        except Exception as error:
            if len(rows) > 1:
                return [self._ask([row])[0] for row in rows]
            logger.error(
                "the drafter failed, and drafts no more for request %d: %s: %s",
                rows[0].uid,
                type(error).__name__,
                error,
                exc_info=error,
            )
            self._off.add(rows[0].uid)
            self._limit[rows[0].slot] = 0
            return [_NO_DRAFT]

    def _checked(self, row: DraftRow, guess: Sequence[int] | Int32Array) -> Int32Array:
        tokens = np.asarray(guess)
        if tokens.size == 0:
            return _NO_DRAFT
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"a guess must be a list of token ids, got {tokens.dtype} of shape {tokens.shape}")
        if len(tokens) > row.count or tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise ValueError(
                f"a guess must be at most {row.count} token ids below {self._vocab_size}, got {tokens[:10].tolist()}"
            )
        return tokens.astype(np.int32)

    # -- after a step ------------------------------------------------------------------------------------------

    def end_step(self, batch: Batch, prefills: bool) -> None:
        """Note how long a step took that was processed, or failed; steps with prefill rows say nothing about drafts."""
        now = self._clock()
        began = max(self._started.popleft(), self._processed)
        self._processed = now
        if not prefills:
            self.costs.note(batch.num_rows, len(batch.drafts) > 0, now - began)

    def verify(self, batch: Batch, tokens: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Append drafts that are right to their rows, and set these rows back to what is verified.

        ``tokens``, int32[S], were sampled by the step. Returns indices into them: of those that were appended, and of
        the one behind them, or behind the newest token, for each row of the step, which is still to be appended.
        """
        table, sampled = self._table, batch.slots[batch.sample_rows]
        fed = np.full(len(sampled), NO_TOKEN, dtype=np.int32)
        fed[batch.draft_rows] = batch.drafts
        first = np.flatnonzero(fed == NO_TOKEN)  # of each row's samples
        drafted = np.diff(first, append=len(fed)) - 1

        # What is sampled behind a wrong draft, or behind the end of the answer, means nothing, nor does what follows.
        ends = (table.stop_ids[sampled] == tokens[:, None]).any(axis=1)
        wrong = fed != NO_TOKEN
        wrong[1:] &= (fed[1:] != tokens[:-1]) | ends[:-1]
        errors = np.cumsum(wrong)
        kept = errors == np.repeat(errors[first], drafted + 1)
        accepted = np.add.reduceat(kept, first, dtype=np.int32) - 1
        last = first + accepted

        verifying = (drafted > 0) & ~table.ended[sampled[first]]
        first, drafted, accepted = first[verifying], drafted[verifying], accepted[verifying]
        kept[last] = False
        right = np.flatnonzero(kept & ~table.ended[sampled]).astype(np.int32)
        slots, place = sampled[first], right - np.repeat(first, accepted)
        table.tokens[sampled[right], table.known_len[sampled[right]] + place] = tokens[right]
        table.known_len[slots] += accepted
        # A row that verifies has no later step in flight. Its KV is sound up to its last right draft.
        table.kv_len[slots] = table.known_len[slots]
        table.token_len[slots] = table.known_len[slots] + 1
        self._count(slots, drafted, accepted, len(last))
        return right, last.astype(np.int32)

    def _count(self, slots: Int32Array, drafted: Int32Array, accepted: Int32Array, num_rows: int) -> None:
        """Account for the drafts of a step in which ``num_rows`` rows sampled."""
        for slot, most, right in zip(slots.tolist(), drafted.tolist(), accepted.tolist(), strict=True):
            self.stats.drafted += most
            self.stats.accepted += right
            self.stats.verifications += 1
            request = self._table.request(slot)
            request.accepted_drafts += right
            request.rejected_drafts += most - right
            self._learn(slot, right, _WEIGHT, _HOPELESS)
        mean = float(accepted.sum()) / num_rows
        self._learn(_ALL, mean, 1 - (1 - _WEIGHT) ** num_rows, self._break_even(num_rows))

    def _break_even(self, num_rows: int) -> float:
        """Accepted drafts of a row from which on a step with drafts gets further than plain ones in the same time."""
        return self.costs.of_verification(num_rows) - 1

    def _learn(self, row: int, accepted: float, weight: float, bound: float) -> None:
        """Update the mean of a row, or of `_ALL`, and let it pause if the mean is below ``bound``."""
        self._mean[row] += weight * (accepted - self._mean[row])
        if self._mean[row] >= bound:
            if self._mean[row] >= 2 * bound:
                self._pause[row] = _FIRST_PAUSE
            return
        length = int(self._pause[row])
        self._resume_at[row] = (self._step // length + 1) * length
        self._pause[row] = min(2 * length, _LONGEST_PAUSE)
        self._mean[row] = bound * _PROBE_MARGIN
        self.stats.pauses += 1
        if row == _ALL:
            self._newcomers = 0


_ASSUMED_COST = 1.15  # of a verification in plain steps, before both were seen
_LEAST_COST = 1.05  # even a verification that seems to cost nothing has to bring something
_PLAIN_STEPS = 2  # to be measured before the first drafts


class StepCosts:
    """How long steps take that only decode, with drafts and without, by the power of two of their rows."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, bool], float] = {}
        self._seen: dict[tuple[int, bool], int] = {}

    def note(self, num_rows: int, verifies: bool, seconds: float) -> None:
        """Count a step. The first one of its kind is forgotten, as it may have compiled something."""
        kind = num_rows.bit_length(), verifies
        seen = self._seen[kind] = self._seen.get(kind, 0) + 1
        mean = self._seconds.get(kind, seconds)
        # A stalled step, such as one behind a garbage collection, is no measure.
        self._seconds[kind] = seconds if seen <= 2 else mean + (min(seconds, 2 * mean) - mean) / 8

    def wants_plain_step(self, num_rows: int) -> bool:
        """Whether too few steps without drafts were seen to compare others with."""
        return self._seen.get((num_rows.bit_length(), False), 0) < _PLAIN_STEPS

    def of_verification(self, num_rows: int) -> float:
        """How many plain steps a step with drafts costs."""
        size = num_rows.bit_length()
        if min(self._seen.get((size, verifies), 0) for verifies in (False, True)) < _PLAIN_STEPS:
            return _ASSUMED_COST
        plain, verifying = self._seconds[size, False], self._seconds[size, True]
        return max(verifying / plain, _LEAST_COST) if plain > 0 else _ASSUMED_COST


class DraftThread:
    """Calls functions in a thread of its own, and leaves that thread behind when it takes too long."""

    def __init__(self, time_limit: float) -> None:
        self._time_limit = time_limit
        self._abandoned = 0
        self._start()

    def _start(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._calls, self._results), name="drafter", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def call(self, function: Callable[[], T]) -> T:
        """Return what the function returns, or raise what it raises; `TimeoutError` if it takes too long."""
        if self._abandoned == _MAX_ABANDONED:
            raise TimeoutError(f"it stood still {_MAX_ABANDONED} times")
        self._calls.put(function)
        try:
            result, error = self._results.get(timeout=self._time_limit)
        except queue.Empty:
            self._calls.put(None)  # should it ever come back
            self._abandoned += 1
            self._start()
            raise TimeoutError(f"it did not answer within {self._time_limit:g} s") from None
        if error is not None:
            raise error
        value: T = result
        return value


def _serve(
    calls: queue.SimpleQueue[Callable[[], Any] | None], results: queue.SimpleQueue[tuple[Any, Exception | None]]
) -> None:
    while (function := calls.get()) is not None:
        try:
            results.put((function(), None))
        except Exception as error:
            results.put((None, error))
        del function  # it holds views of the running table
