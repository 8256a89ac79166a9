"""Weights under tensor parallelism: which rank holds which slice, and where the ranks communicate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture, byte_size, counted, request_colors, shorten
from minisgl.errors import ConfigError
from minisgl.layers.sharding import RankInfo, Shard, divide, divide_kv_heads, divide_vocabulary
from minisgl.models.config import ModelConfig

_LEFT, _RIGHT = MARGIN + 160, WIDTH - MARGIN - 214
_BOX, _LINE = 38, 52

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class SlicedMatrix:
    """A matrix of a model, and which part of it each rank holds.

    Args:
        group: heading over it and its neighbours of the same group.
        name: of the module.
        how: the way in which it is divided, in a few words.
        shape: as in checkpoints, [outputs, inputs]; of experts [experts, outputs, inputs].
        axis: which dimension of the shape is divided; None if every rank has all of it.
        ranges: for each rank the first element along ``axis`` that it holds, and the one after its last, which may lie
            beyond the shape: padding. Only their number counts where ``axis`` is None.
        itemsize: bytes an element.
        joined: which collective follows, and how much it moves; empty if there is none.
    """

    group: str
    name: str
    how: str
    shape: tuple[int, ...]
    axis: int | None
    ranges: tuple[Range, ...]
    itemsize: int
    joined: str = ""

    def __post_init__(self) -> None:
        if len(self.shape) < 2 or self.axis not in (None, *range(len(self.shape))):
            raise ConfigError(f"{self.name}: axis {self.axis} must be a dimension of a matrix, not of {self.shape}")
        if not self.ranges or any(not 0 <= start <= stop for start, stop in self.ranges):
            raise ConfigError(f"{self.name}: ranges must be one (start, stop) a rank, not {self.ranges}")

    @property
    def nbytes(self) -> int:
        """Of the whole."""
        return prod(self.shape) * self.itemsize

    def slice_shape(self, rank: int) -> tuple[int, ...]:
        """Of what a rank holds, padding included."""
        if self.axis is None:
            return self.shape
        start, stop = self.ranges[rank]
        return (*self.shape[: self.axis], stop - start, *self.shape[self.axis + 1 :])

    def slice_bytes(self, rank: int) -> int:
        """Of what a rank holds."""
        return prod(self.slice_shape(rank)) * self.itemsize


def weight_slices(matrices: Sequence[SlicedMatrix]) -> Picture:
    """Draw a lane for each rank with its slice of every matrix; a bar across the lanes is a collective.

    Args:
        matrices: at least one, in the order in which a token meets them, such as `decoder_slices` makes.

    Raises `ConfigError` if they are not divided among the same number of ranks.
    """
    ranks = {len(matrix.ranges) for matrix in matrices}
    if len(ranks) != 1:
        raise ConfigError(f"weight_slices: {sorted(ranks)} ranks; give matrices, all divided among as many")
    lanes = _Lanes(ranks.pop())
    for group, members in groupby(matrices, key=lambda matrix: matrix.group):
        held = list(members)
        lanes.heading(group, held)
        for matrix in held:
            lanes.matrix(matrix)
    return lanes.canvas.picture(lanes.y + 4, "\n".join(lanes.says))


class _Lanes:
    """One drawing: ``y`` is how far it has come."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.width = (_RIGHT - _LEFT) / ranks
        self.box = min(self.width - 6, 84.0)
        title = f"Who holds which slice: {counted(ranks, 'rank')}"
        legend = (
            "box: the matrix as in checkpoints, outputs down, inputs across  ·  colour: the rank's slice  ·  "
            "not to scale"
        )
        self.canvas = Canvas(title, legend=legend)
        for rank in range(ranks):
            self.canvas.text(self._middle(rank), 74, f"rank {rank}" if ranks <= 4 else rank, "text strong")
        self.canvas.text(_RIGHT + 8, 74, "held by a rank, of the whole", "muted small", "start")
        self.y = 80.0
        self.says = [f"{title}."]

    def heading(self, group: str, matrices: Sequence[SlicedMatrix]) -> None:
        """Name of a group, and the bytes of its slices."""
        most = max(sum(matrix.slice_bytes(rank) for matrix in matrices) for rank in range(self.ranks))
        sizes = f"{byte_size(most)} of {byte_size(sum(matrix.nbytes for matrix in matrices))}"
        self.canvas.path(f"M{MARGIN} {self.y + 2:g}H{WIDTH - MARGIN}", "rule")
        self.canvas.text(MARGIN, self.y + 20, shorten(group, 60), "text strong", "start")
        self.canvas.text(_RIGHT + 8, self.y + 20, sizes, "text small strong", "start")
        self.says.append(f"{group}: {sizes} on a rank.")
        self.y += 30

    def matrix(self, matrix: SlicedMatrix) -> None:
        """A line for the matrix, and the bar of the collective that follows."""
        canvas, y = self.canvas, self.y
        canvas.text(MARGIN, y + 16, shorten(matrix.name, 20), "text", "start")
        canvas.text(MARGIN, y + 32, shorten(matrix.how, 26), "muted small", "start")
        for rank in range(self.ranks):
            self._slice(matrix, rank)
        largest = max(range(self.ranks), key=matrix.slice_bytes)
        held = f"{_shape(matrix.slice_shape(largest))}, {byte_size(matrix.slice_bytes(largest))}"
        whole = f"of {_shape(matrix.shape)}, {byte_size(matrix.nbytes)}"
        canvas.text(_RIGHT + 8, y + 16, held, "text small", "start")
        canvas.text(_RIGHT + 8, y + 32, whole, "muted small", "start")
        self.says.append(f"{matrix.name}, {matrix.how}: {held} {whole} on a rank; {_who(matrix)}.")
        self.y += _LINE
        if matrix.joined:
            canvas.box(_LEFT, self.y - 4, _RIGHT - _LEFT, 22, "shared")
            canvas.text((_LEFT + _RIGHT) / 2, self.y + 11, shorten(matrix.joined, 58), "text small strong")
            self.says.append(f"Then {matrix.joined}.")
            self.y += 34

    def _slice(self, matrix: SlicedMatrix, rank: int) -> None:
        """The outline of the whole, in it what the rank has, and the lane down to what comes next."""
        x, y = self._middle(rank) - self.box / 2, self.y
        fill, ink = request_colors(rank)
        first, last = 0.0, 1.0
        if matrix.axis is not None:
            first, last = (min(end / matrix.shape[matrix.axis], 1.0) for end in matrix.ranges[rank])
        left, top, width, height = x, y, self.box, float(_BOX)
        if matrix.axis == len(matrix.shape) - 1:
            left, width = x + first * self.box, (last - first) * self.box
        else:
            top, height = y + first * _BOX, (last - first) * _BOX
        self.canvas.box(x, y, self.box, _BOX)
        if last > first:
            self.canvas.box(left, top, width, height, fill=fill)
        if width >= 10 and height >= 12:
            self.canvas.text(left + width / 2, top + height / 2 + 4.5, rank, "small", fill=ink)
        self.canvas.path(f"M{self._middle(rank):g} {y + _BOX}V{y + _LINE - 4:g}", "rule")

    def _middle(self, rank: int) -> float:
        return _LEFT + (rank + 0.5) * self.width


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


