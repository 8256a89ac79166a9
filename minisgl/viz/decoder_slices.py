"""The slices of a decoder's matrices under tensor parallelism, worked out from the sizes of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from minisgl.core import RankInfo
from minisgl.errors import ConfigError
from minisgl.layers import Shard, divide, divide_kv_heads, divide_vocabulary
from minisgl.models import ModelConfig
from minisgl.viz.svg import counted
from minisgl.viz.units import byte_size
from minisgl.viz.weight_slices import Range, SlicedMatrix


@dataclass
class _Rank:
    """A `RankInfo` among ranks that are not there."""

    rank: int
    size: int


def decoder_slices(config: ModelConfig, ranks: int, layer: int = 0) -> list[SlicedMatrix]:
    """The embedding, one layer and the LM head, divided as in Megatron-LM (Shoeybi et al. 2019).

    Args:
        config: of the model.
        ranks: how many share it.
        layer: which layer; they differ where only some have experts.

    Raises:
        ConfigError: the ranks cannot share heads or widths equally (names the size), or there is no such layer.
    """
    if ranks < 1 or not 0 <= layer < config.num_layers:
        raise ConfigError(
            f"decoder_slices: {ranks} ranks must be at least 1, and layer {layer} one of the {config.num_layers} layers"
        )
    return [
        *_ends(config, ranks, first=True),
        *_attention(config, ranks),
        *_mlp(config, ranks, layer),
        *_ends(config, ranks, first=False),
    ]


def _ends(config: ModelConfig, ranks: int, first: bool) -> Iterator[SlicedMatrix]:
    """The two tables that are as long as the vocabulary, padded at the end to a multiple of the ranks."""
    ranges = _ranges(ranks, lambda rank: divide_vocabulary(config.vocab_size, rank))
    shape, itemsize = (config.vocab_size, config.hidden_size), config.dtype.itemsize
    if first:
        joined = _all_reduce(config)
        yield SlicedMatrix(
            "before the layers", "embed_tokens", "vocabulary divided", shape, 0, ranges, itemsize, joined
        )
    else:
        how = "is embed_tokens" if config.tie_word_embeddings else "vocabulary divided"
        joined = f"all-gather: S × {config.vocab_size}, {byte_size(config.vocab_size * itemsize)} a sequence"
        yield SlicedMatrix("after the layers", "lm_head", how, shape, 0, ranges, itemsize, joined)


def _attention(config: ModelConfig, ranks: int) -> Iterator[SlicedMatrix]:
    group = f"one of {counted(config.num_layers, 'layer')}: attention"
    heads = _equal("num_attention_heads", config.num_heads, ranks, config.head_dim)
    kv_heads = _ranges(ranks, lambda rank: divide_kv_heads(config.num_kv_heads, rank).of_width(config.head_dim))
    copies = max(ranks // config.num_kv_heads, 1)
    how = "column-parallel" if copies == 1 else f"each head on {copies} ranks"
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, itemsize = config.hidden_size, config.dtype.itemsize
    yield SlicedMatrix(group, "q_proj", "column-parallel", (q, hidden), 0, heads, itemsize)
    yield SlicedMatrix(group, "k_proj", how, (kv, hidden), 0, kv_heads, itemsize)
    yield SlicedMatrix(group, "v_proj", how, (kv, hidden), 0, kv_heads, itemsize)
    yield SlicedMatrix(group, "o_proj", "row-parallel", (hidden, q), 1, heads, itemsize, _all_reduce(config))


def _mlp(config: ModelConfig, ranks: int, layer: int) -> Iterator[SlicedMatrix]:
    group = f"one of {counted(config.num_layers, 'layer')}: MLP"
    hidden, itemsize, joined = config.hidden_size, config.dtype.itemsize, _all_reduce(config)
    if config.moe is None or not config.moe.layers[layer]:
        width = config.intermediate_size
        shares = _equal("intermediate_size", width, ranks)
        for name in ("gate_proj", "up_proj"):
            yield SlicedMatrix(group, name, "column-parallel", (width, hidden), 0, shares, itemsize)
        yield SlicedMatrix(group, "down_proj", "row-parallel", (hidden, width), 1, shares, itemsize, joined)
        return
    experts, width = config.moe.num_experts, config.moe.intermediate_size
    shares = _equal("moe_intermediate_size", width, ranks)
    router = (experts, hidden)
    yield SlicedMatrix(group, "gate", "on every rank", router, None, ((0, experts),) * ranks, itemsize)
    for name in ("experts.gate_proj", "experts.up_proj"):
        yield SlicedMatrix(group, name, "column-parallel, each", (experts, width, hidden), 1, shares, itemsize)
    down = (experts, hidden, width)
    yield SlicedMatrix(group, "experts.down_proj", "row-parallel, each", down, 2, shares, itemsize, joined)


def _equal(name: str, size: int, ranks: int, width: int = 1) -> tuple[Range, ...]:
    """An equal share of ``size`` elements for every rank, each ``width`` rows wide."""
    return _ranges(ranks, lambda rank: divide(name, size, rank).of_width(width))


def _ranges(ranks: int, share_of: Callable[[RankInfo], Shard]) -> tuple[Range, ...]:
    """Where the share of each rank begins and ends."""
    shares = [share_of(_Rank(rank, ranks)) for rank in range(ranks)]
    return tuple((share.start, share.stop) for share in shares)


def _all_reduce(config: ModelConfig) -> str:
    size = byte_size(config.hidden_size * config.dtype.itemsize)
    return f"all-reduce: T × {config.hidden_size}, {size} a token"
