"""Who holds which slice of which matrix, when several ranks share a model, and where they must meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

from minisgl.errors import ConfigError
from minisgl.viz.svg import WIDTH, Canvas, Picture, counted, request_colors, shorten
from minisgl.viz.units import byte_size

_MARGIN = 14
_NAMES, _SIZES = 160, 214
_LEFT, _RIGHT = _MARGIN + _NAMES, WIDTH - _MARGIN - _SIZES
_WIDEST = 84.0
_BOX, _LINE = 38, 52
_HEADING = 30
_BAR, _BAR_LINE = 22, 34
_LEGEND = "box: the matrix as in checkpoints, outputs down, inputs across  ·  colour: the rank's slice  ·  not to scale"

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
            beyond the shape: padding. Of no meaning but their number where ``axis`` is None.
        itemsize: bytes an element.
        joined: which collective follows, and how much it moves; empty if the ranks go on by themselves.
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
    """A lane for each rank with its slice of every matrix; a bar across the lanes is where the ranks must meet.

    Args:
        matrices: at least one, in the order in which a token meets them. `decoder_slices` makes them for a model.

    Raises:
        ConfigError: they are not divided among the same number of ranks.
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
    return lanes.picture()


class _Lanes:
    """One drawing: ``y`` is how far it has come."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.width = (_RIGHT - _LEFT) / ranks
        self.box = min(self.width - 6, _WIDEST)
        self.canvas = Canvas()
        title = f"Who holds which slice: {counted(ranks, 'rank')}"
        self.canvas.text(_MARGIN, 26, title, "text strong", "start")
        self.canvas.text(_MARGIN, 46, _LEGEND, "muted small", "start")
        for rank in range(ranks):
            self.canvas.text(self._middle(rank), 74, f"rank {rank}" if ranks <= 4 else rank, "text strong")
        self.canvas.text(_RIGHT + 8, 74, "held by a rank, of the whole", "muted small", "start")
        self.y = 80.0
        self.says = [f"{title}."]

    def heading(self, group: str, matrices: Sequence[SlicedMatrix]) -> None:
        """Name of a group, and the bytes of its slices."""
        most = max(sum(matrix.slice_bytes(rank) for matrix in matrices) for rank in range(self.ranks))
        sizes = f"{byte_size(most)} of {byte_size(sum(matrix.nbytes for matrix in matrices))}"
        self.canvas.path(f"M{_MARGIN} {self.y + 2:g}H{WIDTH - _MARGIN}", "rule")
        self.canvas.text(_MARGIN, self.y + 20, shorten(group, 60), "text strong", "start")
        self.canvas.text(_RIGHT + 8, self.y + 20, sizes, "text small strong", "start")
        self.says.append(f"{group}: {sizes} on a rank.")
        self.y += _HEADING

    def matrix(self, matrix: SlicedMatrix) -> None:
        """A line of it, and the bar of what follows."""
        canvas, y = self.canvas, self.y
        canvas.text(_MARGIN, y + 16, shorten(matrix.name, 20), "text", "start")
        canvas.text(_MARGIN, y + 32, shorten(matrix.how, 26), "muted small", "start")
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
            canvas.box(_LEFT, self.y - 4, _RIGHT - _LEFT, _BAR, "shared")
            canvas.text((_LEFT + _RIGHT) / 2, self.y + 11, shorten(matrix.joined, 58), "text small strong")
            self.says.append(f"Then {matrix.joined}.")
            self.y += _BAR_LINE

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

    def picture(self) -> Picture:
        return self.canvas.picture(self.y + 4, "\n".join(self.says))


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


def _who(matrix: SlicedMatrix) -> str:
    if matrix.axis is None:
        return "all of it on every rank"
    parts = (f"{start} to {stop - 1} on rank {rank}" for rank, (start, stop) in enumerate(matrix.ranges))
    return f"{'inputs' if matrix.axis == len(matrix.shape) - 1 else 'outputs'} {', '.join(parts)}"