def _who(matrix: SlicedMatrix) -> str:
    if matrix.axis is None:
        return "all of it on every rank"
    parts = (f"{start} to {stop - 1} on rank {rank}" for rank, (start, stop) in enumerate(matrix.ranges))
    return f"{'inputs' if matrix.axis == len(matrix.shape) - 1 else 'outputs'} {', '.join(parts)}"


# -- the slices of a decoder -----------------------------------------------------------------------------------------


@dataclass
class _Rank:
    """A `RankInfo` among ranks that do not run."""

    rank: int
    size: int


def decoder_slices(config: ModelConfig, ranks: int, layer: int = 0) -> list[SlicedMatrix]:
    """The embedding, one layer and the LM head, divided as in Megatron-LM (Shoeybi et al. 2019).

    Args:
        config: of the model.
        ranks: how many share it.
        layer: which layer; they differ where only some have experts.

    Raises `ConfigError` if the ranks cannot share heads or widths equally (names the size), or there is no such layer.
    """
    if ranks < 1 or not 0 <= layer < config.num_layers:
        raise ConfigError(
            f"decoder_slices: {ranks} ranks must be at least 1, and layer {layer} one of the {config.num_layers} layers"
        )
    # Both tables are as long as the vocabulary, padded at the end to a multiple of the ranks.
    ranges = _ranges(ranks, lambda rank: divide_vocabulary(config.vocab_size, rank))
    shape, itemsize = (config.vocab_size, config.hidden_size), config.dtype.itemsize
    head = "is embed_tokens" if config.tie_word_embeddings else "vocabulary divided"
    gather = f"all-gather: S × {config.vocab_size}, {byte_size(config.vocab_size * itemsize)} a sequence"
    reduce = f"all-reduce: T × {config.hidden_size}, {byte_size(config.hidden_size * config.dtype.itemsize)} a token"
    return [
        SlicedMatrix("before the layers", "embed_tokens", "vocabulary divided", shape, 0, ranges, itemsize, reduce),
        *_attention(config, ranks, reduce),
        *_mlp(config, ranks, layer, reduce),
        SlicedMatrix("after the layers", "lm_head", head, shape, 0, ranges, itemsize, gather),
    ]


