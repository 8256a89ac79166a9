"""The least time that a step takes: its bytes at the memory's speed, or its operations at the arithmetic's.

The roofline model of Williams, Waterman and Patterson (2009), with a fixed cost for each kernel added.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl.batch import Batch
from minisgl.errors import ConfigError
from minisgl.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes to move (each once), floating-point operations, and the number of kernels that do it."""

    name: str
    bytes: int
    flops: int
    kernels: int = 0

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """A device in three numbers."""

    name: str  # of the device
    bytes_per_second: float  # that a copy moves, reads and writes added up
    flops_per_second: float  # of a large matrix product
    kernel_seconds: float = 0.0  # beyond bytes and operations: to start a kernel, to fill the device and drain it

    @property
    def ridge(self) -> float:
        """Operations per byte at which moving and computing take equally long."""
        return self.flops_per_second / self.bytes_per_second

    def seconds(self, work: Work) -> float:
        """The longer of moving and computing, plus the cost of the kernels."""
        longest = max(work.bytes / self.bytes_per_second, work.flops / self.flops_per_second)
        return longest + work.kernels * self.kernel_seconds


H200 = Machine("NVIDIA H200", 4.3e12, 790e12)  # in bfloat16, as the benchmarks measure a large copy and matrix product


def step_work(model: ModelConfig, batch: Batch, kv_tokens: int | None = None) -> tuple[Work, Work, Work]:
    """The work of one step of a dense decoder: the layers' matrices, attention, and the scores of the vocabulary.

    Weights are counted once, keys and values once for each row, activations not at all. A layer is ten kernels: two
    norms, four products, one activation, one that rotates and stores, and attention in two parts.

    Every row reads the keys and values of its whole sequence, unless ``kv_tokens`` counts the positions that are read.
    """
    if model.moe is not None:
        raise ConfigError("model: the work of a mixture depends on which experts are chosen; use a dense model")
    width, layers = model.dtype.itemsize, model.num_layers
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    weights = layers * model.hidden_size * (2 * heads + 2 * kv_heads + 3 * model.intermediate_size)
    vocabulary = model.vocab_size * model.hidden_size
    fed = batch.q_lens.astype(np.int64)
    seen = int((fed * (batch.seq_lens - fed) + fed * (fed + 1) // 2).sum())
    kv_tokens = int(batch.seq_lens.sum()) if kv_tokens is None else kv_tokens
    return (
        Work("matrices", weights * width, 2 * weights * batch.num_tokens, 8 * layers),
        Work("attention", 2 * layers * kv_heads * width * kv_tokens, 4 * layers * heads * seen, 2 * layers),
        Work("scores", vocabulary * width, 2 * vocabulary * len(batch.sample_rows), 2),
    )
