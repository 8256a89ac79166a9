"""Chapter 2, first half: the building blocks of a decoder, inference only.

Every layer takes plain sizes of the whole model, never a config, and a communicator, which says which shard of them a
tensor-parallel rank holds (chapter 13). Alone, a rank holds everything.
"""

from minisgl.layers.activation import silu_and_mul
from minisgl.layers.attention import Attention
from minisgl.layers.blocked import blocked, linear
from minisgl.layers.dense_attention import DenseAttention
from minisgl.layers.embedding import Embedding, LMHead
from minisgl.layers.linear import Linear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.moe import Experts, MoE
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rope_types import ROPE_TYPES, RopeSettings
from minisgl.layers.rotary import Rotary, Rotation, rotate
from minisgl.layers.sdpa import causal_mask, grouped_query_attention
from minisgl.layers.shares import Shard, divide, divide_kv_heads, divide_vocabulary, whole
from minisgl.layers.weights import PackedWeights, ShardedParameters, ShardSpec, WeightPart, weight

__all__ = [
    "ROPE_TYPES",
    "Attention",
    "DenseAttention",
    "Embedding",
    "Experts",
    "GatedMLP",
    "LMHead",
    "Linear",
    "MergedColumnParallelLinear",
    "MoE",
    "PackedWeights",
    "QKVParallelLinear",
    "RMSNorm",
    "RopeSettings",
    "Rotary",
    "Rotation",
    "RowParallelLinear",
    "Shard",
    "ShardSpec",
    "ShardedParameters",
    "WeightPart",
    "blocked",
    "causal_mask",
    "divide",
    "divide_kv_heads",
    "divide_vocabulary",
    "grouped_query_attention",
    "linear",
    "rotate",
    "silu_and_mul",
    "weight",
    "whole",
]
