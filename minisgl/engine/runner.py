"""How a step is computed: from a `Batch` to sampled tokens on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from minisgl.core.attention import AttentionBackend
from minisgl.core.batch import Batch, DeviceBatch
from minisgl.core.context import ForwardContext, forward_context
from minisgl.engine.device_state import DeviceState
from minisgl.engine.inputs import batch_arrays, device_batch
from minisgl.engine.sampler import SampledTokens, Sampler
from minisgl.engine.sampling_stages import SamplingRows
from minisgl.engine.staging import to_device
from minisgl.kvcache.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What a step is computed with.

    Args:
        model: maps a `DeviceBatch` to logits, [S, vocab], inside a forward context.
        kv_cache: keys and values.
        attention: over them.
        state: token and page tables on the device.
        sampler: from logits to tokens.
    """

    model: torch.nn.Module
    kv_cache: KVCache
    attention: AttentionBackend
    state: DeviceState
    sampler: Sampler

    @property
    def device(self) -> torch.device:
        return self.state.tokens.device


class StepRunner(Protocol):
    """Computes one step after the other, without waiting for the device."""

    def run(self, batch: Batch, rows: SamplingRows) -> SampledTokens:
        """Feed the batch, store its KV, sample, and leave the sampled tokens in the token table.

        Args:
            batch: the step.
            rows: how its S sampling rows are sampled.

        Returns:
            [S] tokens on the device, valid until the next call.
        """
        ...


class RunnerFactory(Protocol):
    """Builds a runner, and says beforehand what it will cost."""

    def memory(self, parts: EngineParts) -> int:
        """Bytes that a runner over parts like these keeps on the device for itself, beside the parts."""
        ...

    def build(self, parts: EngineParts) -> StepRunner:
        """The runner."""
        ...


class EagerRunner:
    """Launches the kernels of a step one by one, in any shape. One copy to the device a step, beside what the attention
    backend has planned.

    Args:
        parts: of the engine.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts

    def run(self, batch: Batch, rows: SamplingRows) -> SampledTokens:
        """See `StepRunner.run`."""
        state = self.parts.state
        token_index, token_value = state.token_writes(batch.new_requests)
        staged = to_device(
            {
                "token_index": token_index,
                "token_value": token_value,
                "page_index": batch.page_index,
                "page_value": batch.page_value,
                "sampling": rows.pack(),
                **batch_arrays(batch),
            },
            self.parts.device,
        )
        state.update(staged["token_index"], staged["token_value"], staged["page_index"], staged["page_value"])
        input_ids = state.input_ids(staged["token_slots"], staged["positions"])
        inputs = device_batch(staged, input_ids, state.page_table)
        self.parts.attention.plan(batch, inputs)
        logits = self.forward(inputs)
        stages = rows.unpack(staged["sampling"])
        sampled = self.parts.sampler.sample(logits, stages, stages.history(state.tokens))
        state.append(staged["sample_slots"], staged["sample_positions"], sampled.tokens)
        return sampled

    def forward(self, inputs: DeviceBatch) -> torch.Tensor:
        """Logits of the sampling rows, [S, vocab], for a step that the attention backend has planned."""
        with forward_context(ForwardContext(inputs, self.parts.attention)):
            logits: torch.Tensor = self.parts.model(inputs)
        return logits


class EagerRunners:
    """The factory of runners that need no memory of their own."""

    def memory(self, parts: EngineParts) -> int:
        """Nothing."""
        return 0

    def build(self, parts: EngineParts) -> StepRunner:
        """An `EagerRunner`."""
        return EagerRunner(parts)
