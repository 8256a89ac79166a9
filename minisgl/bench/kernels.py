"""What each fused kernel buys: beside the memory's speed, plain PyTorch and torch.compile; alone, and in a layer."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._inductor.exc import InductorError

from minisgl.attention.torch_backend import PagedAttention
from minisgl.batch import Batch, DeviceBatch
from minisgl.bench import gpu
from minisgl.bench.report import Cell, Report, Table
from minisgl.bench.workloads import FOR_ONE_GPU, model_dir
from minisgl.context import AttentionSpec, ForwardContext, forward_context
from minisgl.engine.logits_processors import keep_top, softmax_weights
from minisgl.engine.random import draw
from minisgl.engine.sampling import RandomStage, TopStage
from minisgl.kernels.norm import add_and_norm, silu_and_mul
from minisgl.kernels.rope import rotate_and_store
from minisgl.kernels.sampling import sample_tokens
from minisgl.kernels.top_p import find_thresholds
from minisgl.kvcache.pool import KVCache
from minisgl.layers.attention import Attention
from minisgl.layers.fused import FusedExperts
from minisgl.layers.mlp import Experts
from minisgl.layers.mlp import silu_and_mul as plain_silu_and_mul
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import RopeSettings, Rotary, rotate
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import CausalLM, Decoder
from minisgl.models.fusions import LAYER_FUSIONS, compile_layers, fuse_layers
from minisgl.models.loader import load_model

_VOCAB = 151_936
_HEAD_DIM = 128
_EPS = 1e-6
_DTYPE = torch.bfloat16
_DEVICE = torch.device("cuda")
_SAMPLES = (
    ("greedy sample", 0.0, None),
    ("random sample", 1.0, None),
    ("top-k 50, top-p sample", 1.0, 50),
    ("top-p sample", 1.0, _VOCAB),
)
"""Names, temperatures, and top-k beside a top-p of 0.9."""
_ONE_PASS = 0.75  # share of the copy bandwidth that a kernel of one pass over a large tensor should reach
_NUM_EXPERTS, _TOP_K, _EXPERTS_HIDDEN, _EXPERTS_INTERMEDIATE = 128, 8, 2048, 768  # of Qwen3-30B-A3B
_EXPERT_WEIGHTS = 3 * _EXPERTS_HIDDEN * _EXPERTS_INTERMEDIATE
_SQUARE = 8192
_LAYERS = 4
_FUSIONS = tuple(name for name in LAYER_FUSIONS if name != "experts")  # these layers have none

Plain = Callable[..., object]
Calls = tuple[gpu.Call, Plain, tuple[object, ...]]  # fused on fresh random inputs; the plain function, its arguments

KernelCase = tuple[str, str, int, Callable[[], Calls]]
"""One kernel on one shape: both in words, the elements that must be read or written, and what makes the calls."""


def run_kernels(tokens: Sequence[int] = (1, 256, 8192), repeat: int = 3) -> Report:
    """Every kernel on the shapes of two models, the experts of a third, then whole decoder layers."""
    gpu.require_cuda("kernels")
    with torch.inference_mode():
        bandwidth = gpu.copy_bandwidth()
        report = Report("kernels", {"dtype": "bfloat16", "copy_bytes_per_second": bandwidth})
        title = f"one kernel, µs, and these bytes copied at {bandwidth / 1e12:.2f} TB/s"
        table = report.table(title, "kernel", "shape", "MB", "copied", "fused", "plain", "compiled")
        configs = _configs()
        for kernel, shape, elements, make in _cases(configs.values(), tokens):
            table.add(kernel, shape, *_measure(elements * _DTYPE.itemsize, make, bandwidth, repeat))
        report.tables.append(_experts_table(tokens, bandwidth, repeat))
        for name, config in configs.items():
            report.tables += [_layer_table(name, config, count, repeat) for count in tokens if count <= 256]
    reached = min((float(row[3]) / float(row[4]) for row in table.rows if float(row[2]) > 200), default=0.0)
    report.target("slowest kernel over 200 MB, share of copy speed", reached, _ONE_PASS, at_least=True)
    return report


def _configs() -> dict[str, ModelConfig]:
    """Stacks of a few layers of both models, with a small vocabulary."""
    small: dict[str, Any] = {"num_layers": _LAYERS, "sliding_windows": (None,) * _LAYERS, "vocab_size": 1024}
    small |= {"max_position_embeddings": 4096, "tie_word_embeddings": True}
    with tempfile.TemporaryDirectory() as root:
        return {name: replace(ModelConfig.from_dir(model_dir(name, Path(root))), **small) for name in FOR_ONE_GPU}


def _measure(bytes_moved: int, make: Callable[[], Calls], bandwidth: float, repeat: int) -> list[Cell]:
    torch._dynamo.reset()
    inputs = [make() for _ in range(gpu.buffers_needed(bytes_moved))]
    compiled = torch.compile(inputs[0][1], dynamic=False)

    def fastest(calls: list[gpu.Call]) -> float:
        return min(gpu.microseconds(calls) for _ in range(repeat))

    return [
        bytes_moved / 1e6,
        bytes_moved / bandwidth * 1e6,
        fastest([fused for fused, _, _ in inputs]),
        fastest([partial(plain, *arguments) for _, plain, arguments in inputs]),
        "fails" if _fails(compiled, inputs[0][2]) else fastest([partial(compiled, *args) for _, _, args in inputs]),
    ]


def _fails(compiled: Plain, arguments: tuple[object, ...]) -> bool:
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


def _cases(configs: Iterable[ModelConfig], tokens: Sequence[int]) -> Iterator[KernelCase]:
    for config in configs:
        hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads + 2 * config.num_kv_heads
        for n in tokens:
            yield "add + RMSNorm", f"{n} × {hidden}", 4 * n * hidden, partial(_norm, n, hidden)
            rope = partial(_rope, n, config.num_heads, config.num_kv_heads)
            yield "RoPE + store", f"{n} × {heads} heads", 2 * n * heads * _HEAD_DIM, rope
            yield "SiLU·mul", f"{n} × {inner}", 3 * n * inner, partial(_activation, n, inner)
    for n in (count for count in tokens if count <= 256):
        for name, temperature, top_k in _SAMPLES:
            yield name, f"{n} × {_VOCAB}", n * _VOCAB, partial(_sampling, n, temperature, top_k)


def _random(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=_DTYPE, device=_DEVICE)


def _integers(low: int, high: int, *size: int) -> torch.Tensor:
    return torch.randint(low, high, size, dtype=torch.int32, device=_DEVICE)


def _norm(tokens: int, hidden_size: int) -> Calls:
    norm = RMSNorm(hidden_size, _EPS).to(_DEVICE, _DTYPE)
    norm.weight.fill_(1.0)
    x, residual = _random(tokens, hidden_size), _random(tokens, hidden_size)
    return lambda: add_and_norm(x, residual, norm.weight, _EPS), norm.add_and_norm, (x, residual)


def _rope(tokens: int, num_heads: int, num_kv_heads: int) -> Calls:
    layer = Attention(1, AttentionSpec(0, num_heads, num_kv_heads, _HEAD_DIM, 1.0), qk_norm_eps=_EPS)
    q_norm, k_norm = (norm.to(_DEVICE, _DTYPE).weight.fill_(1.0) for norm in (layer.q_norm, layer.k_norm) if norm)
    rotary = Rotary(_HEAD_DIM, 4096, RopeSettings()).to(_DEVICE)
    cache = KVCache(1, num_kv_heads, _HEAD_DIM, tokens, 1, _DTYPE, _DEVICE)
    qkv = _random(tokens, (num_heads + 2 * num_kv_heads) * _HEAD_DIM)
    positions, locations = _integers(0, 4096, tokens), torch.randperm(tokens, device=_DEVICE).int()
    rotation = rotary(positions, _DTYPE)

    def plain(qkv: torch.Tensor) -> torch.Tensor:
        heads = qkv.view(tokens, -1, _HEAD_DIM)
        qk = rotate(layer.normalize(heads[:, : num_heads + num_kv_heads]), rotation)
        cache.store(0, qk[:, num_heads:], heads[:, num_heads + num_kv_heads :], locations)
        return qk[:, :num_heads]

    def fused() -> torch.Tensor:
        k, v = cache.k[0], cache.v[0]
        return rotate_and_store(qkv, rotary.table, positions, locations, k, v, q_norm, k_norm, _EPS)

    return fused, plain, (qkv,)


def _activation(tokens: int, intermediate_size: int) -> Calls:
    gate_up = _random(tokens, 2 * intermediate_size)
    return lambda: silu_and_mul(gate_up), plain_silu_and_mul, (gate_up,)


def _sampling(rows: int, temperature: float, top_k: int | None) -> Calls:
    """With a ``top_k``, also top-p 0.9 of what it leaves, in every row: logits as flat as these are the worst case."""
    logits, out = _random(rows, _VOCAB), torch.empty(rows, dtype=torch.int32, device=_DEVICE)
    if temperature == 0.0:
        return lambda: sample_tokens(logits, None, out), lambda logits: logits.argmax(-1), (logits,)
    stage = RandomStage(torch.full((rows,), temperature, device=_DEVICE), *_integers(-(2**31), 2**31, 2, rows))
    of_rows = torch.arange(rows, dtype=torch.int32, device=_DEVICE)
    top_p = torch.full((rows,), 0.9, device=_DEVICE)
    top = None if top_k is None else TopStage(of_rows, torch.full_like(of_rows, top_k), top_p, top_k)

    def fused() -> None:
        thresholds = None if top is None else find_thresholds(logits, stage.temperature, top[:3], None)
        sample_tokens(logits, stage, out, thresholds)

    def plain(logits: torch.Tensor) -> torch.Tensor:
        wide = logits.float()
        weights = softmax_weights(wide, stage.temperature)
        kept = weights if top is None else keep_top(weights, wide, top)
        return draw(kept, stage.key_low, stage.key_high)

    return fused, plain, (logits,)


def _experts_table(tokens: Sequence[int], bandwidth: float, repeat: int) -> Table:
    """Time of one layer's experts without the router, with experts chosen at random.

    The limit is the longer of reading the weights of all chosen experts, and multiplying. The plain layer waits for the
    device, so it is launched kernel by kernel, and its time includes its launches and its wait.
    """
    plain = Experts(_NUM_EXPERTS, _EXPERTS_HIDDEN, _EXPERTS_INTERMEDIATE).to(_DEVICE, _DTYPE)
    for parameter in plain.parameters():
        parameter.normal_(std=0.02)
    fused, one_expert = FusedExperts(plain), _EXPERT_WEIGHTS * _DTYPE.itemsize
    left, right = _random(_SQUARE, _SQUARE), _random(_SQUARE, _SQUARE)
    flops_per_second = 2 * _SQUARE**3 / (gpu.microseconds([lambda: left @ right]) * 1e-6)
    speeds = f"{bandwidth / 1e12:.2f} TB/s, {flops_per_second / 1e12:.0f} TFLOP/s"
    title = f"{_TOP_K} of {_NUM_EXPERTS} experts a token, µs, and the limit at {speeds}"
    table = Table(title, ["tokens", "MB of weights", "limit", "fused", "plain"])
    for count in tokens:
        weights = min(count * _TOP_K, _NUM_EXPERTS) * one_expert  # of a set, which leave the cache before its next turn
        inputs = [_expert_inputs(count) for _ in range(gpu.buffers_needed(weights))]
        touched = int(inputs[0][1].unique().numel()) * one_expert
        limit = max(touched / bandwidth, count * _TOP_K * 2 * _EXPERT_WEIGHTS / flops_per_second) * 1e6
        fused_time = min(gpu.microseconds([partial(fused, *each) for each in inputs]) for _ in range(repeat))
        plain_time = min(gpu.eager_microseconds([partial(plain, *each) for each in inputs]) for _ in range(repeat))
        table.add(count, touched / 1e6, limit, fused_time, plain_time)
    return table


def _expert_inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, experts and weights."""
    probs = torch.randn(tokens, _NUM_EXPERTS, device=_DEVICE).softmax(-1)
    weights, experts = probs.topk(_TOP_K)
    return _random(tokens, _EXPERTS_HIDDEN), experts, weights.to(_DTYPE)


