"""Decode steps replayed from CUDA graphs.

Launching a kernel costs the host a few microseconds, and a decode step of a small model is hundreds of kernels that
take as long each. A CUDA graph records the launches once, and one call replays them all. In return everything that the
recording saw must stay as it was: shapes, addresses, choices. Prefill has no graph: its shapes are never the same
twice, and its kernels run long enough to hide their launches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch

from minisgl.core.batch import Batch, DeviceBatch, build_batch
from minisgl.core.context import ForwardContext, forward_context
from minisgl.engine.runner import EagerRunner, EngineParts, StepRunner
from minisgl.engine.sampler import SampledTokens
from minisgl.engine.sampling_stages import SamplingInputs, SamplingRows
from minisgl.graphs.buffers import DecodeBuffers
from minisgl.graphs.recorder import CudaRecorder, Recorder, Recording
from minisgl.kvcache.sizing import free_memory

Model = Callable[[DeviceBatch], torch.Tensor]


class GraphRunner:
    """A `StepRunner` that replays decode steps, and leaves every other step to an `EagerRunner`.

    The largest size is recorded first, so that the smaller ones find room in the memory that it has claimed.

    Args:
        parts: of the engine; model and attention backend can be captured.
        sizes: numbers of rows to record.
        recorder: makes the graphs.
        make_buffers: class of their inputs.
        decoder_for: for a number of rows, what computes their logits; None is always ``parts.model``.
    """

    def __init__(
        self,
        parts: EngineParts,
        sizes: Sequence[int],
        recorder: Recorder,
        make_buffers: type[DecodeBuffers] = DecodeBuffers,
        decoder_for: Callable[[int], Model] | None = None,
    ) -> None:
        self.parts = parts
        self.eager = EagerRunner(parts)
        self._recorder = recorder
        self._make_buffers = make_buffers
        self._decoder_for = decoder_for or (lambda rows: parts.model)
        self.buffers: dict[int, DecodeBuffers] = {}
        """By number of rows: what the graphs of that size read."""
        self.graphs: dict[tuple[int, Hashable], Recording] = {}
        """By number of rows, and the attention backend's name for the work of the step."""
        for size in sorted(sizes, reverse=True):
            self.capture(size)

    @torch.inference_mode()
    def capture(self, size: int) -> None:
        """Record a step of ``size`` rows, once for each name that the attention backend has for such steps.

        All rows are the dummy slot's: first as long as a row can be, when they share all of their pages, then as short.
        """
        buffers = self._make_buffers(self.parts.state, self.parts.kv_cache.page_size, size)
        self.buffers[size] = buffers
        longest = self.parts.state.tokens.shape[1] - 1
        for length in (longest, 1):
            step = _dummy_step(buffers, length)
            padded, _ = buffers.fill(step, SamplingRows())
            key = self.parts.attention.plan(padded, buffers.inputs)
            if (size, key) not in self.graphs:
                self.graphs[size, key] = self._recorder.record(lambda: self._compute(buffers))

    @torch.inference_mode()
    def run(self, batch: Batch, rows: SamplingRows) -> SampledTokens:
        """See `StepRunner.run`."""
        size = self.size_for(batch)
        if size is None:
            return self.eager.run(batch, rows)
        buffers = self.buffers[size]
        in_graph = self.parts.sampler.capturable and rows.needs_only_temperatures
        after = SamplingRows() if in_graph else rows
        padded, words = buffers.fill(batch, rows, after.pack())
        key = self.parts.attention.plan(padded, buffers.inputs)
        graph = self.graphs.get((size, key))
        if graph is None:
            logits, *sampled = self._compute(buffers)
        else:
            graph.replay()
            logits, *sampled = graph.outputs
        if in_graph:
            return SampledTokens(sampled[0][: batch.num_rows])
        return self._sample(logits[: batch.num_rows], rows.unpack(words), buffers.inputs)

    def size_for(self, batch: Batch) -> int | None:
        """Rows of the smallest graph that holds the step; None if it has to run eagerly."""
        if batch.num_decode < batch.num_rows:
            return None
        needed = max(batch.num_rows, len(batch.page_index))
        return min((size for size in self.buffers if size >= needed), default=None)

    def _compute(self, buffers: DecodeBuffers) -> tuple[torch.Tensor, ...]:
        """What is recorded: the model, the sampler where it can be, and the tokens' way into the token table.

        Returns:
            [B, vocab] logits, and [B] tokens that were sampled with temperatures alone.
        """
        inputs, parts = buffers.inputs, self.parts
        decoder = self._decoder_for(buffers.rows)
        with forward_context(ForwardContext(inputs, parts.attention)):
            logits = decoder(inputs)
        if not parts.sampler.capturable:
            return (logits,)
        tokens = parts.sampler.sample(logits, buffers.sampling, None).tokens
        buffers.append(tokens)
        return logits, tokens

    def _sample(self, logits: torch.Tensor, stages: SamplingInputs, inputs: DeviceBatch) -> SampledTokens:
        """Sample with all stages; the tokens replace those that the graph has left in the token table."""
        state, count = self.parts.state, len(logits)
        sampled = self.parts.sampler.sample(logits, stages, stages.history(state.tokens))
        state.append(inputs.slots[:count], inputs.seq_lens[:count], sampled.tokens)
        return sampled


