"""Text for a notebook to render: a value whose display is Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Markdown:
    """Shown as rendered Markdown in a notebook, and as it is written anywhere else."""

    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return self.text


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> Markdown:
    """A table. Numbers are aligned to the right, and a floating-point number has two decimals.

    Args:
        headers: names of the columns.
        rows: one value a column.
    """
    body = [list(row) for row in rows]
    numeric = [all(isinstance(row[i], (int, float)) for row in body) for i in range(len(headers))]
    rule = ["---:" if right else "---" for right in numeric]
    lines = [list(headers), rule, *([_cell(value) for value in row] for row in body)]
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines))


def _cell(value: object) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
