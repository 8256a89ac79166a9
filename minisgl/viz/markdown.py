"""Text for a notebook to render: a value whose display is Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Markdown:
    """Shown as rendered Markdown in a notebook, and as it is written anywhere else."""

    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return self.text


def table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], shown: Callable[[float], str] = "{:.2f}".format
) -> Markdown:
    """A table. Numbers are aligned to the right.

    Args:
        headers: names of the columns.
        rows: one value a column.
        shown: writes a floating-point number; by default with two decimals.
    """
    body = [list(row) for row in rows]
    numeric = [all(isinstance(row[i], (int, float)) for row in body) for i in range(len(headers))]
    rule = ["---:" if right else "---" for right in numeric]
    lines = [list(headers), rule, *([_cell(value, shown) for value in row] for row in body)]
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines))


def _cell(value: object, shown: Callable[[float], str]) -> str:
    text = shown(value) if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
