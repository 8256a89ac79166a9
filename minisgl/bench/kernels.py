"""What each fused kernel buys: beside the memory's speed, plain PyTorch and torch.compile; alone, and in a layer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch._inductor.exc import InductorError

from minisgl.bench.experts import experts_table
from minisgl.bench.gpu_timing import Call, buffers_needed, copy_bandwidth, microseconds
from minisgl.bench.layer_stack import StackShape, layer_table
from minisgl.bench.report import Cell, Report, Table, Target
from minisgl.core import AttentionSpec
from minisgl.engine.logits_processors import keep_top, softmax_weights
from minisgl.engine.random import draw
from minisgl.engine.sampling_stages import RandomStage, TopStage
from minisgl.errors import ConfigError
from minisgl.kernels.activation import silu_and_mul
from minisgl.kernels.norm import add_and_norm
from minisgl.kernels.rope import rotate_and_store
from minisgl.kernels.sampling import sample_tokens
from minisgl.kernels.threshold import find_thresholds
from minisgl.kvcache.kv_cache import KVCache
from minisgl.layers import Attention, RMSNorm, RopeSettings, Rotary, rotate
from minisgl.layers import silu_and_mul as plain_silu_and_mul

SHAPES = (StackShape("0.6B", 1024, 16, 8, 3072), StackShape("14B", 5120, 40, 8, 17408))
"""Those of Qwen3."""
_VOCAB = 151_936
_HEAD_DIM = 128
_EPS = 1e-6
_DTYPE = torch.bfloat16
_DEVICE = torch.device("cuda")
_ONE_PASS = 0.75
"""Share of the copy bandwidth that a kernel of one pass over a large tensor should reach."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel on one shape.

    Args:
        kernel: its name.
        shape: in words.
        bytes_moved: everything that must be read once and written once.
        calls: makes fresh random inputs, and returns the fused and the plain call on them.
    """

    kernel: str
    shape: str
    bytes_moved: int
    calls: Callable[[], tuple[Call, Callable[..., object], tuple[object, ...]]]


def run_kernels(tokens: tuple[int, ...], repeat: int) -> Report:
    """Every kernel on the shapes of two models, the experts of a third, then whole decoder layers.

    Args:
        tokens: numbers of tokens a step.
        repeat: measurements of each, of which the fastest counts.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("kernels: times of GPU kernels need a CUDA device, and there is none here")
    with torch.inference_mode():
        bandwidth = copy_bandwidth()
        rows = [_measure(case, bandwidth, repeat) for case in _cases(tokens)]
        experts = experts_table(tokens, bandwidth, repeat)
        layers = [layer_table(shape, count, repeat) for shape in SHAPES for count in tokens if count <= 256]
    columns = ["kernel", "shape", "MB", "copied", "fused", "plain", "compiled"]
    largest = [row for row in rows if isinstance(row[2], float) and row[2] > 200]
    reached = min((float(row[3]) / float(row[4]) for row in largest), default=0.0)
    return Report(
        "kernels",
        {"tokens": list(tokens), "repeat": repeat, "dtype": "bfloat16", "copy_bytes_per_second": bandwidth},
        [
            Table(f"one kernel, µs, and these bytes copied at {bandwidth / 1e12:.2f} TB/s", columns, rows),
            experts,
            *layers,
        ],
        [Target("slowest kernel over 200 MB, share of copy speed", reached, _ONE_PASS, at_least=True)],
    )


def _measure(case: Case, bandwidth: float, repeat: int) -> list[Cell]:
    torch._dynamo.reset()
    inputs = [case.calls() for _ in range(buffers_needed(case.bytes_moved))]
    compiled = torch.compile(inputs[0][1], dynamic=False)

    def fastest(calls: list[Call]) -> float:
        return min(microseconds(calls) for _ in range(repeat))

    return [
        case.kernel,
        case.shape,
        case.bytes_moved / 1e6,
        case.bytes_moved / bandwidth * 1e6,
        fastest([fused for fused, _, _ in inputs]),
        fastest([_bind(plain, arguments) for _, plain, arguments in inputs]),
        "fails" if _fails(compiled, inputs[0][2]) else fastest([_bind(compiled, args) for _, _, args in inputs]),
    ]


def _fails(compiled: Callable[..., object], arguments: tuple[object, ...]) -> bool:
    """Whether torch.compile has no code for it: that of PyTorch 2.11 fails on some running sums over a vocabulary."""
    allowed = logging.root.manager.disable
    logging.disable()  # a failure is an answer here, and no news for a reader of the notebook
    try:
        compiled(*arguments)
    except InductorError:
        return True
    finally:
        logging.disable(allowed)
    return False


def _bind(function: Callable[..., object], arguments: tuple[object, ...]) -> Call:
    return lambda: function(*arguments)


def _cases(tokens: tuple[int, ...]) -> Iterator[Case]:
    for shape in SHAPES:
        for count in tokens:
            yield _norm(shape, count)
            yield _rope(shape, count)
            yield _activation(shape, count)
    for rows in (count for count in tokens if count <= 256):
        yield _sampling(rows, temperature=0.0)
        yield _sampling(rows, temperature=1.0)
        yield _top_sampling(rows, top_k=50)
        yield _top_sampling(rows, top_k=_VOCAB)


def _random(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=_DTYPE, device=_DEVICE)


def _integers(low: int, high: int, *size: int) -> torch.Tensor:
    return torch.randint(low, high, size, dtype=torch.int32, device=_DEVICE)


