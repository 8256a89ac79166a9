"""Prefill and mixed steps as CUDA graphs: the runner that replays them, padded to the next number of tokens.

A prefill step of a few hundred tokens is bound by its launches: the host needs longer to send three hundred kernels
than the device to compute them. A graph sends them at once. It has a fixed number of tokens, and the lengths of the
rows are data: rows past the end of the step have no tokens, and attention finds that out on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import cast

import numpy as np
import torch

from minisgl.batch import ALIGNMENT, Batch, DeviceBatch, batch_arrays, build_batch
from minisgl.config import EngineConfig
from minisgl.context import ForwardContext, forward_context
from minisgl.engine.cuda_graph import (
    CapturedGraph,
    CudaGraphCapture,
    GraphCapture,
    capture_all,
    extrapolate_memory,
    sizes_to_capture,
)
from minisgl.engine.device_state import DeviceState
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.sampler import SampledTokens
from minisgl.engine.sampling import HostSampling
from minisgl.models.decoder import CausalLM
from minisgl.request import Int32Array

logger = logging.getLogger(__name__)


class PrefillGraphRunner(ModelRunner):
    """Replays steps that have prefill rows, padded to the next of ``sizes`` (tokens); runs others as a `ModelRunner`.

    A graph ends before the LM head, which runs eagerly for the rows that sample: there are few of them, and logits of
    every graph would take memory. Unless ``mixed``, none is captured for steps with decode rows beside prefill rows.
    """

    def __init__(self, runner: ModelRunner, sizes: Sequence[int], capture: GraphCapture, mixed: bool = True) -> None:
        super().__init__(runner.model, runner.kv_cache, runner.attention, runner.state, runner.sampler)
        self._capture = capture
        self._mixed = mixed
        self.buffers: dict[int, StepBuffers] = {}  # by number of tokens
        # By number of tokens, and the attention backend's name for the work of the step.
        self.graphs: dict[tuple[int, Hashable], CapturedGraph] = {}
        capture_all("tokens", self.capture, sizes, self.device)

    @torch.inference_mode()
    def capture(self, size: int) -> None:
        """Capture steps of ``size`` tokens, one for each name that the attention backend has for such steps.

        A size for which there is too little memory goes without, and its steps take a larger graph or run eagerly; with
        several ranks it is an error.
        """
        graphs: dict[tuple[int, Hashable], CapturedGraph] = {}
        try:
            buffers = self.make_buffers(size)
            for batch in self.dummy_steps(buffers):
                buffers.load(torch.from_numpy(buffers.pack(batch)))
                key = self.attention.plan(batch, buffers.inputs)
                if not (self.graphs or graphs):  # layers that have attended may have told the backend what to plan for
                    self._compute(buffers)
                    key = self.attention.plan(batch, buffers.inputs)
                if (size, key) not in graphs:
                    graphs[size, key] = self._capture(lambda: (self._compute(buffers),))
        except torch.OutOfMemoryError:
            if self.num_ranks > 1:
                raise
            logger.warning(
                "too little memory for a CUDA graph of %d tokens, so larger steps run eagerly; lower memory_ratio, "
                "num_pages or max_graph_tokens (num_draft_tokens for steps with drafts)",
                size,
            )
            return
        self.buffers[size] = buffers
        self.graphs |= graphs

    @torch.inference_mode()
    def run(self, batch: Batch, sampling: HostSampling) -> SampledTokens:
        size = self.size_for(batch)
        if size is None:
            return self.run_eagerly(batch, sampling)
        buffers, arrays = self.buffers[size], batch_arrays(batch)
        sample = {name: arrays[name] for name in ("sample_slots", "sample_positions")}
        staged = self.stage(batch, sampling, {"step": buffers.pack(batch), **sample})
        buffers.load(staged["step"])
        key = self.attention.plan(batch, buffers.inputs)
        graph = self.graphs.get((size, key))
        if graph is None:
            hidden = self._compute(buffers)
        else:
            graph.replay()
            hidden = graph.outputs[0]
        logits = self._model.logits(hidden[: len(batch.sample_rows)])
        return self.sample(logits, sampling, staged)

    def size_for(self, batch: Batch) -> int | None:
        """Tokens of the smallest graph that holds the step; None if it has to run eagerly."""
        if batch.num_decode == batch.num_rows or len(batch.drafts):
            return None
        return min((size for size in self.buffers if size >= batch.num_tokens), default=None)

    def run_eagerly(self, batch: Batch, sampling: HostSampling) -> SampledTokens:
        """Run a step for which there is no graph."""
        return super().run(batch, sampling)

    def make_buffers(self, size: int) -> StepBuffers:
        """Inputs of steps of ``size`` tokens."""
        return StepBuffers(self.state, self.kv_cache.page_size, size)

    def dummy_steps(self, buffers: StepBuffers) -> Iterator[Batch]:
        """Steps over the dummy slot, one for each graph that a size may need."""
        return _dummy_steps(buffers, self._mixed)

    @property
    def _model(self) -> CausalLM:
        return cast(CausalLM, self.model)

    def _compute(self, buffers: StepBuffers) -> torch.Tensor:
        """What is captured: hidden states of the rows that sample, [min(tokens, slots), hidden_size]."""
        buffers.look_up_tokens()
        with forward_context(ForwardContext(buffers.inputs, self.attention)):
            return self._model.hidden_states(buffers.inputs)


class StepBuffers:
    """Inputs of steps of at most ``tokens`` tokens, at addresses that never change.

    With ``verified_rows``, of steps with so many rows at most, which sample behind each of their tokens.
    """

    def __init__(self, state: DeviceState, page_size: int, tokens: int, verified_rows: int | None = None) -> None:
        self.state = state
        self.page_size = page_size
        self.dummy_slot = len(state.tokens) - 1
        rows = (verified_rows or min(tokens, self.dummy_slot)) + 1  # the last one is empty
        self._sizes = {
            "slots": rows,
            "seq_lens": rows,
            "cu_seqlens_q": rows + 1,
            "positions": tokens,
            "token_slots": tokens,
            "out_locs": tokens,
            "logit_rows": tokens if verified_rows else rows - 1,
        }
        # What is behind the end of a step: tokens that are stored on the dummy page, and rows without any.
        self._padding = {"slots": self.dummy_slot, "token_slots": self.dummy_slot}
        self._padding["out_locs"] = state.dummy_page * page_size
        ends = np.cumsum([-(-size // ALIGNMENT) * ALIGNMENT for size in self._sizes.values()]).tolist()
        self._begins = dict(zip(self._sizes, [0, *ends], strict=False))
        self._packed = torch.zeros(ends[-1], dtype=torch.int32, device=state.tokens.device)
        parts = {name: self._packed[begin : begin + self._sizes[name]] for name, begin in self._begins.items()}
        self._token_slots = parts.pop("token_slots")
        input_ids = torch.zeros(tokens, dtype=torch.int32, device=state.tokens.device)
        self.inputs = DeviceBatch(
            input_ids=input_ids,
            page_table=state.page_table,
            window_table=state.window_table,
            window_locs=None if state.window_table is None else torch.zeros_like(input_ids),
            padded=True,
            verifies=verified_rows is not None,
            **parts,
        )

    def pack(self, batch: Batch) -> Int32Array:
        """The arrays of a step, each padded, one after the other."""
        packed = np.zeros(len(self._packed), dtype=np.int32)
        arrays: Mapping[str, Int32Array] = batch_arrays(batch)
        for name, begin in self._begins.items():
            middle, end = begin + len(arrays[name]), begin + self._sizes[name]
            packed[begin:middle] = arrays[name]
            packed[middle:end] = batch.num_tokens if name == "cu_seqlens_q" else self._padding.get(name, 0)
        return packed

    def load(self, packed: torch.Tensor) -> None:
        """Make the inputs those of a step that was packed."""
        self._packed.copy_(packed)

    def look_up_tokens(self) -> None:
        """Fill in the tokens to feed from the token table, and where layers with a page table of their own store."""
        self.inputs.input_ids.copy_(self.state.input_ids(self._token_slots, self.inputs.positions))
        self.state.add_window_locs(self.inputs, self._token_slots)


def _dummy_steps(buffers: StepBuffers, mixed: bool) -> Iterator[Batch]:
    """Steps over the dummy slot that differ in all that a graph may depend on: the length of rows, and decode rows."""
    tokens, longest = len(buffers.inputs.positions), buffers.state.tokens.shape[1] - 1
    most_rows = len(buffers.inputs.slots) - 1
    long = min(tokens, longest)
    short = min(-(-tokens // most_rows) + 16, long)
    for q_len in dict.fromkeys((long, short)):
        rows = min(tokens // q_len, most_rows)
        yield dummy_step(buffers, [q_len] * rows, num_decode=0)
        if mixed and most_rows > 1 and tokens > 1:
            beside = [q_len] * min(rows - 1, most_rows - 2)
            yield dummy_step(buffers, [1, *beside, q_len - 1 or 1], num_decode=1)


def dummy_step(buffers: StepBuffers, q_lens: list[int], num_decode: int) -> Batch:
    """A step of rows of these lengths on the dummy slot."""
    rows = np.arange(len(q_lens), dtype=np.int32)
    return build_batch(
        slots=np.full(len(q_lens), buffers.dummy_slot, dtype=np.int32),
        q_lens=np.array(q_lens, dtype=np.int32),
        kv_lens=np.zeros(len(q_lens), dtype=np.int32),
        page_table=np.full((buffers.dummy_slot + 1, max(q_lens)), buffers.state.dummy_page, dtype=np.int32),
        page_size=buffers.page_size,
        sample_rows=rows,
        output_index=np.zeros(len(q_lens), dtype=np.int32),
        num_decode=num_decode,
    )


# -- what is captured --------------------------------------------------------------------------------------------------

_MAX_TOKENS = 8192
_SEPARATE = ("prefill-first", "static")  # batch policies whose steps never have decode rows beside prefill rows


def build_prefill_runner(config: EngineConfig, runner: ModelRunner, capture: GraphCapture) -> ModelRunner:
    """Return ``runner``, or one that replays its prefill and mixed steps where they can be captured."""
    sizes = tokens_to_capture(config, runner)
    return PrefillGraphRunner(runner, sizes, capture, mixes(config)) if sizes else runner


def mixes(config: EngineConfig) -> bool:
    """Whether steps may have decode rows beside prefill rows."""
    return config.batch_policy not in _SEPARATE


def tokens_to_capture(config: EngineConfig, runner: ModelRunner) -> tuple[int, ...]:
    """Numbers of tokens to capture; none where decode steps cannot be captured, or attention to prefill rows cannot."""
    if config.max_graph_tokens == 0 or not sizes_to_capture(config, runner):
        return ()
    if not (runner.attention.captures_prefill and isinstance(runner.model, CausalLM)):
        return ()
    slots, width = runner.state.tokens.shape
    return token_sizes(config.max_graph_tokens or min(config.max_prefill_tokens, _MAX_TOKENS, (slots - 1) * width))


def measure_prefill_memory(config: EngineConfig, runner: ModelRunner) -> int:
    """Bytes that the graphs of prefill and mixed steps will keep on the device."""
    sizes = tokens_to_capture(config, runner)
    if not sizes:
        return 0
    trial = PrefillGraphRunner(runner, (), CudaGraphCapture(runner.device), mixes(config))
    return extrapolate_memory(trial.capture, sizes, runner.device)


def token_sizes(largest: int) -> tuple[int, ...]:
    """Numbers of tokens to capture, ascending, so that every number up to ``largest`` has one not much larger.

    Up to 256 tokens a step takes as long as it takes to read the weights, on most GPUs; above, its time grows with the
    tokens, so there are four sizes between one power of two and the next.
    """
    sizes = {64, 128, largest}
    size = 256
    while size < largest:
        sizes |= {size + quarter * size // 4 for quarter in range(4)}
        size *= 2
    return tuple(sorted(each for each in sizes if each <= largest))
