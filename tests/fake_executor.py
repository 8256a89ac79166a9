"""An executor without a model that knows what every KV position should hold, and notices when it does not.

"KV" is one integer a position: a hash of all tokens up to and including it. A step writes the hashes of the tokens that
it is fed and then reads, through the page table that the batches described, every position of every row. A page that
was freed too early, shared wrongly, or overwritten shows up at once. The next token is a function of the hash, so the
tokens of a request depend on its prompt and on nothing else, except where a mask leaves only some to choose from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minisgl.batch import Batch, PendingStep, StepResult
from minisgl.table import RunningTable
from tests.rule import Rule, allowed_by

_MODULUS = (1 << 61) - 1


def extend_hash(prefix_hash: int, token: int) -> int:
    return (prefix_hash * 1_000_003 + token + 1) % _MODULUS


def next_token(prefix_hash: int, allowed: Sequence[int]) -> int:
    return allowed[(prefix_hash >> 7) % len(allowed)]


def expected_output(
    prompt: list[int], length: int, vocab: int, stop_ids: tuple[int, ...] = (), rule: Rule | None = None
) -> list[int]:
    """What a request generates, computed without any engine; ``rule`` goes from its beginning to its end."""
    state = 0
    for token in prompt:
        state = extend_hash(state, token)
    output: list[int] = []
    while len(output) < length and not (output and output[-1] in stop_ids):
        output.append(next_token(state, range(vocab) if rule is None else rule.allowed))
        state = extend_hash(state, output[-1])
        if rule is not None:
            rule.accept(output[-1])
            if rule.finished or rule.error:
                break
    return output


class Launched:
    def __init__(self, result: StepResult) -> None:
        self.result = result

    def wait(self) -> StepResult:
        return self.result


class ShadowExecutor:
    """Fulfils `Executor`; ``vocab`` bounds the tokens that it produces.

    With a ``window`` it reads only as many positions up to each that it is fed, as a model with sliding windows. With
    ``num_window_pages`` too, it is a model with layers of both kinds: it reads all, and the window in window pages.
    """

    def __init__(
        self,
        max_running: int,
        max_seq_len: int,
        width: int,
        num_pages: int,
        page_size: int,
        vocab: int,
        window: int | None = None,
        num_window_pages: int | None = None,
    ) -> None:
        self.window = window
        self.page_size = page_size
        self.vocab = vocab
        self.tokens = np.zeros((max_running + 1, max_seq_len), dtype=np.int64)
        pools = (num_pages,) if num_window_pages is None else (num_pages, num_window_pages)
        self.page_tables = np.stack([np.full((max_running + 1, width), pages, dtype=np.int64) for pages in pools])
        self.kv = np.full((num_pages + 1) * page_size, -1, dtype=np.int64)
        self.window_kv = np.full(((num_window_pages or 0) + 1) * page_size, -1, dtype=np.int64)
        self.fed_tokens = 0
        self.steps = 0

    def launch(self, batch: Batch) -> Launched:
        assert {new.slot for new in batch.new_requests} <= set(batch.slots.tolist()), "no chunk of a new request"
        for new in batch.new_requests:
            self.tokens[new.slot, : len(new.tokens)] = new.tokens
        positions, slots = batch.positions[batch.logit_rows], batch.token_slots[batch.logit_rows]
        self.tokens[slots[batch.draft_rows], positions[batch.draft_rows]] = batch.drafts
        self.page_tables.reshape(-1)[batch.page_index] = batch.page_value
        assert len(np.unique(batch.out_locs)) == batch.num_tokens, "two tokens of one step are written to one place"
        rows = zip(batch.slots.tolist(), batch.seq_lens.tolist(), strict=True)
        hashes = [self._hashes(slot, length) for slot, length in rows]
        mixed = len(self.page_tables) > 1
        fed = np.concatenate([row[len(row) - count :] for row, count in zip(hashes, batch.q_lens, strict=True)])
        self.kv[batch.out_locs] = fed
        if mixed:
            window_locs = self.window_locs(batch)
            assert len(np.unique(window_locs)) == batch.num_tokens, "two tokens of one step share a place in the window"
            self.window_kv[window_locs] = fed
        for row, slot in enumerate(batch.slots.tolist()):
            first_query = int(batch.seq_lens[row] - batch.q_lens[row])
            first = 0 if self.window is None else max(first_query + 1 - self.window, 0)
            seen_by_layers = [(0 if mixed else first, self.page_tables[0], self.kv)]
            if mixed:
                seen_by_layers.append((first, self.page_tables[1], self.window_kv))
            for begin, table, kv in seen_by_layers:
                positions_seen = np.arange(begin, batch.seq_lens[row])
                pages = table[slot, positions_seen // self.page_size]
                seen = kv[pages * self.page_size + positions_seen % self.page_size]
                assert np.array_equal(seen, hashes[row][begin:]), f"slot {slot} reads KV that is not its own"
        allowed: list[Sequence[int]] = [range(self.vocab)] * len(batch.sample_rows)
        for row, mask in zip(
            batch.mask_rows.tolist(), np.split(batch.masks, max(len(batch.mask_rows), 1)), strict=False
        ):
            allowed[row] = allowed_by(mask)
        ends = [int(hashes[row][position]) for row, position in zip(batch.sample_rows, positions, strict=True)]
        sampled = [next_token(end, tokens) for end, tokens in zip(ends, allowed, strict=True)]
        for slot, position, token in zip(slots.tolist(), positions.tolist(), sampled, strict=True):
            if position + 1 < self.tokens.shape[1]:
                self.tokens[slot, position + 1] = token
        self.fed_tokens += batch.num_tokens
        self.steps += 1
        return Launched(StepResult(np.asarray(sampled, dtype=np.int32)))

    @property
    def page_table(self) -> np.ndarray:
        return self.page_tables[0]

    def spoil(self, batch: Batch) -> None:
        """Leave garbage where a step writes."""
        self.kv[batch.out_locs] = -1
        if len(self.page_tables) > 1:
            tables = self.page_tables.copy()
            self.page_tables.reshape(-1)[batch.page_index] = batch.page_value
            self.window_kv[self.window_locs(batch)] = -1
            self.page_tables = tables

    def window_locs(self, batch: Batch) -> np.ndarray:
        """Where a step writes what layers with a window keep."""
        pages = self.page_tables[-1][batch.token_slots, batch.positions // self.page_size]
        return pages * self.page_size + batch.positions % self.page_size

    def _hashes(self, slot: int, length: int) -> np.ndarray:
        state, result = 0, []
        for token in self.tokens[slot, :length].tolist():
            state = extend_hash(state, token)
            result.append(state)
        return np.asarray(result, dtype=np.int64)


@dataclass(frozen=True)
class Fault:
    """What goes wrong with a step: ``error`` is raised by ``launch``, or else by ``wait``."""

    at_launch: bool
    error: BaseException


class FaultyExecutor:
    """A shadow executor that breaks the steps it is told to break, and everything that a broken step may spoil.

    A broken step leaves garbage where its KV belongs. A step launched while one that will raise is in flight succeeds,
    with garbage of its own: nothing tells the loop not to believe it.
    """

    def __init__(self, shadow: ShadowExecutor, table: RunningTable) -> None:
        self.shadow = shadow
        self.table = table
        self.batches: list[Batch] = []
        self.fault: Fault | None = None
        """Befalls the next step."""
        self.doomed: set[int] = set()
        """Requests that a broken step has touched: only these may end with an error."""
        self.violation: AssertionError | None = None
        """What the shadow executor found; kept, because a loop takes it for one more step that failed."""
        self._in_flight: list[set[int]] = []
        self._broken_in_flight = False

    def launch(self, batch: Batch) -> PendingStep:
        self.batches.append(batch)
        uids = set(self.table.arrival[batch.slots].tolist())
        fault, self.fault = self.fault, None
        if fault is None and not self._broken_in_flight:
            self._in_flight.append(uids)
            try:
                return _InFlight(self, self.shadow.launch(batch).result)
            except AssertionError as error:
                self.violation = error
                raise
        self.doomed |= uids
        self.shadow.spoil(batch)
        if fault is not None and fault.at_launch:
            raise fault.error
        self._in_flight.append(uids)
        self._broken_in_flight = True
        return _InFlight(self, StepResult(np.full(len(batch.sample_rows), -7, dtype=np.int32)), fault)

    def wait(self, step: _InFlight) -> StepResult:
        del self._in_flight[0]
        if step.fault is not None:
            self.reset()
            raise step.fault.error
        return step.result

    def reset(self) -> None:
        self.doomed.update(*self._in_flight)
        self._in_flight.clear()
        self._broken_in_flight = False


@dataclass(frozen=True)
class _InFlight:
    executor: FaultyExecutor
    result: StepResult
    fault: Fault | None = None

    def wait(self) -> StepResult:
        return self.executor.wait(self)
