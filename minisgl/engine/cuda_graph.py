"""A graph has one shape; a step is padded up to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Protocol

import numpy as np
import torch

from minisgl.batch import Batch, DeviceBatch, build_batch, to_device
from minisgl.config import EngineConfig
from minisgl.context import ForwardContext, forward_context
from minisgl.engine.model_runner import DeviceState, ModelRunner
from minisgl.engine.sampler import SampledTokens
from minisgl.engine.sampling import DeviceSampling, HostSampling, RandomStage
from minisgl.kernels import has_triton
from minisgl.kvcache.sizing import free_memory
from minisgl.request import Int32Array

_SMALL = (1, 2, 4, 8, 16, 24, 32)
_STRIDE = 16


def graph_sizes(largest: int) -> tuple[int, ...]:
    """Numbers of rows to capture, ascending, so that every number up to ``largest`` has one that is not much larger.

    Small steps are the ones whose time depends on each row: powers of two first, then multiples of eight. Above 32
    rows padding up to 15 rows costs next to nothing, since the matrix kernels work in tiles of 64 rows and more.
    """
    sizes = {*_SMALL, *range(_SMALL[-1] + _STRIDE, largest, _STRIDE), largest}
    return tuple(sorted(size for size in sizes if size <= largest))


def pad_batch(batch: Batch, rows: int, dummy_slot: int) -> Batch:
    """Add decode rows of one token to a decode step, on the dummy slot, whose page-table row is the dummy page.

    They read and write the dummy page, which belongs to nobody, and sample a token that nobody reads.

    Args:
        batch: decode rows only.
        rows: of the result, at least those of ``batch``.
        dummy_slot: the extra row of the token and page tables.
    """
    missing = rows - batch.num_rows
    if missing == 0:
        return batch

    def padded(values: Int32Array, value: int) -> Int32Array:
        return np.concatenate([values, np.full(missing, value, dtype=np.int32)])

    return replace(
        batch,
        slots=padded(batch.slots, dummy_slot),
        cu_seqlens_q=np.arange(rows + 1, dtype=np.int32),
        seq_lens=padded(batch.seq_lens, 1),
        positions=padded(batch.positions, 0),
        token_slots=padded(batch.token_slots, dummy_slot),
        num_decode=rows,
    )


Work = Callable[[], tuple[torch.Tensor, ...]]
"""Computes some tensors from others, whose addresses never change."""


class CapturedGraph(Protocol):
    """Captured work."""

    outputs: tuple[torch.Tensor, ...]
    """Where each replay leaves its results."""

    def replay(self) -> None:
        """Do the work again, with what its inputs hold now."""
        ...


GraphCapture = Callable[[Work], CapturedGraph]
"""Runs some work at least once, and keeps it: `CudaGraphCapture` on a GPU, the class `CpuGraph` elsewhere."""


class CudaGraph:
    """A captured CUDA graph: the driver's list of kernels, with all of their arguments."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: tuple[torch.Tensor, ...]) -> None:
        self.graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        """Launch all kernels at once."""
        self.graph.replay()


class CudaGraphCapture:
    """Captures CUDA graphs in one memory pool, which they can share because no two of them ever run at the same time.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Work) -> CudaGraph:
        """Run ``work`` once, then capture it. What runs on the current stream comes first.

        At its first call work does more than at later ones: libraries allocate workspaces, Triton compiles, cuBLAS
        chooses its kernels. None of that may be captured.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            outputs = work()
        torch.cuda.current_stream().wait_stream(self._stream)
        return CudaGraph(graph, outputs)


