"""What a decode step reads when rows that begin alike are grouped: a prefix once, then the rest of each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from minisgl.core.request import Int32Array
from minisgl.viz.svg import WIDTH, Canvas, Picture, counted, request_colors

if TYPE_CHECKING:
    from minisgl.attention.shared_prefix import PrefixGroups

_MARGIN = 14
_LEFT = 58.0
_TOP = 58.0
_LINE = 22
_BOX = 19


def prefix_groups(
    groups: PrefixGroups, seq_lens: Int32Array, uids: Sequence[int], most_rows: int = 0, most_keys: int = 0
) -> Picture:
    """One plan of the cascade backend. A box is read once: a group's prefix, as high as its rows, or a row's own keys.

    Args:
        groups: of `SharedPrefixes`.
        seq_lens: [R] keys of each row.
        uids: of the rows' requests.
        most_rows, most_keys: that the picture has room for, if more than there are: to compare pictures.
    """
    scale = (WIDTH - _MARGIN - _LEFT) / max(int(seq_lens.max()), most_keys)
    needed = int(seq_lens.sum())
    title = f"{counted(len(uids), 'row')} with {needed} keys, of which {needed - groups.saved} are read"
    canvas, says, y = Canvas(), [f"{title}."], _TOP
    canvas.text(_MARGIN, 26, title, "text strong", "start")
    canvas.text(
        _MARGIN,
        46,
        "grey: a prefix, read once for all rows beside it; coloured: a row's own keys",
        "muted small",
        "start",
    )
    for rows, shared in _in_order(groups, len(uids)):
        width = shared * scale
        if shared:
            canvas.box(_LEFT, y, width - 2, len(rows) * _LINE - (_LINE - _BOX), "shared")
            canvas.text(_LEFT + width / 2, y + len(rows) * _LINE / 2 + 3, shared, "text small strong")
            says.append(f"{' + '.join(f'r{uids[row]}' for row in rows)}: {shared} keys read once.")
        for row in rows:
            own = int(seq_lens[row]) - shared
            fill, ink = request_colors(uids[row])
            canvas.text(_MARGIN, y + 14, f"r{uids[row]}", "text", "start")
            canvas.box(_LEFT + width, y, own * scale, _BOX, fill=fill)
            canvas.text(_LEFT + width + own * scale / 2, y + 14, own, "small", fill=ink)
            says.append(f"r{uids[row]}: {own} keys of its own.")
            y += _LINE
    return canvas.picture(max(y, _TOP + most_rows * _LINE) + 8, "\n".join(says))


def _in_order(groups: PrefixGroups, num_rows: int) -> Iterator[tuple[list[int], int]]:
    """Rows and the length of their prefix: group by group, then each row that is alone, with none."""
    begin = 0
    for end, length in zip(groups.ends.tolist(), groups.lens.tolist(), strict=True):
        yield groups.members[begin:end].tolist(), length
        begin = end
    for row in np.flatnonzero(groups.shared_lens[:num_rows] == 0).tolist():
        yield [row], 0
