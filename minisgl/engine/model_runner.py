"""The model runner: computes one `Batch` on the device, whose token and page tables outlive the step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from minisgl.batch import Batch, DeviceBatch, batch_arrays, device_batch, to_device
from minisgl.context import AttentionBackend, ForwardContext, forward_context
from minisgl.engine.sampler import SampledTokens, Sampler
from minisgl.engine.sampling import HostSampling
from minisgl.kvcache.pool import KVCache, table_width
from minisgl.request import Int32Array


class ModelRunner:
    """Computes steps of any shape without waiting for the device, launching their kernels one by one.

    ``model`` maps a `DeviceBatch` to the logits of its sampling rows, [S, vocab], inside a forward context.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        kv_cache: KVCache,
        attention: AttentionBackend,
        state: DeviceState,
        sampler: Sampler,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.attention = attention
        self.state = state
        self.sampler = sampler

    @property
    def device(self) -> torch.device:
        return self.state.tokens.device

    def run(self, batch: Batch, sampling: HostSampling) -> SampledTokens:
        """Feed the batch, store its KV, sample [S] tokens, and append them to the token table.

        The returned device tensors are valid until the next call.
        """
        staged = self.stage(batch, sampling, batch_arrays(batch))
        input_ids = self.state.input_ids(staged["token_slots"], staged["positions"])
        inputs = device_batch(staged, input_ids, self.state.page_table)
        self.attention.plan(batch, inputs)
        return self.sample(self.forward(inputs), sampling, staged)

    def stage(
        self, batch: Batch, sampling: HostSampling, arrays: Mapping[str, Int32Array]
    ) -> Mapping[str, torch.Tensor]:
        """Copy ``arrays`` and what else a step needs to the device, and update the token and page tables."""
        token_index, token_value = self.state.token_writes(batch)
        updates = {
            "token_index": token_index,
            "token_value": token_value,
            "page_index": batch.page_index,
            "page_value": batch.page_value,
        }
        staged = to_device({**arrays, **updates, "sampling": sampling.pack()}, self.device)
        self.state.update(*(staged[name] for name in updates))
        return staged

    def sample(self, logits: torch.Tensor, sampling: HostSampling, staged: Mapping[str, torch.Tensor]) -> SampledTokens:
        """Sample from [S, vocab] logits, and append the tokens to the token table."""
        stages = sampling.unpack(staged["sampling"])
        sampled = self.sampler.sample(logits, stages, stages.history(self.state.tokens))
        self.state.append(staged["sample_slots"], staged["sample_positions"], sampled.tokens)
        return sampled

    def forward(self, inputs: DeviceBatch) -> torch.Tensor:
        """Logits of the sampling rows, [S, vocab], for a step that the attention backend has planned."""
        with forward_context(ForwardContext(inputs, self.attention)):
            logits: torch.Tensor = self.model(inputs)
        return logits


class DeviceState:
    """Token table and page table on the device: one row a slot, and a last row for padding, the dummy slot.

    Steps read input ids here and leave sampled tokens here, so the next decode step can be launched before the host has
    seen them. Unused entries of the page table point to ``dummy_page``.
    """

    def __init__(
        self, max_running: int, max_seq_len: int, page_size: int, dummy_page: int, device: torch.device
    ) -> None:
        self.dummy_page = dummy_page
        self.tokens = torch.zeros((max_running + 1, max_seq_len), dtype=torch.int32, device=device)
        width = table_width(max_seq_len, page_size)
        self.page_table = torch.full((max_running + 1, width), dummy_page, dtype=torch.int32, device=device)

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
        self.tokens.view(-1)[token_index] = token_value
        self.page_table.view(-1)[page_index] = page_value

    def input_ids(self, token_slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Gather the tokens to feed, int32[T]."""
        return self.tokens[token_slots, positions]

    def append(self, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write sampled tokens, int32[S], behind the sequences that they continue."""
        self.tokens[slots, positions] = tokens
