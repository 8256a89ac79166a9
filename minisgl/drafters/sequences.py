"""Sequences that a drafter continues with a small engine of its own: their pages, their slots and the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock

import numpy as np

from minisgl.batch import Batch, build_batch, to_device
from minisgl.drafters.protocol import DraftRow
from minisgl.engine.engine import Engine, device_guard
from minisgl.kvcache.pool import PagePool, PageTable
from minisgl.request import Int32Array

_NO_TOKENS: Int32Array = np.zeros(0, dtype=np.int32)
MOST_ROWS = 128  # in CUDA graphs; with more rows, drafts hardly ever pay


@dataclass(slots=True)
class _Sequence:
    slot: int
    pages: list[int] = field(default_factory=list)
    fed: Int32Array = field(default_factory=lambda: _NO_TOKENS)  # tokens whose KV is in the pages


class DraftSequences:
    """Continues requests greedily with ``engine``, to which nobody else gives work.

    A request's tokens stay in the KV cache from call to call, as far as they turn out to be its real ones. If slots or
    pages are short, the request that was asked about longest ago loses its own, and is computed again when it comes
    back. A call feeds at most ``most_tokens`` of them, so that it ends in time: a long prompt takes several calls.

    Args:
        keeps_drafts: whether the KV of a draft that was right is as good as if it had been fed as a token.
        prepare: called before the first step of a call, with that step and its rows, and before each that follows on a
            long prompt.
    """

    def __init__(
        self,
        engine: Engine,
        most_tokens: int,
        keeps_drafts: bool = True,
        prepare: Callable[[Batch, Sequence[DraftRow]], None] | None = None,
    ) -> None:
        config = engine.config
        self.engine = engine
        self._most_tokens = most_tokens
        self._keeps_drafts = keeps_drafts
        self._prepare = prepare
        self.pool = PagePool(engine.num_pages)
        self._page_table = PageTable(
            config.max_running_requests, engine.max_seq_len, config.page_size, dummy_page=engine.num_pages
        )
        self._free_slots = list(range(config.max_running_requests))
        self.sequences: dict[int, _Sequence] = {}  # by uid; the one that was asked about longest ago is the first
        # A call that took too long may still be running, in a thread that nobody waits for, when the next one comes.
        self._lock = Lock()

    def draft(self, rows: Sequence[DraftRow]) -> list[Int32Array]:
        """What follows the tokens of each row; nothing where there is no room, or more to read than a call may."""
        rows = [replace(row, tokens=row.tokens.copy()) for row in rows]  # while the call's views are valid
        with self._lock, device_guard(self.engine.device):
            return self._draft(rows)

    def finish(self, uid: int) -> None:
        """Free what a request has, if anything."""
        with self._lock:
            self._free(uid)

    # -- slots and pages -----------------------------------------------------------------------------------------------

    def _free(self, uid: int) -> None:
        sequence = self.sequences.pop(uid, None)
        if sequence is not None:
            self._free_slots.append(sequence.slot)
            self.pool.free(np.array(sequence.pages, dtype=np.int32))

    def _reserve(self, row: DraftRow, asked: set[int]) -> bool:
        """Get the slot and all pages that a call needs; False if other rows of the call have them."""
        sequence = self.sequences.pop(row.uid, None)
        missing = -(-(len(row.tokens) + row.count) // self._page_table.page_size)
        missing -= 0 if sequence is None else len(sequence.pages)
        while self.pool.num_free < missing or (sequence is None and not self._free_slots):
            victim = next((uid for uid in self.sequences if uid not in asked), None)
            if victim is None:
                if sequence is not None:
                    self.sequences[row.uid] = sequence
                    self._free(row.uid)
                return False
            self._free(victim)
        if sequence is None:
            sequence = _Sequence(self._free_slots.pop())
        self.sequences[row.uid] = sequence
        if missing > 0:
            new = self.pool.alloc(missing)
            self._page_table.write(sequence.slot, len(sequence.pages), new)
            sequence.pages += new.tolist()
        return True

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _draft(self, rows: Sequence[DraftRow]) -> list[Int32Array]:
        asked = {row.uid for row in rows}
        fed: list[DraftRow] = []
        begins, ends = [], []
        left = self._most_tokens
        for row in rows:
            if left == 0 or not len(row.tokens) or not self._reserve(row, asked):
                continue
            sequence = self.sequences[row.uid]
            known = _common_prefix(sequence.fed, row.tokens[:-1])
            fed.append(row)
            begins.append(known)
            ends.append(min(len(row.tokens), known + left))
            left -= ends[-1] - known
            sequence.fed = row.tokens[:known].copy()  # should a step fail
        if not fed:
            return [_NO_TOKENS] * len(rows)
        drafts = dict(zip((row.uid for row in fed), self._run(fed, begins, ends), strict=True))
        return [drafts.get(row.uid, _NO_TOKENS) for row in rows]

    def _run(self, rows: list[DraftRow], begins: list[int], ends: list[int]) -> list[Int32Array]:
        """Feed tokens ``begins`` to ``ends`` of each row, then go on with rows that have no more of them."""
        self._write_tokens(rows, begins, ends)
        slots = np.array([self.sequences[row.uid].slot for row in rows], dtype=np.int32)
        kv_lens, stops = np.array(begins, dtype=np.int32), np.array(ends, dtype=np.int32)
        first = self._step(slots, stops - kv_lens, kv_lens)
        if self._prepare is not None:
            self._prepare(first, rows)
        # The steps are launched one behind the other: each finds the token of the one before on the device.
        launched = [self.engine.launch(first)]
        counts = np.array(
            [row.count if end == len(row.tokens) else 0 for row, end in zip(rows, ends, strict=True)], dtype=np.int32
        )
        for step in range(1, int(counts.max(initial=0))):
            going = counts > step
            launched.append(self.engine.launch(self._step(slots[going], None, stops[going] + step - 1)))
        sampled = [step.wait().tokens for step in launched]
        drafts: list[Int32Array] = []
        for index, (row, end, count) in enumerate(zip(rows, ends, counts.tolist(), strict=True)):
            places = [int((counts[:index] > step).sum()) if step else index for step in range(count)]
            drafts.append(np.array([sampled[step][place] for step, place in enumerate(places)], dtype=np.int32))
            own = drafts[-1][:-1] if self._keeps_drafts else _NO_TOKENS
            self.sequences[row.uid].fed = np.concatenate([row.tokens[:end], own])
        return drafts

    def _write_tokens(self, rows: list[DraftRow], begins: list[int], ends: list[int]) -> None:
        """Put the tokens that are to be fed into the engine's token table, with one copy."""
        tokens = self.engine.runner.state.tokens
        parts = list(zip(rows, begins, ends, strict=True))
        offsets = [self.sequences[row.uid].slot * tokens.shape[1] for row in rows]
        index = [
            np.arange(offset + begin, offset + end, dtype=np.int32)
            for offset, (_, begin, end) in zip(offsets, parts, strict=True)
        ]
        value = [row.tokens[begin:end] for row, begin, end in parts]
        staged = to_device({"index": np.concatenate(index), "value": np.concatenate(value)}, tokens.device)
        tokens.view(-1)[staged["index"]] = staged["value"]

    def _step(self, slots: Int32Array, q_lens: Int32Array | None, kv_lens: Int32Array) -> Batch:
        """A step in which each row samples; rows that feed one token each are decode rows."""
        rows = len(slots)
        decodes = q_lens is None or int(q_lens.max()) == 1
        page_index, page_value = self._page_table.take_changes()
        return build_batch(
            slots=slots,
            q_lens=np.ones(rows, dtype=np.int32) if q_lens is None else q_lens,
            kv_lens=kv_lens,
            page_table=self._page_table.rows,
            page_size=self._page_table.page_size,
            sample_rows=np.arange(rows, dtype=np.int32),
            output_index=np.zeros(rows, dtype=np.int32),
            num_decode=rows if decodes else 0,
            page_index=page_index,
            page_value=page_value,
        )


def _common_prefix(one: Int32Array, other: Int32Array) -> int:
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