class GraphRunners:
    """The factory of `GraphRunner` on CUDA; of `EagerRunner` for models and attention backends that cannot be captured.

    Args:
        sizes: numbers of rows to record.
        make_buffers: as in `GraphRunner`.
        decoders: makes the ``decoder_for`` of `GraphRunner`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        make_buffers: type[DecodeBuffers] = DecodeBuffers,
        decoders: Callable[[EngineParts], Callable[[int], Model]] | None = None,
    ) -> None:
        self.sizes = sizes
        self._make_buffers = make_buffers
        self._decoders = decoders

    def memory(self, parts: EngineParts) -> int:
        """Record the two largest sizes on trial: each other one is taken to add what the second adds to the first."""
        if not _capturable(parts):
            return 0
        trial = GraphRunner(parts, (), CudaRecorder(parts.device), self._make_buffers)
        costs: list[int] = []
        torch.cuda.empty_cache()
        for size in sorted(self.sizes, reverse=True)[:2]:
            before = free_memory(parts.device)
            trial.capture(size)
            torch.cuda.empty_cache()
            costs.append(before - free_memory(parts.device))
        return costs[0] + costs[-1] * (len(self.sizes) - 1)

    def build(self, parts: EngineParts) -> StepRunner:
        """Record all sizes."""
        if not _capturable(parts):
            return EagerRunner(parts)
        decoder_for = None if self._decoders is None else self._decoders(parts)
        return GraphRunner(parts, self.sizes, CudaRecorder(parts.device), self._make_buffers, decoder_for)


def _capturable(parts: EngineParts) -> bool:
    """Whether neither the attention backend nor any module of the model says that it cannot be recorded."""
    return parts.attention.capturable and all(getattr(module, "capturable", True) for module in parts.model.modules())


def _dummy_step(buffers: DecodeBuffers, length: int) -> Batch:
    """A decode step in which every row is the dummy slot with ``length`` tokens."""
    rows = buffers.rows
    return build_batch(
        slots=np.full(rows, buffers.dummy_slot, dtype=np.int32),
        q_lens=np.ones(rows, dtype=np.int32),
        kv_lens=np.full(rows, length - 1, dtype=np.int32),
        page_table=np.full((buffers.dummy_slot + 1, length), buffers.state.dummy_page, dtype=np.int32),
        page_size=buffers.page_size,
        sample_rows=np.arange(rows, dtype=np.int32),
        output_index=np.zeros(rows, dtype=np.int32),
        num_decode=rows,
    )
