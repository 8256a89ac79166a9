"""A decode step through real decoder layers, all but attention itself: what each fusion takes off a layer."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from minisgl.bench.gpu_timing import Call, launches, microseconds
from minisgl.bench.report import Cell, Table
from minisgl.core import AttentionSpec, Batch, DeviceBatch, ForwardContext, forward_context
from minisgl.kvcache.kv_cache import KVCache
from minisgl.kvcache.paged_attention import PagedAttention
from minisgl.layers import RopeSettings
from minisgl.models import ModelConfig, load_model
from minisgl.models.decoder import CausalLM, Decoder
from minisgl.models.fusions import LAYER_FUSIONS, fuse_layers

_LAYERS = 4
_FUSIONS = tuple(name for name in LAYER_FUSIONS if name != "experts")  # these layers have none


@dataclass(frozen=True, slots=True)
class StackShape:
    """Sizes of a model's layers; heads are 128 wide.

    Args:
        name: of the model.
        hidden_size, num_heads, num_kv_heads, intermediate_size: as in `ModelConfig`.
    """

    name: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int


class StoreOnly(PagedAttention):
    """Writes keys and values and attends to nothing: attention has its own benchmark."""

    def plan(self, batch: Batch, inputs: DeviceBatch) -> Hashable:
        self.inputs = inputs
        return None

    def attend(self, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        return q


def layer_table(shape: StackShape, tokens: int, repeat: int) -> Table:
    """Time and launches of one layer in a decode step of ``tokens`` rows: plain, with each fusion, and compiled.

    A layer is the difference between a stack and one of half its height, divided by the layers between them.
    """
    rows: list[list[Cell]] = []
    choices: list[tuple[str, tuple[str, ...]]] = [("plain", ()), *((f"only {name}", (name,)) for name in _FUSIONS)]
    for name, fusions in [*choices, ("all fused", _FUSIONS), ("torch.compile", ())]:
        model = _model(shape)
        fuse_layers(model, fusions)
        whole, half = (_step(model.model, shape, tokens, name == "torch.compile", n) for n in (_LAYERS, _LAYERS // 2))
        times = [min(microseconds([call]) for _ in range(repeat)) for call in (whole, half)]
        counts = [launches(call) for call in (whole, half)]
        between = _LAYERS - _LAYERS // 2
        rows.append([name, (times[0] - times[1]) / between, (counts[0] - counts[1]) / between])
    title = f"one layer of Qwen3-{shape.name} but for attention, {tokens} tokens"
    return Table(title, ["", "µs", "launches"], rows)


def _model(shape: StackShape) -> CausalLM:
    config = ModelConfig(
        architecture="Qwen3ForCausalLM",
        hidden_size=shape.hidden_size,
        num_layers=_LAYERS,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=128,
        intermediate_size=shape.intermediate_size,
        vocab_size=1024,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope=RopeSettings(),
        sliding_windows=(None,) * _LAYERS,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
        qk_norm=True,
    )
    model = load_model("", config, config.dtype, torch.device("cuda"), "dummy")
    assert isinstance(model, CausalLM)
    return model


def _step(decoder: Decoder, shape: StackShape, tokens: int, compiled: bool, layers: int) -> Call:
    """A call that feeds one token a row through the first ``layers`` layers of ``decoder``."""
    device = torch.device("cuda")
    cache = KVCache(_LAYERS, shape.num_kv_heads, 128, tokens, 1, torch.bfloat16, device)
    rows = torch.arange(tokens, dtype=torch.int32, device=device)
    inputs = DeviceBatch(
        input_ids=rows % 1024,
        positions=rows % 4096,
        out_locs=rows,
        slots=rows,
        seq_lens=rows % 4096 + 1,
        cu_seqlens_q=torch.arange(tokens + 1, dtype=torch.int32, device=device),
        page_table=rows[:, None],
        logit_rows=rows,
    )
    backend = StoreOnly(cache)
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
