"""Decode steps replayed from CUDA graphs.

Launching a kernel costs the host a few microseconds, and a decode step of a small model is hundreds of kernels that
take as long each. A CUDA graph captures the launches once, and one call replays them all. In return everything that the
capture saw must stay as it was: shapes, addresses, choices. Prefill has no graph: its shapes are never the same twice,
and its kernels run long enough to hide their launches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence

import numpy as np
import torch

from minisgl.core.batch import Batch, DeviceBatch, build_batch
from minisgl.core.config import EngineConfig
from minisgl.core.context import ForwardContext, forward_context
from minisgl.engine.runner import ModelRunner
from minisgl.engine.sampler import SampledTokens
from minisgl.engine.sampling_stages import DeviceSampling, HostSampling
from minisgl.graphs.buffers import DecodeBuffers
from minisgl.graphs.capture import CapturedGraph, CudaGraphPool, GraphCapture
from minisgl.graphs.padding import graph_sizes
from minisgl.kernels import has_triton
from minisgl.kvcache.sizing import free_memory

_MAX_ROWS = 512


class CudaGraphRunner(ModelRunner):
    """Replays decode steps, and launches every other step as a `ModelRunner` does.

    The largest size is captured first, so that the smaller ones find room in the memory that it has claimed.

    Args:
        runner: whose steps these are; model and attention backend can be captured.
        sizes: numbers of rows to capture.
        capture: makes the graphs.
        fused: as in `DecodeBuffers`.
        single_row: computes the logits of steps with one row; None is the model.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sizes: Sequence[int],
        capture: GraphCapture,
        fused: bool = False,
        single_row: Callable[[DeviceBatch], torch.Tensor] | None = None,
    ) -> None:
        super().__init__(runner.model, runner.kv_cache, runner.attention, runner.state, runner.sampler)
        self._capture = capture
        self._fused = fused
        self._single_row = single_row or runner.model
        self.buffers: dict[int, DecodeBuffers] = {}
        """By number of rows: what the graphs of that size read."""
        self.graphs: dict[tuple[int, Hashable], CapturedGraph] = {}
        """By number of rows, and the attention backend's name for the work of the step."""
        for size in sorted(sizes, reverse=True):
            self.capture(size)

    @torch.inference_mode()
    def capture(self, size: int) -> None:
        """Capture a step of ``size`` rows, once for each name that the attention backend has for such steps.

        All rows are the dummy slot's: first as long as a row can be, when they share all of their pages, then as short.
        """
        buffers = DecodeBuffers(self.state, self.kv_cache.page_size, size, self._fused)
        self.buffers[size] = buffers
        longest = self.state.tokens.shape[1] - 1
        for length in (longest, 1):
            padded, _ = buffers.fill(_dummy_step(buffers, length), HostSampling())
            key = self.attention.plan(padded, buffers.inputs)
            if (size, key) not in self.graphs:
                self.graphs[size, key] = self._capture(lambda: self._compute(buffers))

    @torch.inference_mode()
    def run(self, batch: Batch, sampling: HostSampling) -> SampledTokens:
        """See `ModelRunner.run`."""
        size = self.size_for(batch)
        if size is None:
            return super().run(batch, sampling)
        buffers = self.buffers[size]
        in_graph = self.sampler.capturable and sampling.needs_only_temperatures
        after = HostSampling() if in_graph else sampling
        padded, words = buffers.fill(batch, sampling, after.pack())
        key = self.attention.plan(padded, buffers.inputs)
        graph = self.graphs.get((size, key))
        if graph is None:
            logits, *sampled = self._compute(buffers)
        else:
            graph.replay()
            logits, *sampled = graph.outputs
        if in_graph:
            return SampledTokens(sampled[0][: batch.num_rows])
        return self._sample(logits[: batch.num_rows], sampling.unpack(words), buffers.inputs)

    def size_for(self, batch: Batch) -> int | None:
        """Rows of the smallest graph that holds the step; None if it has to run eagerly."""
        if batch.num_decode < batch.num_rows:
            return None
        needed = max(batch.num_rows, len(batch.page_index))
        return min((size for size in self.buffers if size >= needed), default=None)

    def model_for(self, rows: int) -> Callable[[DeviceBatch], torch.Tensor]:
        """What computes the logits of a captured step with so many rows."""
        return self._single_row if rows == 1 else self.model

    def _compute(self, buffers: DecodeBuffers) -> tuple[torch.Tensor, ...]:
        """What is captured: the model, the sampler where it can be, and the tokens' way into the token table.

        Returns:
            [B, vocab] logits, and [B] tokens that were sampled with temperatures alone.
        """
        with forward_context(ForwardContext(buffers.inputs, self.attention)):
            logits = self.model_for(buffers.rows)(buffers.inputs)
        if not self.sampler.capturable:
            return (logits,)
        tokens = self.sampler.sample(logits, buffers.sampling, None).tokens
        buffers.append(tokens)
        return logits, tokens

    def _sample(self, logits: torch.Tensor, stages: DeviceSampling, inputs: DeviceBatch) -> SampledTokens:
        """Sample with all stages; the tokens replace those that the graph has left in the token table."""
        count = len(logits)
        sampled = self.sampler.sample(logits, stages, stages.history(self.state.tokens))
        self.state.append(inputs.slots[:count], inputs.seq_lens[:count], sampled.tokens)
        return sampled


def build_runner(config: EngineConfig, runner: ModelRunner, fusions: Collection[str] = ()) -> ModelRunner:
    """Return ``runner``, or on CUDA one that replays its decode steps.

    Args:
        config: ``enforce_eager``, ``graph_batches``, ``max_graph_batch`` and ``max_running_requests`` count.
        runner: over all that the engine has.
        fusions: names from `minisgl.models.fusions.FUSIONS`, of which ``"single-token"`` counts.
    """
    sizes = sizes_to_capture(config, runner)
    if not sizes:
        return runner
    single_row = None
    if "single-token" in fusions:
        from minisgl.models.single_token import SingleTokenDecoder

        if SingleTokenDecoder.supports(runner.model):
            single_row = SingleTokenDecoder(runner.model, runner.kv_cache)
    return CudaGraphRunner(runner, sizes, CudaGraphPool(runner.device).capture, has_triton(), single_row)


def measure_graph_memory(runner: ModelRunner, sizes: Sequence[int]) -> int:
    """Bytes that graphs of these numbers of rows will keep on the device for themselves; 0 for no sizes.

    The two largest are captured on trial: each other one is taken to add what the second adds to the first.

    Args:
        runner: may be over a KV cache of a single page.
        sizes: from `sizes_to_capture`.
    """
    if not sizes:
        return 0
    trial = CudaGraphRunner(runner, (), CudaGraphPool(runner.device).capture, has_triton())
    costs: list[int] = []
    torch.cuda.empty_cache()
    for size in sorted(sizes, reverse=True)[:2]:
        before = free_memory(runner.device)
        trial.capture(size)
        torch.cuda.empty_cache()
        costs.append(before - free_memory(runner.device))
    return costs[0] + costs[-1] * (len(sizes) - 1)


def sizes_to_capture(config: EngineConfig, runner: ModelRunner) -> tuple[int, ...]:
    """Numbers of rows to capture; none where there is no CUDA, or the options, the attention backend or a module of the
    model say no."""
    capturable = runner.attention.capturable and all(
        getattr(module, "capturable", True) for module in runner.model.modules()
    )
    if runner.device.type != "cuda" or config.enforce_eager or not capturable:
        return ()
    return config.graph_batches or graph_sizes(config.max_graph_batch or min(config.max_running_requests, _MAX_ROWS))


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
