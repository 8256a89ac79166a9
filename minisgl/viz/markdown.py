"""Text for a notebook to render: a value whose display is Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_NUMBER = re.compile(r"[+−-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?( ?%)?")
_NOTHING = ("", "–")


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
    """A table. Columns of numbers are aligned to the right, also where some are missing or have been written by others.

    Args:
        headers: names of the columns.
        rows: one value a column.
        shown: writes a floating-point number; by default with two decimals.
    """
    body = [[_cell(value, shown) for value in row] for row in rows]
    rule = ["---:" if _is_numeric([row[i] for row in body]) else "---" for i in range(len(headers))]
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in [list(headers), rule, *body]))


def _is_numeric(column: Sequence[str]) -> bool:
    cells = [cell for cell in column if cell not in _NOTHING]
    return len(cells) > 0 and all(_NUMBER.fullmatch(cell) for cell in cells)


def _cell(value: object, shown: Callable[[float], str]) -> str:
    text = shown(value) if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
