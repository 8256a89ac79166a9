"""Chapter 2, first half: the building blocks of a decoder, inference only.

Every layer takes plain sizes, never a config, so that a tensor-parallel rank can build its share with the same classes.
"""

from minisgl.layers.activation import silu_and_mul
from minisgl.layers.attention import Attention
from minisgl.layers.blocked import blocked, linear
from minisgl.layers.dense_attention import DenseAttention
from minisgl.layers.embedding import Embedding
from minisgl.layers.linear import Linear, PackedLinear
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.moe import Experts, MoE
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rope_types import ROPE_TYPES, RopeSettings
from minisgl.layers.rotary import Rotary, Rotation, rotate
from minisgl.layers.sdpa import causal_mask, grouped_query_attention
from minisgl.layers.weights import PackedWeights, WeightPart, weight

__all__ = [
    "ROPE_TYPES",
    "Attention",
    "DenseAttention",
    "Embedding",
    "Experts",
    "GatedMLP",
    "Linear",
    "MoE",
    "PackedLinear",
    "PackedWeights",
    "RMSNorm",
    "RopeSettings",
    "Rotary",
    "Rotation",
    "WeightPart",
    "blocked",
    "causal_mask",
    "grouped_query_attention",
    "linear",
    "rotate",
    "silu_and_mul",
    "weight",
]
