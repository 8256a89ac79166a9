"""A step under construction, and what a step brought to light."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from minisgl.core.batch import Batch, NewRequest, build_batch
from minisgl.core.request import Request, TokenLogprobs
from minisgl.core.table import RunningTable
from minisgl.kvcache.page_table import PageTable


@dataclass(slots=True)
class StepRows:
    """Rows of the step being built, one list entry a row."""

    slots: list[int] = field(default_factory=list)
    q_lens: list[int] = field(default_factory=list)
    kv_lens: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    new_requests: list[NewRequest] = field(default_factory=list)

    def add_decodes(self, slots: list[int], kv_lens: list[int]) -> None:
        """Append rows that feed one token each and sample."""
        self.slots += slots
        self.q_lens += [1] * len(slots)
        self.kv_lens += kv_lens
        self.samples += [True] * len(slots)

    def add_prefill(self, slot: int, kv_len: int, chunk: int, samples: bool) -> None:
        """Append a row that feeds ``chunk`` tokens from position ``kv_len`` on."""
        self.slots.append(slot)
        self.q_lens.append(chunk)
        self.kv_lens.append(kv_len)
        self.samples.append(samples)

    def build(self, num_decode: int, table: RunningTable, page_table: PageTable) -> Batch:
        """Lay the rows out as a `Batch`, together with the page-table entries that changed since the last one."""
        slots = np.asarray(self.slots, dtype=np.int32)
        sample_rows = np.flatnonzero(self.samples).astype(np.int32)
        sampled = slots[sample_rows]
        page_index, page_value = page_table.take_changes()
        return build_batch(
            slots=slots,
            q_lens=np.asarray(self.q_lens, dtype=np.int32),
            kv_lens=np.asarray(self.kv_lens, dtype=np.int32),
            page_table=page_table.rows,
            page_size=page_table.page_size,
            sample_rows=sample_rows,
            output_index=table.token_len[sampled] - 1 - table.prompt_len[sampled],
            num_decode=num_decode,
            new_requests=self.new_requests,
            page_index=page_index,
            page_value=page_value,
        )


@dataclass(slots=True)
class TokenEvent:
    """One new token of a watched request, in nats where log-probabilities were asked for."""

    request: Request
    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class StepOutput:
    """What became known since the last step.

    Args:
        events: new tokens of watched requests, in batch order.
        finished: requests that ended, for whatever reason, each exactly once in the engine's life.
        prefill_tokens, decode_tokens: tokens that were fed.
        constrained_rows: rows that a step was scheduled to sample under a constraint, each with a mask of its own.
    """

    events: list[TokenEvent] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    prefill_tokens: int = 0
    decode_tokens: int = 0
    constrained_rows: int = 0