class StoreOnly(PagedAttention):
    """Writes keys and values and attends to nothing: attention has its own benchmark."""

    def plan(self, batch: Batch, inputs: DeviceBatch) -> Hashable:
        self.inputs = inputs
        return None

    def attend(self, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        return q


def _layer_table(name: str, config: ModelConfig, tokens: int, repeat: int) -> Table:
    """Time and launches of one layer in a decode step of ``tokens`` rows: plain, with each fusion, and compiled.

    The last two lines are ``fusions=("compile",)``, and a stack that is compiled as a whole.

    A layer is the difference between a stack and one of half its height, divided by the layers between them.
    """
    table = Table(f"one layer of {name} but for attention, {tokens} tokens", ["", "µs", "launches"])
    choices: list[tuple[str, tuple[str, ...]]] = [("plain", ()), *((f"only {name}", (name,)) for name in _FUSIONS)]
    choices += [("all fused", _FUSIONS), ("small layers compiled", ("compile",)), ("torch.compile", ())]
    for choice, fusions in choices:
        model = load_model("", config, config.dtype, _DEVICE, "dummy")
        assert isinstance(model, CausalLM)
        fuse_layers(model, fusions)
        if "compile" in fusions:
            compile_layers(model)
        compiled = choice == "torch.compile"
        whole, half = (_layers_call(model.model, config, tokens, compiled, n) for n in (_LAYERS, _LAYERS // 2))
        times = [min(gpu.microseconds([call]) for _ in range(repeat)) for call in (whole, half)]
        counts = [len(gpu.launched(call, _DEVICE)) for call in (whole, half)]
        between = _LAYERS - _LAYERS // 2
        table.add(choice, (times[0] - times[1]) / between, (counts[0] - counts[1]) / between)
    return table


def _layers_call(decoder: Decoder, config: ModelConfig, tokens: int, compiled: bool, layers: int) -> gpu.Call:
    """A call that feeds one token a row through the first ``layers`` layers of ``decoder``."""
    rows = torch.arange(tokens, dtype=torch.int32, device=_DEVICE)
    inputs = DeviceBatch(
        input_ids=rows % 1024,
        positions=rows % 4096,
        out_locs=rows,
        slots=rows,
        seq_lens=rows % 4096 + 1,
        cu_seqlens_q=torch.arange(tokens + 1, dtype=torch.int32, device=_DEVICE),
        page_table=rows[:, None],
        logit_rows=rows,
    )
    backend = StoreOnly(KVCache(_LAYERS, config.num_kv_heads, _HEAD_DIM, tokens, 1, _DTYPE, _DEVICE))
    backend.inputs = inputs

    def forward() -> torch.Tensor:
        x: torch.Tensor = decoder.embed_tokens(inputs.input_ids)
        rotation = decoder.rotary(inputs.positions, x.dtype)
        residual = None
        for layer in decoder.layers[:layers]:
            x, residual = layer(x, residual, rotation)
        return x

    torch._dynamo.reset()
    run = torch.compile(forward, dynamic=False) if compiled else forward

    def step() -> torch.Tensor:
        # Each layer is compiled on its own, because its index is a constant of its code.
        with forward_context(ForwardContext(inputs, backend)), torch._dynamo.config.patch(recompile_limit=64):
            return run()

    return step
