"""How a step is computed: from a `Batch` to sampled tokens on the device."""

from __future__ import annotations

import torch

from minisgl.core.attention import AttentionBackend
from minisgl.core.batch import Batch, DeviceBatch
from minisgl.core.context import ForwardContext, forward_context
from minisgl.engine.device_state import DeviceState
from minisgl.engine.inputs import batch_arrays, device_batch
from minisgl.engine.sampler import SampledTokens, Sampler
from minisgl.engine.sampling_stages import HostSampling
from minisgl.engine.staging import to_device
from minisgl.kvcache.kv_cache import KVCache


class ModelRunner:
    """Computes one step after the other without waiting for the device, and launches the kernels of each one by one, in
    any shape. One copy to the device a step, beside what the attention backend has planned.

    Args:
        model: maps a `DeviceBatch` to logits, [S, vocab], inside a forward context.
        kv_cache: keys and values.
        attention: over them.
        state: token and page tables on the device.
        sampler: from logits to tokens.
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
        """Feed the batch, store its KV, sample, and leave the sampled tokens in the token table.

        Args:
            batch: the step.
            sampling: how its S sampling rows are sampled.

        Returns:
            [S] tokens on the device, valid until the next call.
        """
        state = self.state
        token_index, token_value = state.token_writes(batch.new_requests)
        staged = to_device(
            {
                "token_index": token_index,
                "token_value": token_value,
                "page_index": batch.page_index,
                "page_value": batch.page_value,
                "sampling": sampling.pack(),
                **batch_arrays(batch),
            },
            self.device,
        )
        state.update(staged["token_index"], staged["token_value"], staged["page_index"], staged["page_value"])
        input_ids = state.input_ids(staged["token_slots"], staged["positions"])
        inputs = device_batch(staged, input_ids, state.page_table)
        self.attention.plan(batch, inputs)
        logits = self.forward(inputs)
        stages = sampling.unpack(staged["sampling"])
        sampled = self.sampler.sample(logits, stages, stages.history(state.tokens))
        state.append(staged["sample_slots"], staged["sample_positions"], sampled.tokens)
        return sampled

    def forward(self, inputs: DeviceBatch) -> torch.Tensor:
        """Logits of the sampling rows, [S, vocab], for a step that the attention backend has planned."""
        with forward_context(ForwardContext(inputs, self.attention)):
            logits: torch.Tensor = self.model(inputs)
        return logits
