"""The token table and the page tables of one device, which outlive the step."""

from __future__ import annotations

import numpy as np
import torch

from minisgl.batch import Batch, DeviceBatch
from minisgl.kvcache.pool import table_width
from minisgl.request import Int32Array


class DeviceState:
    """Token table and page table on the device: one row a slot, and a last row for padding, the dummy slot.

    Steps read input ids here and leave sampled tokens here, so the next decode step can be launched before the host has
    seen them. Unused entries of the page table point to ``dummy_page``.

    With a ``window_dummy`` there is a second page table, right behind the first; see `PageTable`.
    """

    def __init__(
        self,
        max_running: int,
        max_seq_len: int,
        page_size: int,
        dummy_page: int,
        device: torch.device,
        window_dummy: int | None = None,
    ) -> None:
        self.page_size = page_size
        self.dummy_page = dummy_page
        self.tokens = torch.zeros((max_running + 1, max_seq_len), dtype=torch.int32, device=device)
        width = table_width(max_seq_len, page_size)
        tables = torch.full((1 if window_dummy is None else 2, max_running + 1, width), dummy_page, dtype=torch.int32)
        if window_dummy is not None:
            tables[1] = window_dummy
        self.page_tables = tables.to(device)
        self.page_table = self.page_tables[0]
        self.window_table = None if window_dummy is None else self.page_tables[1]

    def token_writes(self, batch: Batch) -> tuple[Int32Array, Int32Array]:
        """Flat indices into the token table, and values, that put tokens of admitted requests, and drafts, in place.

        Drafts are history of what is sampled behind them, for penalties too. What is sampled replaces them, and what is
        behind the first wrong draft is beyond the sequence.
        """
        width = self.tokens.shape[1]
        fed = batch.logit_rows[batch.draft_rows]
        index = [batch.token_slots[fed] * width + batch.positions[fed]]
        value = [batch.drafts]
        for new in batch.new_requests:
            index.append(np.arange(new.slot * width, new.slot * width + len(new.tokens), dtype=np.int32))
            value.append(new.tokens)
        return np.concatenate(index), np.concatenate(value)

    def update(
        self,
        token_index: torch.Tensor,
        token_value: torch.Tensor,
        page_index: torch.Tensor,
        page_value: torch.Tensor,
    ) -> None:
        """Apply int32 updates to the flattened tables."""
        # An update of nothing would still be launched, while the device waits for the step.
        if len(token_index):
            self.tokens.view(-1)[token_index] = token_value
        if len(page_index):
            self.page_tables.view(-1)[page_index] = page_value

    def add_window_locs(self, inputs: DeviceBatch, token_slots: torch.Tensor) -> None:
        """Where layers have a second page table, add it to the inputs of a step, and where it places their KV."""
        if self.window_table is not None:
            pages = self.window_table[token_slots, inputs.positions // self.page_size]
            locs = pages * self.page_size + inputs.positions % self.page_size
            inputs.window_table = self.window_table
            inputs.window_locs = locs if inputs.window_locs is None else inputs.window_locs.copy_(locs)

    def input_ids(self, token_slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Gather the tokens to feed, int32[T]."""
        return self.tokens[token_slots, positions]

    def append(self, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write sampled tokens, int32[S], behind the sequences that they continue."""
        self.tokens[slots, positions] = tokens