def _norm(shape: StackShape, tokens: int) -> Case:
    def calls() -> tuple[Call, Callable[..., object], tuple[object, ...]]:
        norm = RMSNorm(shape.hidden_size, _EPS).to(_DEVICE, _DTYPE)
        norm.weight.fill_(1.0)
        x, residual = _random(tokens, shape.hidden_size), _random(tokens, shape.hidden_size)
        return lambda: add_and_norm(x, residual, norm.weight, _EPS), norm.add_and_norm, (x, residual)

    moved = 4 * tokens * shape.hidden_size * _DTYPE.itemsize
    return Case("add + RMSNorm", f"{tokens} × {shape.hidden_size}", moved, calls)


def _rope(shape: StackShape, tokens: int) -> Case:
    num_heads, num_kv_heads = shape.num_heads, shape.num_kv_heads

    def calls() -> tuple[Call, Callable[..., object], tuple[object, ...]]:
        spec = AttentionSpec(0, num_heads, num_kv_heads, _HEAD_DIM, 1.0)
        layer = Attention(1, spec, qk_norm_eps=_EPS).to(_DEVICE, _DTYPE)
        for norm in (layer.q_norm, layer.k_norm):
            assert norm is not None
            norm.weight.fill_(1.0)
        rotary = Rotary(_HEAD_DIM, 4096, RopeSettings()).to(_DEVICE)
        cache = KVCache(1, num_kv_heads, _HEAD_DIM, tokens, 1, _DTYPE, _DEVICE)
        qkv = _random(tokens, (num_heads + 2 * num_kv_heads) * _HEAD_DIM)
        positions = _integers(0, 4096, tokens)
        locations = torch.randperm(tokens, device=_DEVICE).int()
        rotation = rotary(positions, _DTYPE)

        def plain(qkv: torch.Tensor) -> torch.Tensor:
            heads = qkv.view(tokens, -1, _HEAD_DIM)
            qk = rotate(layer.normalize(heads[:, : num_heads + num_kv_heads]), rotation)
            cache.store(0, qk[:, num_heads:], heads[:, num_heads + num_kv_heads :], locations)
            return qk[:, :num_heads]

        def fused() -> torch.Tensor:
            k, v = cache.k[0], cache.v[0]
            q_norm, k_norm = (None if norm is None else norm.weight for norm in (layer.q_norm, layer.k_norm))
            return rotate_and_store(qkv, rotary.table, positions, locations, k, v, q_norm, k_norm, _EPS)

        return fused, plain, (qkv,)

    moved = 2 * tokens * (num_heads + 2 * num_kv_heads) * _HEAD_DIM * _DTYPE.itemsize
    return Case("RoPE + store", f"{tokens} × {num_heads + 2 * num_kv_heads} heads", moved, calls)


def _activation(shape: StackShape, tokens: int) -> Case:
    def calls() -> tuple[Call, Callable[..., object], tuple[object, ...]]:
        gate_up = _random(tokens, 2 * shape.intermediate_size)
        return lambda: silu_and_mul(gate_up), plain_silu_and_mul, (gate_up,)

    moved = 3 * tokens * shape.intermediate_size * _DTYPE.itemsize
    return Case("SiLU·mul", f"{tokens} × {shape.intermediate_size}", moved, calls)


def _sampling(rows: int, temperature: float) -> Case:
    def calls() -> tuple[Call, Callable[..., object], tuple[object, ...]]:
        logits, out = _random(rows, _VOCAB), torch.empty(rows, dtype=torch.int32, device=_DEVICE)
        keys = _integers(-(2**31), 2**31, 2, rows)
        stage = RandomStage(torch.full((rows,), temperature, device=_DEVICE), *keys) if temperature else None

        def plain(logits: torch.Tensor) -> torch.Tensor:
            if stage is None:
                return logits.argmax(-1)
            wide = logits.float()
            weights = ((wide - wide.amax(-1, keepdim=True)) / stage.temperature.unsqueeze(-1)).exp()
            return draw(weights, stage.key_low, stage.key_high)

        return lambda: sample_tokens(logits, stage, out), plain, (logits,)

    name = "random sample" if temperature else "greedy sample"
    return Case(name, f"{rows} × {_VOCAB}", rows * _VOCAB * _DTYPE.itemsize, calls)


def _top_sampling(rows: int, top_k: int) -> Case:
    """Top-p 0.9 of what top-k leaves, in every row.

    Logits are read from memory twice: once for the maxima of the chunks, once by the draw. In between one program a row
    searches. With top-k 50 it makes about ten passes over 50 chunks of 128 tokens, predicted for an H200: 40 µs in all
    for one row and 130 for 256. Without top-k, logits as flat as these are the worst case: top-p leaves three fifths of
    the vocabulary, and about six passes take the whole row, 55 µs each; predicted: 350 µs for one row and 750 for 256.
    """

    def calls() -> tuple[Call, Callable[..., object], tuple[object, ...]]:
        logits, out = _random(rows, _VOCAB), torch.empty(rows, dtype=torch.int32, device=_DEVICE)
        stage = RandomStage(torch.ones(rows, device=_DEVICE), *_integers(-(2**31), 2**31, 2, rows))
        of_rows = torch.arange(rows, dtype=torch.int32, device=_DEVICE)
        top = TopStage(of_rows, torch.full_like(of_rows, top_k), torch.full((rows,), 0.9, device=_DEVICE), top_k)

        def fused() -> None:
            sample_tokens(logits, stage, out, find_thresholds(logits, stage.temperature, top[:3], None))

        def plain(logits: torch.Tensor) -> torch.Tensor:
            wide = logits.float()
            weights = keep_top(softmax_weights(wide, stage.temperature), wide, top)
            return draw(weights, stage.key_low, stage.key_high)

        return fused, plain, (logits,)

    name = "top-p sample" if top_k == _VOCAB else f"top-k {top_k}, top-p sample"
    return Case(name, f"{rows} × {_VOCAB}", rows * _VOCAB * _DTYPE.itemsize, calls)