def _attention(config: ModelConfig, ranks: int, reduce: str) -> Iterator[SlicedMatrix]:
    group = f"one of {counted(config.num_layers, 'layer')}: attention"
    heads = _equal("num_attention_heads", config.num_heads, ranks, config.head_dim)
    kv_heads = _ranges(ranks, lambda rank: divide_kv_heads(config.num_kv_heads, rank).times(config.head_dim))
    copies = max(ranks // config.num_kv_heads, 1)
    how = "column-parallel" if copies == 1 else f"each head on {copies} ranks"
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, itemsize = config.hidden_size, config.dtype.itemsize
    yield SlicedMatrix(group, "q_proj", "column-parallel", (q, hidden), 0, heads, itemsize)
    yield SlicedMatrix(group, "k_proj", how, (kv, hidden), 0, kv_heads, itemsize)
    yield SlicedMatrix(group, "v_proj", how, (kv, hidden), 0, kv_heads, itemsize)
    yield SlicedMatrix(group, "o_proj", "row-parallel", (hidden, q), 1, heads, itemsize, reduce)


def _mlp(config: ModelConfig, ranks: int, layer: int, reduce: str) -> Iterator[SlicedMatrix]:
    group = f"one of {counted(config.num_layers, 'layer')}: MLP"
    hidden, itemsize = config.hidden_size, config.dtype.itemsize
    if config.moe is None or not config.moe.layers[layer]:
        width = config.intermediate_size
        shares = _equal("intermediate_size", width, ranks)
        for name in ("gate_proj", "up_proj"):
            yield SlicedMatrix(group, name, "column-parallel", (width, hidden), 0, shares, itemsize)
        yield SlicedMatrix(group, "down_proj", "row-parallel", (hidden, width), 1, shares, itemsize, reduce)
        return
    experts, width = config.moe.num_experts, config.moe.intermediate_size
    shares = _equal("moe_intermediate_size", width, ranks)
    router = (experts, hidden)
    yield SlicedMatrix(group, "gate", "on every rank", router, None, ((0, experts),) * ranks, itemsize)
    for name in ("experts.gate_proj", "experts.up_proj"):
        yield SlicedMatrix(group, name, "column-parallel, each", (experts, width, hidden), 1, shares, itemsize)
    down = (experts, hidden, width)
    yield SlicedMatrix(group, "experts.down_proj", "row-parallel, each", down, 2, shares, itemsize, reduce)


def _equal(name: str, size: int, ranks: int, width: int = 1) -> tuple[Range, ...]:
    """An equal share of ``size`` elements for every rank, each ``width`` rows wide."""
    return _ranges(ranks, lambda rank: divide(name, size, rank).times(width))


def _ranges(ranks: int, share_of: Callable[[RankInfo], Shard]) -> tuple[Range, ...]:
    """Where the share of each rank begins and ends."""
    shares = [share_of(_Rank(rank, ranks)) for rank in range(ranks)]
    return tuple((share.start, share.stop) for share in shares)
