"""Puts the sum over the ranks and the norm after it together, in a whole decoder."""

from __future__ import annotations

from torch import nn

from minisgl.core import ALONE
from minisgl.distributed.peer_all_reduce import PeerAllReduce
from minisgl.distributed.reducing_norm import ReducingRMSNorm
from minisgl.layers import GatedMLP, MoE, RMSNorm
from minisgl.layers.linear import RowParallelLinear
from minisgl.models.decoder import Decoder, DecoderLayer


def fuse_all_reduce(model: nn.Module, peers: PeerAllReduce) -> None:
    """Exchange the norms behind row-parallel products, after `minisgl.kernels.fuse` has exchanged its layers.

    A decoder with layers of another class is left as it is: what they do with the residual stream, which is then spread
    over the ranks, cannot be seen from here. The first norm stands behind the embedding, and stays.

    Args:
        model: built for the rank, with the communicator that sums what ``peers`` does not take.
        peers: of the rank.
    """
    for decoder in [module for module in model.modules() if isinstance(module, Decoder)]:
        layers = [layer for layer in decoder.layers if type(layer) is DecoderLayer]
        if len(layers) < len(decoder.layers):
            continue
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            layer.post_attention_layernorm = _joined(layer.self_attn.o_proj, layer.post_attention_layernorm, peers)
            product = layer.mlp.down_proj if isinstance(layer.mlp, GatedMLP) else layer.mlp
            assert isinstance(product, RowParallelLinear | MoE), "no other MLP is built by DecoderLayer"
            if following is None:
                decoder.norm = _joined(product, decoder.norm, peers)
            else:
                following.input_layernorm = _joined(product, following.input_layernorm, peers)


def _joined(product: RowParallelLinear | MoE, norm: RMSNorm, peers: PeerAllReduce) -> ReducingRMSNorm:
    reducing = ReducingRMSNorm(norm, product.communicator.all_reduce, peers)
    product.communicator = ALONE
    return reducing
