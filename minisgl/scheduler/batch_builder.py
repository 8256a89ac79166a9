"""A step under construction: the scheduler adds rows one by one, and `BatchBuilder` lays them out as a `Batch`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from minisgl.batch import Batch, NewRequest, build_batch
from minisgl.kvcache.pool import PageTable
from minisgl.request import Int32Array
from minisgl.table import RunningTable

_NO_TOKENS: Int32Array = np.zeros(0, dtype=np.int32)


@dataclass(slots=True)
class BatchBuilder:
    """The rows of a step under construction, one list entry a row: decode rows, rows with drafts, prefill rows."""

    slots: list[int] = field(default_factory=list)
    q_lens: list[int] = field(default_factory=list)
    kv_lens: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)  # behind how many of its last tokens the row samples
    drafts: list[Int32Array] = field(default_factory=list)  # of the rows that have some
    new_requests: list[NewRequest] = field(default_factory=list)
    num_decode: int = 0

    @property
    def num_generating(self) -> int:
        """Rows that decode, with drafts or without."""
        return self.num_decode + len(self.drafts)

    def add_decodes(self, slots: list[int], kv_lens: list[int]) -> None:
        """Append rows that feed one token each and sample."""
        self.slots += slots
        self.q_lens += [1] * len(slots)
        self.kv_lens += kv_lens
        self.samples += [1] * len(slots)
        self.num_decode += len(slots)

    def add_drafts(self, slot: int, kv_len: int, drafts: Int32Array) -> None:
        """Append a row that feeds its newest token and drafts, and samples behind each."""
        self.slots.append(slot)
        self.q_lens.append(1 + len(drafts))
        self.kv_lens.append(kv_len)
        self.samples.append(1 + len(drafts))
        self.drafts.append(drafts)

    def add_prefill(self, slot: int, kv_len: int, chunk: int, samples: bool) -> None:
        """Append a row that feeds ``chunk`` tokens from position ``kv_len`` on."""
        self.slots.append(slot)
        self.q_lens.append(chunk)
        self.kv_lens.append(kv_len)
        self.samples.append(int(samples))

    def build(self, table: RunningTable, page_table: PageTable) -> Batch:
        """Lay the rows out as a `Batch`, with the page-table entries that changed since the last one."""
        slots = np.asarray(self.slots, dtype=np.int32)
        q_lens, kv_lens = np.asarray(self.q_lens, dtype=np.int32), np.asarray(self.kv_lens, dtype=np.int32)
        samples = np.asarray(self.samples, dtype=np.int32)
        sample_rows = np.repeat(np.arange(len(slots), dtype=np.int32), samples)
        # How many samples the row has from this one on.
        following = np.cumsum(samples, dtype=np.int32)[sample_rows] - np.arange(len(sample_rows), dtype=np.int32)
        page_index, page_value = page_table.take_changes()
        return build_batch(
            slots=slots,
            q_lens=q_lens,
            kv_lens=kv_lens,
            page_table=page_table.rows,
            page_size=page_table.page_size,
            sample_rows=sample_rows,
            output_index=(kv_lens + q_lens - table.prompt_len[slots])[sample_rows] - following + 1,
            num_decode=self.num_decode,
            new_requests=self.new_requests,
            page_index=page_index,
            page_value=page_value,
            drafts=np.concatenate([_NO_TOKENS, *self.drafts]),
        )
