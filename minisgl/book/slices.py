"""Which slice of each weight a tensor-parallel rank holds: asked of the model, and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from types import SimpleNamespace
from typing import Any

import torch

from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture, byte_size, counted, request_colors, shorten
from minisgl.errors import ConfigError
from minisgl.models.config import MODELS, ModelConfig
from minisgl.models.loader import checkpoint_targets
from minisgl.registry import resolve

_LEFT, _RIGHT = MARGIN + 160, WIDTH - MARGIN - 214
_BOX, _LINE = 38, 52


@dataclass(frozen=True, slots=True)
class SlicedMatrix:
    """A matrix of a model, and which part of it each rank holds."""

    group: str  # heading over it and its neighbours of the same group
    name: str
    how: str  # the way in which it is divided, in a few words
    shape: tuple[int, ...]  # as in checkpoints, [outputs, inputs]; of experts [experts, outputs, inputs]
    axis: int | None  # which dimension of the shape is divided; None: every rank has all of it
    ranges: tuple[tuple[int, int], ...]  # of each rank: its first element along `axis`, and the one after its last
    itemsize: int  # bytes an element
    joined: str = ""  # which collective follows, and how much it moves

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize

    def slice_shape(self, rank: int) -> tuple[int, ...]:
        """Of what a rank holds, padding included."""
        if self.axis is None:
            return self.shape
        start, stop = self.ranges[rank]
        return (*self.shape[: self.axis], stop - start, *self.shape[self.axis + 1 :])

    def slice_bytes(self, rank: int) -> int:
        return prod(self.slice_shape(rank)) * self.itemsize


def weight_slices(matrices: Sequence[SlicedMatrix]) -> Picture:
    """Draw a lane for each rank with its slice of every matrix; a bar across the lanes is a collective.

    There is at least one matrix, and a token meets them in their order, which is that of `decoder_slices`. Raises
    `ConfigError` if they are not divided among the same number of ranks.
    """
    counts = {len(matrix.ranges) for matrix in matrices}
    if len(counts) != 1:
        raise ConfigError(f"weight_slices: {sorted(counts)} ranks; give matrices, all divided among as many")
    ranks, y = counts.pop(), 80.0
    title = f"Who holds which slice: {counted(ranks, 'rank')}"
    legend = "box: the matrix, outputs down, inputs across  ·  colour: the rank's slice  ·  not to scale"
    canvas = Canvas(title, legend=legend, says=f"{title}.")
    middles = [_LEFT + (rank + 0.5) * (_RIGHT - _LEFT) / ranks for rank in range(ranks)]
    for rank, middle in enumerate(middles):
        canvas.text(middle, 74, f"rank {rank}" if ranks <= 4 else rank, "text strong")
    canvas.text(_RIGHT + 8, 74, "held by a rank, of the whole", "muted small", "start")
    for group, members in groupby(matrices, key=lambda matrix: matrix.group):
        held = list(members)
        most = max(sum(matrix.slice_bytes(rank) for matrix in held) for rank in range(ranks))
        sizes = f"{byte_size(most)} of {byte_size(sum(matrix.nbytes for matrix in held))}"
        canvas.path(f"M{MARGIN} {y + 2:g}H{WIDTH - MARGIN}", "rule")
        canvas.text(MARGIN, y + 20, shorten(group, 60), "text strong", "start")
        canvas.text(_RIGHT + 8, y + 20, sizes, "text small strong", "start")
        canvas.says.append(f"{group}: {sizes} on a rank.")
        y += 30
        for matrix in held:
            _draw(canvas, y, matrix, middles)
            y += _LINE
            if matrix.joined:
                canvas.box(_LEFT, y - 4, _RIGHT - _LEFT, 22, "shared")
                canvas.text((_LEFT + _RIGHT) / 2, y + 11, shorten(matrix.joined, 58), "text small strong")
                canvas.says.append(f"Then {matrix.joined}.")
                y += 34
    return canvas.picture(y + 4)


def _draw(canvas: Canvas, y: float, matrix: SlicedMatrix, middles: Sequence[float]) -> None:
    """One matrix: its outline for each rank and in it the rank's slice."""
    side = min(middles[0] - _LEFT - 3, 42.0) * 2
    inputs = matrix.axis == len(matrix.shape) - 1
    for rank, middle in enumerate(middles):
        first, last = 0.0, 1.0
        if matrix.axis is not None:
            first, last = (min(end / matrix.shape[matrix.axis], 1.0) for end in matrix.ranges[rank])
        left, top, width, height = middle - side / 2, y, side, float(_BOX)
        canvas.box(left, top, width, height)
        if inputs:
            left, width = left + first * width, (last - first) * width
        else:
            top, height = top + first * height, (last - first) * height
        fill, ink = request_colors(rank)
        if last > first:
            canvas.box(left, top, width, height, fill=fill)
        if width >= 10 and height >= 12:
            canvas.text(left + width / 2, top + height / 2 + 4.5, rank, "small", fill=ink)
        canvas.path(f"M{middle:g} {y + _BOX}V{y + _LINE - 4:g}", "rule")
    largest = max(range(len(middles)), key=matrix.slice_bytes)
    held = f"{_times(matrix.slice_shape(largest))}, {byte_size(matrix.slice_bytes(largest))}"
    whole = f"of {_times(matrix.shape)}, {byte_size(matrix.nbytes)}"
    for x, above, below in ((MARGIN, shorten(matrix.name, 20), shorten(matrix.how, 26)), (_RIGHT + 8, held, whole)):
        canvas.text(x, y + 16, above, "text" if x == MARGIN else "text small", "start")
        canvas.text(x, y + 32, below, "muted small", "start")
    parts = ", ".join(f"{start} to {stop - 1} on rank {rank}" for rank, (start, stop) in enumerate(matrix.ranges))
    who = f"{'inputs' if inputs else 'outputs'} {parts}" if matrix.axis is not None else "all of it on every rank"
    canvas.says.append(f"{matrix.name}, {matrix.how}: {held} {whole} on a rank; {who}.")


