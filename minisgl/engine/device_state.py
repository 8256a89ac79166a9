"""What the device remembers between steps: the tokens and the pages of every running request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from minisgl.core.batch import NewRequest
from minisgl.core.request import Int32Array
from minisgl.kvcache.page_table import table_width


class DeviceState:
    """Token table and page table on the device, one row a slot and one more for padding.

    A step reads its input ids here and leaves the tokens that it samples here, so the next decode step can be launched
    before the host has seen them.

    Args:
        max_running, max_seq_len, page_size: sizes, as in the scheduler's tables.
        dummy_page: page id that unused entries point to.
        device: where the tables live.
    """

    def __init__(
        self, max_running: int, max_seq_len: int, page_size: int, dummy_page: int, device: torch.device
    ) -> None:
        self.dummy_page = dummy_page
        self.tokens = torch.zeros((max_running + 1, max_seq_len), dtype=torch.int32, device=device)
        width = table_width(max_seq_len, page_size)
        self.page_table = torch.full((max_running + 1, width), dummy_page, dtype=torch.int32, device=device)

    def token_writes(self, new_requests: Sequence[NewRequest]) -> tuple[Int32Array, Int32Array]:
        """Flat indices into the token table, and values, that put the admitted requests' tokens in place."""
        width = self.tokens.shape[1]
        index = [np.arange(a.slot * width, a.slot * width + len(a.tokens), dtype=np.int32) for a in new_requests]
        value = [a.tokens for a in new_requests]
        nothing = np.zeros(0, dtype=np.int32)
        return np.concatenate([nothing, *index]), np.concatenate([nothing, *value])

    def update(
        self,
        token_index: torch.Tensor,
        token_value: torch.Tensor,
        page_index: torch.Tensor,
        page_value: torch.Tensor,
    ) -> None:
        """Apply int32 updates to the flattened tables."""
        self.tokens.view(-1)[token_index] = token_value
        self.page_table.view(-1)[page_index] = page_value

    def input_ids(self, token_slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Gather the tokens to feed, int32[T]."""
        return self.tokens[token_slots, positions]

    def append(self, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write sampled tokens, int32[S], behind the sequences that they continue."""
        self.tokens[slots, positions] = tokens
