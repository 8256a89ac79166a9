"""Decoder layers that are not the plain one: norms in other places, another MLP, scaled blocks.

Fusions replace plain layers only, by their class, so each of these keeps its own computation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from minisgl.layers.attention import Attention
from minisgl.layers.mlp import ClampedMoE, GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import Rotation
from minisgl.layers.sharding import SINGLE_RANK, Communicator, Shard, ShardSpec, divide, divide_kv_heads
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import DecoderLayer


class ScaledLayer(DecoderLayer):
    """Each block's output is multiplied before it is added to the residual stream (Granite)."""

    def __init__(self, config: ModelConfig, layer_id: int, communicator: Communicator = SINGLE_RANK) -> None:
        super().__init__(config, layer_id, communicator)
        self.multiplier = config.residual_multiplier

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm.add_and_norm(x, residual)
        x = self.self_attn(x, rotation) * self.multiplier
        x, residual = self.post_attention_layernorm.add_and_norm(x, residual)
        return self.mlp(x) * self.multiplier, residual


class SandwichLayer(DecoderLayer):
    """A norm before each block, and another one behind it, before the residual addition (GLM-4, Gemma 2 and 3)."""

    def __init__(self, config: ModelConfig, layer_id: int, communicator: Communicator = SINGLE_RANK) -> None:
        super().__init__(config, layer_id, communicator)
        self.attention_output_norm = self.norm_class(config.hidden_size, config.rms_norm_eps)
        self.mlp_output_norm = self.norm_class(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm.add_and_norm(x, residual)
        x = self.attention_output_norm(self.self_attn(x, rotation))
        x, residual = self.post_attention_layernorm.add_and_norm(x, residual)
        return self.mlp_output_norm(self.mlp(x)), residual


class PostNormLayer(SandwichLayer):
    """Norms behind the blocks alone: the residual stream enters them as it is (OLMo 2 and 3)."""

    def __init__(self, config: ModelConfig, layer_id: int, communicator: Communicator = SINGLE_RANK) -> None:
        super().__init__(config, layer_id, communicator)
        del self.input_layernorm, self.post_attention_layernorm

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stream = x if residual is None else x + residual
        stream = stream + self.attention_output_norm(self.self_attn(stream, rotation))
        return self.mlp_output_norm(self.mlp(stream)), stream


class WholeWidthNorm(RMSNorm):
    """RMSNorm over all heads of all ranks. Each rank has its heads; the ranks add up their sums of squares."""

    def __init__(self, shard: Shard, eps: float, communicator: Communicator) -> None:
        super().__init__(shard.size, eps)
        self.shard = shard
        self.communicator = communicator
        self.copies = communicator.size * shard.size // shard.total  # ranks that hold the same KV head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, shard.size] → [T, shard.size]."""
        if self.communicator.size == 1:
            return super().forward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = self.communicator.all_reduce(wide.square().sum(dim=-1, keepdim=True))
        scale = torch.rsqrt(squares / (self.copies * self.shard.total) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"weight": ShardSpec(0, self.shard)}


class OlmoAttention(Attention):
    """QK-norm over the whole width of queries, and of keys, not head by head."""

    def __init__(self, hidden_size: int, spec: Any, *options: Any, **more: Any) -> None:
        super().__init__(hidden_size, spec, *options, **more)
        assert self.q_norm is not None
        eps, communicator = self.q_norm.eps, self.o_proj.communicator
        heads = divide("num_attention_heads", spec.num_heads, communicator)
        kv_heads = divide_kv_heads(spec.num_kv_heads, communicator)
        self.q_norm = WholeWidthNorm(heads.times(spec.head_dim), eps, communicator)
        self.k_norm = WholeWidthNorm(kv_heads.times(spec.head_dim), eps, communicator)

    def normalize(self, qk: torch.Tensor) -> torch.Tensor:
        """[T, num_heads + num_kv_heads, head_dim] → the same."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        q, k = qk[:, : self.spec.num_heads].flatten(1), qk[:, self.spec.num_heads :].flatten(1)
        return torch.cat([self.q_norm(q), self.k_norm(k)], dim=1).view_as(qk)


class OlmoLayer(PostNormLayer):
    """OLMo 2 and 3."""

    attention_class = OlmoAttention


class GemmaNorm(RMSNorm):
    """Multiplies by 1 + weight, in float32, because 1 + a small weight has no room in half precision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.weight.shape, 1.0 + self.weight.to(wide), self.eps).to(x.dtype)


class GemmaAttention(Attention):
    """With Gemma's norm, where queries and keys are normalised (Gemma 3)."""

    def __init__(self, hidden_size: int, spec: Any, *options: Any, **more: Any) -> None:
        super().__init__(hidden_size, spec, *options, **more)
        if self.q_norm is not None:
            eps = self.q_norm.eps
            self.q_norm, self.k_norm = GemmaNorm(spec.head_dim, eps), GemmaNorm(spec.head_dim, eps)


class GeluMLP(GatedMLP):
    """``down(gelu(gate(x)) × up(x))`` (GeGLU, Shazeer 2020), with the approximation of GELU by a tanh."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: torch.Tensor = self.down_proj(F.gelu(gate, approximate="tanh") * up)
        return out


class GemmaLayer(SandwichLayer):
    """Gemma 2 and 3."""

    attention_class = GemmaAttention
    mlp_class = GeluMLP
    norm_class = GemmaNorm


class ClampedMoELayer(DecoderLayer):
    """The plain layer with the experts of gpt-oss."""

    moe_class = ClampedMoE