class CpuGraph:
    """Stands for a graph where there is no GPU. It keeps the work itself in place of a list of kernels: a replay calls
    it again, Python and all, and moves the results to where they were. It saves nothing, and shows everything else."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.outputs = work()

    def replay(self) -> None:
        """Call the work."""
        for kept, new in zip(self.outputs, self._work(), strict=True):
            kept.copy_(new)


_FIELDS = 7
"""slots, seq_lens, page_index, page_value, temperature, key_low, key_high: one int32 each a row."""
_NOTHING = np.zeros(0, dtype=np.int32)


class DecodeBuffers:
    """Inputs of decode steps with one number of rows.

    Positions, locations and token ids follow from a row's slot and length, so the host does not send them: they are
    derived on the device, from its own tables.

    Args:
        state: token and page tables; their last row is the dummy slot.
        page_size: tokens a page.
        rows: B.
        fused: whether Triton kernels look up and append tokens: one launch each, where PyTorch takes a dozen.
    """

    def __init__(self, state: DeviceState, page_size: int, rows: int, fused: bool = False) -> None:
        device = state.tokens.device
        self.state = state
        self.page_size = page_size
        self.rows = rows
        self._kernels: ModuleType | None = None
        if fused:
            from minisgl.kernels import decode_inputs

            self._kernels = decode_inputs
        self.dummy_slot = len(state.tokens) - 1
        self._packed = torch.zeros((_FIELDS, rows), dtype=torch.int32, device=device)
        slots, seq_lens, self.page_index, self.page_value, temperature, *keys = self._packed
        self.inputs = DeviceBatch(
            input_ids=torch.zeros(rows, dtype=torch.int32, device=device),
            positions=torch.zeros(rows, dtype=torch.int32, device=device),
            out_locs=torch.zeros(rows, dtype=torch.int32, device=device),
            slots=slots,
            seq_lens=seq_lens,
            cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32, device=device),
            page_table=state.page_table,
            logit_rows=torch.arange(rows, dtype=torch.int32, device=device),
        )
        self.sampling = DeviceSampling(random=RandomStage(temperature.view(torch.float32), *keys))
        """Draws a token where the temperature is not 0; the likeliest token elsewhere."""

    def fill(self, batch: Batch, sampling: HostSampling, after: Int32Array = _NOTHING) -> tuple[Batch, torch.Tensor]:
        """Write a step into the buffers, with one copy from the host.

        Args:
            batch: at most B decode rows, with at most B page-table changes.
            sampling: of the batch; only its random stage is used here.
            after: int32[words] for the time after the replay, which travels along; no graph can read it.

        Returns:
            The batch padded to B rows, and ``after`` on the device.
        """
        padded = pad_batch(batch, self.rows, self.dummy_slot)
        host = torch.empty(self._packed.shape, dtype=torch.int32, pin_memory=self._packed.is_cuda)
        slots, seq_lens, page_index, page_value, *random = host.numpy()
        slots[:] = padded.slots
        seq_lens[:] = padded.seq_lens
        # Unused entries write what is there already: the dummy page at the start of the dummy row.
        _put(page_index, batch.page_index, self.dummy_slot * self.state.page_table.shape[1])
        _put(page_value, batch.page_value, self.state.dummy_page)
        for target, values in zip(random, sampling.random or (), strict=False):
            _put(target, values.view(np.int32), 0)
        if sampling.random is None:
            random[0][:] = 0
        arrived = self._send(host, after)
        self.derive()
        return padded, arrived

    def _send(self, host: torch.Tensor, after: Int32Array) -> torch.Tensor:
        """Copy the step to where the graphs read. With ``after``, whose size differs from step to step, it goes by way
        of newly allocated memory: a second copy from the host would cost more than one on the device."""
        if len(after) == 0:
            self._packed.copy_(host, non_blocking=True)
            return self._packed.new_empty(0)
        staged = to_device({"step": host.numpy().ravel(), "after": after}, self._packed.device)
        self._packed.copy_(staged["step"].view_as(self._packed))
        return staged["after"]

    def derive(self) -> None:
        """Apply the page-table changes, then look up where each row's new token is, and where its KV goes."""
        inputs, tables = self.inputs, self.state
        if self._kernels is not None:
            self._kernels.derive_inputs(
                slots=inputs.slots,
                seq_lens=inputs.seq_lens,
                tokens=tables.tokens,
                page_table=tables.page_table,
                page_index=self.page_index,
                page_value=self.page_value,
                page_size=self.page_size,
                positions=inputs.positions,
                out_locs=inputs.out_locs,
                input_ids=inputs.input_ids,
            )
            return
        tables.page_table.view(-1)[self.page_index] = self.page_value
        torch.sub(inputs.seq_lens, 1, out=inputs.positions)
        inputs.input_ids.copy_(tables.input_ids(inputs.slots, inputs.positions))
        pages = tables.page_table[inputs.slots, inputs.positions // self.page_size]
        inputs.out_locs.copy_(pages * self.page_size + inputs.positions % self.page_size)

    def append(self, tokens: torch.Tensor) -> None:
        """Write sampled tokens, int32[B], behind the rows' sequences."""
        if self._kernels is not None:
            self._kernels.append_tokens(self.inputs.slots, self.inputs.seq_lens, self.state.tokens, tokens)
            return
        self.state.append(self.inputs.slots, self.inputs.seq_lens, tokens)


def _put(target: Int32Array, values: Int32Array, rest: int) -> None:
    target[: len(values)] = values
    target[len(values) :] = rest


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
    return CudaGraphRunner(runner, sizes, CudaGraphCapture(runner.device), has_triton(), single_row)


def measure_graph_memory(runner: ModelRunner, sizes: Sequence[int]) -> int:
    """Bytes that graphs of these numbers of rows will keep on the device for themselves; 0 for no sizes.

    The two largest are captured on trial: each other one is taken to add what the second adds to the first.

    Args:
        runner: may be over a KV cache of a single page.
        sizes: from `sizes_to_capture`.
    """
    if not sizes:
        return 0
    trial = CudaGraphRunner(runner, (), CudaGraphCapture(runner.device), has_triton())
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
