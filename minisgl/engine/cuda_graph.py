"""Decode steps as CUDA graphs: the runner that replays them, the buffers they read, and how they are captured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Protocol

import numpy as np
import torch
from tqdm import tqdm

from minisgl.batch import Batch, DeviceBatch, build_batch, to_device
from minisgl.config import EngineConfig
from minisgl.context import ForwardContext, forward_context
from minisgl.engine.device_state import DeviceState
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.sampler import SampledTokens
from minisgl.engine.sampling import DeviceSampling, HostSampling, RandomStage
from minisgl.kernels import has_triton
from minisgl.kvcache.sizing import free_memory
from minisgl.request import Int32Array

logger = logging.getLogger(__name__)

_EMPTY: Int32Array = np.zeros(0, dtype=np.int32)


class CudaGraphRunner(ModelRunner):
    """Replays decode steps, padded to the next of the captured ``sizes`` (rows); leaves others to ``runner``.

    The model and the attention backend of ``runner`` must be capturable. ``fused`` is that of `DecodeBuffers`.
    ``single_row`` computes the logits of steps with one row; None means the model.
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
        self._fallback = runner
        self._capture = capture
        self._fused = fused
        self._single_row = runner.model if single_row is None else single_row
        self.buffers: dict[int, DecodeBuffers] = {}  # by number of rows: what the graphs of that size read
        # By number of rows, and the attention backend's name for the work of the step.
        self.graphs: dict[tuple[int, Hashable], CapturedGraph] = {}
        capture_all("rows", self.capture, sizes, self.device)

    @torch.inference_mode()
    def capture(self, size: int) -> None:
        """Capture a step of ``size`` rows, once for each name that the attention backend has for such steps.

        A size for which there is too little memory goes without, and its steps take a larger graph or run eagerly; with
        several ranks it is an error.
        """
        graphs: dict[tuple[int, Hashable], CapturedGraph] = {}
        longest = self.state.tokens.shape[1] - 1
        try:
            buffers = DecodeBuffers(self.state, self.kv_cache.page_size, size, self._fused)
            for length in (longest, 1):  # all rows are the dummy slot: with the longest, they share all of their pages
                padded, _ = buffers.fill(_dummy_step(buffers, length), HostSampling())
                key = self.attention.plan(padded, buffers.inputs)
                if (size, key) not in graphs:
                    graphs[size, key] = self._capture(lambda: self._compute(buffers))
        except torch.OutOfMemoryError:
            if self.num_ranks > 1:
                raise
            logger.warning(
                "too little memory for a CUDA graph of %d rows, so such steps take a larger one or run eagerly; lower "
                "memory_ratio, num_pages or max_graph_batch",
                size,
            )
            return
        self.buffers[size] = buffers
        self.graphs |= graphs

    @torch.inference_mode()
    def run(self, batch: Batch, sampling: HostSampling) -> SampledTokens:
        size = self.size_for(batch)
        if size is None:
            return self._fallback.run(batch, sampling)
        buffers = self.buffers[size]
        in_graph = self.sampler.capturable and sampling.needs_only_temperatures
        padded, stages = buffers.fill(batch, sampling, _EMPTY if in_graph else sampling.pack())
        key = self.attention.plan(padded, buffers.inputs)
        graph = self.graphs.get((size, key))
        if graph is None:
            logits, *sampled = self._compute(buffers)
        else:
            graph.replay()
            logits, *sampled = graph.outputs
        if in_graph:
            return SampledTokens(sampled[0][: batch.num_rows])
        return self._sample(logits[: batch.num_rows], sampling.unpack(stages), buffers.inputs)

    def size_for(self, batch: Batch) -> int | None:
        """Rows of the smallest graph that holds the step; None if it has to run eagerly."""
        if batch.num_decode < batch.num_rows:
            return None
        needed = max(batch.num_rows, -(-len(batch.page_index) // changes_a_row(self.state)))
        return min((size for size in self.buffers if size >= needed), default=None)

    def model_for(self, rows: int) -> Callable[[DeviceBatch], torch.Tensor]:
        """The model, or its decoder for a single row, that computes the logits of a captured step of so many rows."""
        return self._single_row if rows == 1 else self.model

    def _compute(self, buffers: DecodeBuffers) -> Tensors:
        """What is captured: model, sampler (if capturable) and appending the tokens to the token table.

        Returns [B, vocab] logits, and [B] tokens that were sampled with temperatures alone.
        """
        self.state.add_window_locs(buffers.inputs, buffers.inputs.slots)
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


# -- what a graph reads ------------------------------------------------------------------------------------------------

# slots, seq_lens, temperature, key_low, key_high: one int32 each a row; page_index and page_value: `changes_a_row` each
_FIELDS = 5


def changes_a_row(state: DeviceState) -> int:
    """Page-table changes that a captured step has room for, by row: a new page, or with two tables one in each, and one
    that has left the window."""
    return 1 if state.window_table is None else 3


class DecodeBuffers:
    """Inputs of decode steps with B = ``rows`` rows, at addresses that never change.

    Positions, locations and token ids follow from a row's slot and length, so the device derives them from its own
    tables: with ``fused`` in one Triton launch, else in a dozen PyTorch ones.
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
        self._changes = changes_a_row(state)
        self._packed = torch.zeros((_FIELDS + 2 * self._changes, rows), dtype=torch.int32, device=device)
        self._no_stages = self._packed.new_empty(0)
        slots, seq_lens, temperature, *keys = self._packed[:_FIELDS]
        self.page_index, self.page_value = self._packed[_FIELDS:].view(2, -1)
        self.inputs = DeviceBatch(
            input_ids=torch.zeros(rows, dtype=torch.int32, device=device),
            positions=torch.zeros(rows, dtype=torch.int32, device=device),
            out_locs=torch.zeros(rows, dtype=torch.int32, device=device),
            slots=slots,
            seq_lens=seq_lens,
            cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32, device=device),
            page_table=state.page_table,
            window_table=state.window_table,
            window_locs=None if state.window_table is None else torch.zeros(rows, dtype=torch.int32, device=device),
            logit_rows=torch.arange(rows, dtype=torch.int32, device=device),
        )
        # Temperature 0 takes the likeliest token.
        self.sampling = DeviceSampling(random=RandomStage(temperature.view(torch.float32), *keys))

    def fill(self, batch: Batch, sampling: HostSampling, stages: Int32Array = _EMPTY) -> tuple[Batch, torch.Tensor]:
        """Write a step of at most B decode rows into the buffers, with one copy from the host.

        It may have as many page-table changes as rows, or by `changes_a_row` more.

        Of ``sampling`` only the random stage is used; ``stages``, all of it packed, travels in the same copy, to memory
        that no graph reads. Returns the batch padded to B rows, and ``stages`` on the device.
        """
        padded = pad_batch(batch, self.rows, self.dummy_slot)
        pinned = self._packed.is_cuda and len(stages) == 0  # `to_device` pins its own copy
        host = torch.empty(self._packed.shape, dtype=torch.int32, pin_memory=pinned)
        slots, seq_lens, *random = host.numpy()[:_FIELDS]
        page_index, page_value = host.numpy()[_FIELDS:].reshape(2, -1)
        slots[:] = padded.slots
        seq_lens[:] = padded.seq_lens
        # Unused entries write what is there already: the dummy page at the start of the dummy row.
        _put(page_index, batch.page_index, self.dummy_slot * self.state.page_table.shape[1])
        _put(page_value, batch.page_value, self.state.dummy_page)
        for target, values in zip(random, sampling.random or [_EMPTY] * 3, strict=True):
            _put(target, values.view(np.int32), 0)
        if len(stages):
            # Their size differs from step to step, so they go by way of newly allocated memory: a second copy from the
            # host would cost more than one on the device.
            staged = to_device({"step": host.numpy().ravel(), "stages": stages}, self._packed.device)
            self._packed.copy_(staged["step"].view_as(self._packed))
            stages_on_device = staged["stages"]
        else:
            self._packed.copy_(host, non_blocking=True)
            stages_on_device = self._no_stages
        self.derive()
        return padded, stages_on_device

    def derive(self) -> None:
        """Apply the page-table changes, then look up each row's new token and where its KV goes."""
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
        tables.page_tables.view(-1)[self.page_index] = self.page_value
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


def pad_batch(batch: Batch, rows: int, dummy_slot: int) -> Batch:
    """Pad a decode step to ``rows`` rows with one-token rows on the dummy slot, whose tokens are never read."""
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


# -- graphs ------------------------------------------------------------------------------------------------------------

Tensors = tuple[torch.Tensor, ...]


class CapturedGraph(Protocol):
    """Work that can be done again: a `CudaGraph` on a GPU, a `CpuGraph` elsewhere."""

    outputs: Tensors  # where each replay leaves its results

    def replay(self) -> None:
        """Do the work again, with the current contents of its inputs."""
        ...


def capture_all(unit: str, capture: Callable[[int], None], sizes: Sequence[int], device: torch.device) -> None:
    """Capture a graph of each size, counted in ``unit``. Log progress and free memory, and show a bar in a terminal.

    The largest comes first. Memory that the pool got for its intermediate results serves all smaller ones; the other
    way round, each graph would need a little more than the pool has, and the pool would grow every time.
    """
    logged = logger.isEnabledFor(logging.INFO)
    # `disable=None` asks whether stderr is a terminal. That of a rank's process is a pipe to its driver.
    bar = tqdm(sorted(sizes, reverse=True), desc=f"graphs by {unit}", disable=None if logged else True)
    for number, size in enumerate(bar, start=1):
        start = time.perf_counter()
        capture(size)
        if logged:
            bar.clear()  # or the line would begin behind it
            seconds, free = time.perf_counter() - start, free_memory(device) / 1e9
            logger.info("graph %d of %d: %d %s, %.1f s, %.2f GB free", number, len(sizes), size, unit, seconds, free)


# Runs work on inputs whose addresses never change, and captures it: a `CudaGraphCapture`, or the class `CpuGraph`.
GraphCapture = Callable[[Callable[[], Tensors]], CapturedGraph]


@dataclass(slots=True)
class CudaGraph:
    """A captured CUDA graph: the driver's list of kernels, with all of their arguments."""

    graph: torch.cuda.CUDAGraph
    outputs: Tensors

    def replay(self) -> None:
        """Launch all kernels at once."""
        self.graph.replay()


class CudaGraphCapture:
    """Captures CUDA graphs in one memory pool. They can share it because no two of them run at the same time: results
    of a replay stay until the next one, of any of these graphs, begins.

    The work runs once before it is captured, for real: that *warm-up* is no *dry run*, whose results and memory are
    thrown away (`measure_graph_memory`). What the first call of a library allocates, it keeps. Were that captured, it
    would lie in the pool for good and be taken from all other work: the pool would be polluted, and a graph would hold
    an address that the library may free. The warm-up allocates outside of the pool, on the stream of the capture,
    because cuBLAS has a workspace for each stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensors]) -> CudaGraph:
        """Run ``work`` once, after all that the current stream has to do, then capture it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        # At its first call libraries allocate workspaces, Triton compiles, cuBLAS chooses kernels: not to be captured.
        with torch.cuda.stream(self._stream):
            work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            outputs = work()
        torch.cuda.current_stream().wait_stream(self._stream)
        return CudaGraph(graph, tuple(_unowned(output) for output in outputs))


class _Memory:
    """Memory of a GPU, as libraries tell each other."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, whose owner is nobody but the pool. So the next graph that is captured may write there too.

    Logits are by far the largest results. With a buffer for each, those of 21 graphs take over eight times as much.
    """
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    memory = _Memory(tensor.view(bits))
    return torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)


class CpuGraph:
    """Stands for a graph where there is no GPU: a replay calls the work again, and moves its results to ``outputs``."""

    def __init__(self, work: Callable[[], Tensors]) -> None:
        self._work = work
        self.outputs = work()

    def replay(self) -> None:
        """Call the work."""
        for kept, new in zip(self.outputs, self._work(), strict=True):
            kept.copy_(new)


def run_once(work: Callable[[], Tensors]) -> CpuGraph:
    """Run the work instead of capturing it, and keep nothing of it."""
    work()
    return CpuGraph(tuple)


# -- what is captured --------------------------------------------------------------------------------------------------


def build_runner(
    config: EngineConfig, runner: ModelRunner, fusions: Collection[str] = (), capture: GraphCapture | None = None
) -> ModelRunner:
    """Return ``runner``, or on CUDA one that replays its decode steps. Of ``fusions``, those of a single row count.

    ``capture`` is by default one with a memory pool of its own.
    """
    sizes = sizes_to_capture(config, runner)
    if not sizes:
        return runner
    single_row = single_row_decoder(runner, fusions)
    return CudaGraphRunner(runner, sizes, capture or CudaGraphCapture(runner.device), has_triton(), single_row)


def single_row_decoder(runner: ModelRunner, fusions: Collection[str]) -> Callable[[DeviceBatch], torch.Tensor] | None:
    """The decoder for steps of one row that ``fusions`` ask for, if it knows the model; None means the model itself."""
    # Imported here because both need Triton, which not every machine has.
    model, kv_cache = runner.model, runner.kv_cache
    if "persistent" in fusions and kv_cache.k.dtype == kv_cache.dtype:
        from minisgl.models.persistent_decoder import PersistentDecoder

        if PersistentDecoder.supports(model):
            return PersistentDecoder(model, kv_cache)
    if "single-token" in fusions:
        from minisgl.models.single_token import SingleTokenDecoder

        if SingleTokenDecoder.supports(model):
            return SingleTokenDecoder(model, kv_cache)
    return None


_SMALL = (1, 2, 4, 8, 16, 24, 32)
_STRIDE = 16
_MAX_ROWS = 512
_SEGMENT = 2 << 20  # bytes: what PyTorch's allocator asks the driver for at least


def sizes_to_capture(config: EngineConfig, runner: ModelRunner) -> tuple[int, ...]:
    """Numbers of rows to capture. None without CUDA, with ``enforce_eager``, or where attention or a layer cannot."""
    capturable = runner.attention.capturable and all(
        getattr(module, "capturable", True) for module in runner.model.modules()
    )
    if runner.device.type != "cuda" or config.enforce_eager or not capturable:
        return ()
    return config.graph_batches or graph_sizes(config.max_graph_batch or min(config.max_running_requests, _MAX_ROWS))


def graph_sizes(largest: int) -> tuple[int, ...]:
    """Numbers of rows to capture, ascending, so that every number up to ``largest`` has one that is not much larger."""
    # The time of small steps depends on each row. Above 32, up to 15 padding rows cost next to nothing: the matrix
    # kernels work in tiles of 64 rows and more.
    sizes = {*_SMALL, *range(_SMALL[-1] + _STRIDE, largest, _STRIDE), largest}
    return tuple(sorted(size for size in sizes if size <= largest))


def measure_graph_memory(runner: ModelRunner, sizes: Sequence[int]) -> int:
    """Bytes that graphs of these numbers of rows will keep on the device; 0 for no sizes.

    Captures the two largest on trial, and assumes that each further one adds as much as the second.
    """
    if not sizes:
        return 0
    trial = CudaGraphRunner(runner, (), CudaGraphCapture(runner.device), has_triton())
    return extrapolate_memory(trial.capture, sizes, runner.device)


def extrapolate_memory(capture: Callable[[int], None], sizes: Sequence[int], device: torch.device) -> int:
    """Bytes that the graphs of all sizes keep, judged by what the two largest take; for each at least a `_SEGMENT`."""
    costs: list[int] = []
    torch.cuda.empty_cache()
    for size in sorted(sizes, reverse=True)[:2]:
        before = free_memory(device)
        capture(size)
        torch.cuda.empty_cache()
        costs.append(before - free_memory(device))
    return costs[0] + max(costs[-1], _SEGMENT) * (len(sizes) - 1)
