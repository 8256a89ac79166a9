"""KV memory of models in which only some layers have a sliding window, and give back what lies outside of it."""

from __future__ import annotations

import numpy as np

from minisgl.errors import InvariantError
from minisgl.kvcache.prefix import MatchResult, PrefixCache
from minisgl.kvcache.sizing import Lengths, most_window_pages
from minisgl.kvcache.window_pages import NOWHERE, WindowPages
from minisgl.request import Int32Array
from minisgl.scheduler.memory import KVMemory
from minisgl.scheduler.policy import MemoryDemand
from minisgl.table import RunningTable


class MixedMemory(KVMemory):
    """A `KVMemory` whose pages have window pages while a row's window is over them: see `WindowPages`.

    Pages are allocated, shared, cached and evicted as ever, and a prompt gets all of them at once. Window pages come
    with each chunk of the prompt, and with each new page of an answer, and go as soon as the ``window`` has passed
    them. So a prompt may be longer than all window pages together; a chunk is shortened to what there is room for.

    A cached prefix is of use up to a length whose last ``window`` positions all have window pages: the next query sees
    these, and no layer can do without. A prompt goes on from the longest such length, and computes the rest again.

    There is no page store: it would have to keep window pages as well.
    """

    def __init__(
        self,
        num_pages: int,
        num_window_pages: int,
        table: RunningTable,
        cache: PrefixCache,
        window: int,
        num_draft_tokens: int = 0,
    ) -> None:
        super().__init__(num_pages, table, cache, num_draft_tokens=num_draft_tokens, num_window_pages=num_window_pages)
        self.mixed_window = window
        self.windows = WindowPages(num_pages, num_window_pages, self.is_cached)
        # Entries of each row that have window pages, which the row holds: `_begin` … `_end`.
        self._begin = np.zeros(table.max_running, dtype=np.int32)
        self._end = np.zeros(table.max_running, dtype=np.int32)

    # -- admission ---------------------------------------------------------------------------------------------

    def match(self, tokens: Int32Array) -> MatchResult:
        match = self.cache.match(tokens)
        usable = self._usable(match.pages)
        return match if usable == len(match.pages) else self.cache.match(tokens[: usable * self.page_size])

    def _usable(self, pages: Int32Array) -> int:
        """The most leading pages of a cached prefix behind which a query finds all window pages that it sees."""
        index = np.arange(len(pages))
        last_without = np.maximum.accumulate(np.where(self.windows.of_page[pages] == NOWHERE, index, -1))
        usable = np.flatnonzero(last_without < self._first_pages(index + 1))
        return int(usable[-1]) + 1 if len(usable) else 0

    def _first_pages(self, num_pages: Int32Array) -> Int32Array:
        """The first page that a query sees which is the first token behind so many pages."""
        return np.maximum(num_pages * self.page_size + 1 - self.mixed_window, 0) // self.page_size

    def _first_page(self, num_pages: int) -> int:
        return max(num_pages * self.page_size + 1 - self.mixed_window, 0) // self.page_size

    def lock_prefix(self, tokens: Int32Array) -> MatchResult:
        prefix = super().lock_prefix(tokens)
        self.windows.hold(self._seen(prefix))
        return prefix

    def unlock_prefix(self, prefix: MatchResult) -> None:
        self.windows.drop(self.windows.of_page[self._seen(prefix)])
        super().unlock_prefix(prefix)

    def _seen(self, prefix: MatchResult) -> Int32Array:
        return prefix.pages[self._first_page(len(prefix.pages)) :]

    def attach(self, slot: int, prefix: MatchResult) -> None:
        super().attach(slot, prefix)
        seen = self._seen(prefix)
        first = len(prefix.pages) - len(seen)
        self._let_go(slot, first)
        self.page_table.write_window(slot, first, self.windows.of_page[seen])  # held since `lock_prefix`
        self._end[slot] = first + len(seen)

    def window_demands(self, num_tokens: int, max_len: int, cached_pages: int) -> list[MemoryDemand]:
        """Window pages that the request needs: those of one window, since prefill chunks make do with what there is."""
        held = cached_pages - self._first_page(cached_pages)
        most = self._most(max_len)
        promised = self._promised()
        demand = MemoryDemand(
            # At least what makes `fit_chunk` find room for the first chunk.
            now=max(
                min(self.pages_for(2), most - held) + self._spare(promised),
                min(self.pages_for(num_tokens) - cached_pages, most - held),
            ),
            at_most=most - held,
            available=self.windows.available,
            promised=int(promised.sum()) + self.windows.num_shared,
            running=len(promised),
        )
        return [demand]

    # -- growth ------------------------------------------------------------------------------------------------

    def can_grow(self, count: int) -> bool:
        return super().can_grow(count) and count <= self.windows.available

    def grow(self, slots: Int32Array) -> None:
        super().grow(slots)
        for slot in slots.tolist():
            self._hold(slot, int(self.table.num_pages[slot]))

    def extend(self, slot: int, length: int) -> int:
        fitting = (int(self._end[slot]) + self.windows.available) * self.page_size
        room = super().extend(slot, min(length, fitting))
        self._hold(slot, room // self.page_size)
        return room

    def fit_chunk(self, slot: int, count: int) -> int:
        """How many of a row's next ``count`` tokens have room in window pages, which the row gets."""
        kv_len = int(self.table.kv_len[slot])
        room = (int(self._end[slot]) + self._allowance(slot)) * self.page_size - kv_len
        if room < int(self.table.max_len[slot]) - 1 - kv_len:
            room -= 1  # for the first token of the answer, which may be fed before anything of this chunk goes back
        fitting = max(0, min(count, room))
        self._hold(slot, self.pages_for(kv_len + fitting))
        return fitting

    def _allowance(self, slot: int) -> int:
        """Window pages that a chunk of this row may take: those of its window, and more where no other row needs them.

        One stays free for each row that decodes and will want it, or it would push the chunk out again.
        """
        promised, available = self._promised(), self.windows.available
        own = int(promised[self.table.slots == slot].sum())
        unclaimed = available - self.windows.num_shared - (int(promised.sum()) - own)
        return max(0, min(max(own, unclaimed), available - self._spare(promised)))

    def _promised(self) -> Int32Array:
        """Window pages that each running row may still need, int32[running].

        After a chunk that holds more than the window needs, that may be a page for the first token of the answer.
        """
        slots = self.table.slots
        fewer = self._most(self.table.max_len[slots]) - (self._end[slots] - self._begin[slots])
        goes_on = self.table.kv_len[slots] < self.table.max_len[slots] - 1
        full = self.table.kv_len[slots] >= self._end[slots] * self.page_size
        return np.maximum(fewer, goes_on & full)

    def _most(self, max_len: Lengths) -> Lengths:
        return most_window_pages(max_len, self.page_size, self.mixed_window, self.num_draft_tokens)

    def _spare(self, promised: Int32Array) -> int:
        return int(((promised > 0) & ~self.table.prefilling[self.table.slots]).sum())

    def _hold(self, slot: int, end: int) -> None:
        """Hold window pages of the row's pages up to entry ``end``."""
        begin = int(self._end[slot])
        if end > begin:
            pages = self.page_table.rows[slot, begin:end]
            self.page_table.write_window(slot, begin, self.windows.hold(pages))
            self._end[slot] = end

    # -- sharing -----------------------------------------------------------------------------------------------

    def rematch_prefix(self, slot: int) -> None:
        kv_len = int(self.table.kv_len[slot])
        super().rematch_prefix(slot)
        if self.table.kv_len[slot] > kv_len:
            pages = int(self._locked[slot])
            self._let_go(slot, self._first_page(pages))
            self._hold(slot, pages)

    def _repoint(self, slot: int, canonical: Int32Array) -> None:
        """Point the row to the window pages of ``canonical`` pages too, which get the row's own if they have none."""
        begin, end = int(self._begin[slot]), min(int(self._end[slot]), len(canonical))
        for entry in range(begin, end):
            page, window_page = int(canonical[entry]), int(self.page_table.window_rows[slot, entry])
            if self.windows.of_page[page] == window_page:
                continue
            if self.windows.of_page[page] == NOWHERE:
                self.windows.move(window_page, page)
            else:
                self.page_table.write_window(slot, entry, self.windows.hold(canonical[entry : entry + 1]))
                self.windows.drop(np.array([window_page], dtype=np.int32))
        super()._repoint(slot, canonical)

    # -- what goes back ----------------------------------------------------------------------------------------

    def give_back(self, slots: Int32Array, computed: Int32Array) -> None:
        """Let go of window pages that no query sees any more; each row's queries before ``computed`` are complete."""
        firsts = np.maximum(computed + 1 - self.mixed_window, 0) // self.page_size
        due = firsts > self._begin[slots]
        for slot, first in zip(slots[due].tolist(), firsts[due].tolist(), strict=True):
            self._let_go(slot, first)

    def _let_go(self, slot: int, first: int) -> None:
        """Drop the window pages before entry ``first``; a masked key that is read there must still be finite."""
        begin, end = int(self._begin[slot]), int(self._end[slot])
        dropped = self.page_table.window_rows[slot, begin : min(first, end)].copy()
        dummies = np.full(max(first - begin, 0), self.page_table.window_dummy, dtype=np.int32)
        self.page_table.write_window(slot, begin, dummies)
        self.windows.drop(dropped)
        self._begin[slot] = max(begin, first)
        self._end[slot] = max(end, first)

    def free_row(self, slot: int, cache: bool) -> None:
        if cache:
            self._repoint(slot, self._insert_known(slot).pages)
        self.windows.drop(self.page_table.window_rows[slot, self._begin[slot] : self._end[slot]].copy())
        self._begin[slot] = self._end[slot] = 0
        super().free_row(slot, cache=False)

    def _free_cached(self, pages: Int32Array) -> None:
        self.windows.forget(pages)
        super()._free_cached(pages)

    def check(self) -> None:
        super().check()
        self.windows.check()
        held = np.zeros_like(self.windows.holders)
        for slot in np.flatnonzero(self.table.num_pages).tolist():
            begin, end = int(self._begin[slot]), int(self._end[slot])
            window_pages = self.page_table.window_rows[slot, begin:end]
            if not np.array_equal(window_pages, self.windows.of_page[self.page_table.rows[slot, begin:end]]):
                raise InvariantError(f"slot {slot} reads window pages that are not those of its pages")
            if (self.page_table.window_rows[slot, :begin] != self.page_table.window_dummy).any():
                raise InvariantError(f"slot {slot} still maps a window page that it has let go of")
            query = min(int(self.table.kv_len[slot]), int(self.table.known_len[slot]) - 1)
            if begin * self.page_size > max(query + 1 - self.mixed_window, 0):
                raise InvariantError(f"slot {slot} has let go of a window page that it still reads")
            if int(self.table.kv_len[slot]) > end * self.page_size:
                raise InvariantError(f"slot {slot} has KV beyond its window pages")
            held[window_pages] += 1
        if not np.array_equal(held, self.windows.holders):
            raise InvariantError("the holders of window pages are not the rows that map them")