def _times(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


def decoder_slices(config: ModelConfig, ranks: int) -> list[SlicedMatrix]:
    """The matrices of the embedding, of the first layer and of the LM head, as the model of each rank declares them.

    Raises `ConfigError` if the ranks cannot share heads or widths equally; it names the size.
    """
    found: list[SlicedMatrix] = []
    moe = config.moe and replace(config.moe, layers=config.moe.layers[:1])
    windows, ropes = config.sliding_windows[:1], config.layer_ropes[:1]
    shallow = replace(config, num_layers=1, sliding_windows=windows, layer_ropes=ropes, moe=moe)
    build: Any = resolve("architecture", config.architecture, MODELS)
    with torch.device("meta"):
        targets = [checkpoint_targets(build(shallow, SimpleNamespace(rank=rank, size=ranks))) for rank in range(ranks)]
    size, vocabulary = config.dtype.itemsize, config.vocab_size
    reduce = f"all-reduce: T × {config.hidden_size}, {byte_size(config.hidden_size * size)} a token"
    gather = f"all-gather: S × {vocabulary}, {byte_size(vocabulary * size)} a sequence"
    paths = [(path, path.split(".")[-2]) for path in targets[0]]
    for path, name in [*paths, *[("model.embed_tokens.weight", "lm_head")] * config.tie_word_embeddings]:
        region, inside = targets[0][path].region, path.split(".")
        if region.ndim < 2 or ("experts" in inside and "0" not in inside[4:]):
            continue  # norms and biases; one expert speaks for all
        shape, specs = tuple(region.shape), [each[path].shard_spec for each in targets]
        ranges, axis, how, joined = ((0, shape[0]),) * ranks, None, "on every rank", ""
        if (spec := specs[0]) is not None:
            shape, axis = (*shape[: spec.dim], spec.total, *shape[spec.dim + 1 :]), spec.dim
            shards = [each.shards for each in specs if each is not None]
            ranges = tuple((sum(s.start for s in each), sum(s.stop for s in each)) for each in shards)
            copies = ranks // len(set(ranges))
            how = "row-parallel" if axis else "column-parallel" if copies == 1 else f"each head on {copies} ranks"
            joined = gather if name == "lm_head" else reduce if axis or name == "embed_tokens" else ""
        group = f"one of {counted(config.num_layers, 'layer')}: {'MLP' if 'mlp' in inside else 'attention'}"
        if "layers" not in inside:
            group = f"{'before' if name == 'embed_tokens' else 'after'} the layers"
            how = "is embed_tokens" if name not in inside else "vocabulary divided"
        elif config.moe is not None and "experts" in inside:
            shape, axis = (config.moe.num_experts, *shape), axis if axis is None else axis + 1
            name, how = f"experts.{name}", f"{how}, each"
        found.append(SlicedMatrix(group, name, how, shape, axis, ranges, size, joined))
    return found
