"""The model runner: computes one `Batch` on the device, whose token and page tables outlive the step."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from minisgl.batch import Batch, DeviceBatch, batch_arrays, device_batch, to_device
from minisgl.context import AttentionBackend, ForwardContext, forward_context
from minisgl.engine.device_state import DeviceState
from minisgl.engine.sampler import SampledTokens, Sampler
from minisgl.engine.sampling import HostSampling
from minisgl.kvcache.pool import KVCache
from minisgl.layers.sharding import SINGLE_RANK, Communicator
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

    @property
    def num_ranks(self) -> int:
        """Ranks that compute every step together. None of them may leave one out: the others would wait for it."""
        communicator: Communicator = getattr(self.model, "communicator", SINGLE_RANK)
        return communicator.size

    def run(self, batch: Batch, sampling: HostSampling) -> SampledTokens:
        """Feed the batch, store its KV, sample [S] tokens, and append them to the token table.

        The returned device tensors are valid until the next call.
        """
        staged = self.stage(batch, sampling, batch_arrays(batch))
        input_ids = self.state.input_ids(staged["token_slots"], staged["positions"])
        inputs = device_batch(staged, input_ids, self.state.page_table)
        self.state.add_window_locs(inputs, staged["token_slots"])
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
