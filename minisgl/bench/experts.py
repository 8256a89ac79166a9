"""Experts in the shape of Qwen3-30B-A3B: grouped products beside the plain layer and the hardware's limit."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from minisgl.bench.gpu_timing import Call, buffers_needed, eager_microseconds, microseconds
from minisgl.bench.report import Cell, Table
from minisgl.layers import Experts
from minisgl.layers.fused import FusedExperts

NUM_EXPERTS, TOP_K, HIDDEN_SIZE, INTERMEDIATE_SIZE = 128, 8, 2048, 768
_DTYPE = torch.bfloat16
_DEVICE = torch.device("cuda")
_SQUARE = 8192


def experts_table(tokens: tuple[int, ...], bandwidth: float, repeat: int) -> Table:
    """Time of one layer's experts, its router left out, with experts chosen at random.

    The limit is the longer of two times: for reading the weights of all experts that are chosen, and for multiplying.
    The plain layer waits for the device, so it is launched kernel by kernel; its launches and its wait are part of it.

    Args:
        tokens: numbers of tokens a step.
        bandwidth: bytes a second that a copy moves.
        repeat: measurements of each, of which the fastest counts.
    """
    plain = Experts(NUM_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_SIZE).to(_DEVICE, _DTYPE)
    for parameter in plain.parameters():
        parameter.normal_(std=0.02)
    fused = FusedExperts(plain)
    flops_per_second = _matrix_speed()
    rows: list[list[Cell]] = []
    for count in tokens:
        inputs = list(_inputs(count))
        touched = int(inputs[0][1].unique().numel()) * 3 * HIDDEN_SIZE * INTERMEDIATE_SIZE * _DTYPE.itemsize
        flops = count * TOP_K * 2 * 3 * HIDDEN_SIZE * INTERMEDIATE_SIZE
        limit = max(touched / bandwidth, flops / flops_per_second) * 1e6
        fused_calls = [_bind(fused, each) for each in inputs]
        plain_calls = [_bind(plain, each) for each in inputs]
        fused_time = min(microseconds(fused_calls) for _ in range(repeat))
        plain_time = min(eager_microseconds(plain_calls) for _ in range(repeat))
        rows.append([count, touched / 1e6, limit, fused_time, plain_time])
    speeds = f"{bandwidth / 1e12:.2f} TB/s, {flops_per_second / 1e12:.0f} TFLOP/s"
    return Table(
        f"{TOP_K} of {NUM_EXPERTS} experts a token, µs, and the limit at {speeds}",
        ["tokens", "MB of weights", "limit", "fused", "plain"],
        rows,
    )


def _inputs(tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Tokens, experts and weights; so many times that the weights of one are out of the cache when they come again."""
    one_expert = 3 * HIDDEN_SIZE * INTERMEDIATE_SIZE * _DTYPE.itemsize
    for _ in range(buffers_needed(min(tokens * TOP_K, NUM_EXPERTS) * one_expert)):
        x = torch.randn(tokens, HIDDEN_SIZE, dtype=_DTYPE, device=_DEVICE)
        probs = torch.randn(tokens, NUM_EXPERTS, device=_DEVICE).softmax(-1)
        weights, experts = probs.topk(TOP_K)
        yield x, experts, weights.to(_DTYPE)


def _matrix_speed() -> float:
    """Operations a second in a product of two large random matrices."""
    left, right = (torch.randn(_SQUARE, _SQUARE, dtype=_DTYPE, device=_DEVICE) for _ in range(2))
    return 2 * _SQUARE**3 / (microseconds([lambda: left @ right]) * 1e-6)


def _bind(layer: Experts, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Call:
    return lambda: layer(*inputs)
