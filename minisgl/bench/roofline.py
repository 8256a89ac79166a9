"""What a step takes at least: its bytes at the memory's speed or its operations at the arithmetic's, part by part.

The model is the roofline of Williams, Waterman and Patterson (2009), with one more number for what small kernels cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl.core.batch import Batch
from minisgl.errors import ConfigError
from minisgl.models import ModelConfig


@dataclass(frozen=True, slots=True)
class Work:
    """Something that a device has to do.

    Args:
        name: what it is.
        bytes: that must be moved, each once.
        flops: multiplications and additions.
        kernels: it is done in.
    """

    name: str
    bytes: int
    flops: int
    kernels: int = 0

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / self.bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """A device in three numbers.

    Args:
        name: of the device.
        bytes_per_second: that a copy moves, read and written ones added up.
        flops_per_second: of a large matrix product.
        kernel_seconds: that a kernel takes beyond its bytes and operations: to start, to fill the device and drain it.
    """

    name: str
    bytes_per_second: float
    flops_per_second: float
    kernel_seconds: float = 0.0

    @property
    def ridge(self) -> float:
        """Operations a byte at which moving and computing take equally long."""
        return self.flops_per_second / self.bytes_per_second

    def seconds(self, work: Work) -> float:
        """The longer of moving and computing, and what the kernels cost on top."""
        longest = max(work.bytes / self.bytes_per_second, work.flops / self.flops_per_second)
        return longest + work.kernels * self.kernel_seconds


H200 = Machine("NVIDIA H200", 4.3e12, 790e12)
"""In bfloat16: a large copy, as the benchmarks measure it, and a large matrix product."""


def step_work(model: ModelConfig, batch: Batch, kv_tokens: int | None = None) -> tuple[Work, Work, Work]:
    """The work of one step of a dense decoder: its layers' matrices, attention, and the scores of the vocabulary.

    Weights are counted once, keys and values of each row once, and activations not at all. A layer is ten kernels:
    two norms, four products, one activation, one that rotates and stores, and attention in two parts.

    Args:
        model: its shapes; every layer sees the whole sequence.
        batch: the step.
        kv_tokens: positions whose keys and values are read; by default every row reads all of its own.

    Raises:
        ConfigError: the model has experts, of which a step reads as many as its tokens happen to choose.
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
