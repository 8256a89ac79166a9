"""Which part of a dimension a rank holds: the one place where sizes of the model become sizes on this rank."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.core import RankInfo
from minisgl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements ``start … stop`` of a dimension that has ``total`` of them.

    The last ranks' shares of a vocabulary may reach beyond ``total``; what lies there is padding that no checkpoint
    fills.
    """

    start: int
    stop: int
    total: int

    @property
    def size(self) -> int:
        """Elements on this rank, padding included."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether one rank has it all."""
        return self.start == 0 and self.stop == self.total

    def of_width(self, width: int) -> Shard:
        """The same share where every element is ``width`` rows wide, as a head is ``head_dim`` rows."""
        return Shard(self.start * width, self.stop * width, self.total * width)


def whole(size: int) -> Shard:
    """All of ``size`` elements."""
    return Shard(0, size, size)


def divide(name: str, size: int, ranks: RankInfo) -> Shard:
    """An equal share for every rank.

    Args:
        name: of the size in ``config.json``, for the error.
        size: elements in all.
        ranks: those that share them, and which of them this is.

    Raises:
        ConfigError: the ranks cannot share them equally.
    """
    if size % ranks.size:
        raise ConfigError(
            f"tensor_parallel_size: {ranks.size} ranks cannot share {name} of {size} equally; choose a divisor of it"
        )
    each = size // ranks.size
    return Shard(ranks.rank * each, (ranks.rank + 1) * each, size)


def divide_kv_heads(num_kv_heads: int, ranks: RankInfo) -> Shard:
    """An equal share of the KV heads. Where there are fewer heads than ranks, neighbouring ranks hold the same one,
    which is the one that their query heads share.

    Raises:
        ConfigError: neither the heads are a multiple of the ranks, nor the ranks of the heads.
    """
    if ranks.size <= num_kv_heads or ranks.size % num_kv_heads:
        return divide("num_key_value_heads", num_kv_heads, ranks)
    head = ranks.rank * num_kv_heads // ranks.size
    return Shard(head, head + 1, num_kv_heads)


def divide_vocabulary(vocab_size: int, ranks: RankInfo) -> Shard:
    """An equal share of the vocabulary, padded at its end to a multiple of the ranks."""
    each = -(-vocab_size // ranks.size)
    return Shard(ranks.rank * each, (ranks.rank + 1) * each, vocab_size)
