"""A prompt as block hashing sees it: a chain of blocks, each named by a hash of everything up to its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from minisgl.core.request import Int32Array
from minisgl.kvcache.block_hash import Block, BlockHashCache
from minisgl.viz.radix_tree import Decode
from minisgl.viz.svg import WIDTH, Canvas, Picture, counted, request_colors, shorten

_MARGIN = 14
_COLUMNS = 4
_GAP = 24
_CELL = (WIDTH - 2 * _MARGIN + _GAP) / _COLUMNS
_WIDTH = _CELL - _GAP
_BOX = 86
_LINE = 102
_TOP = 60
_LONGEST = int((_WIDTH - 16) / 7.9)
_MOST = 48
_LEGEND = "blue: cached, referenced  ·  grey: cached, evictable  ·  outline: not cached  ·  arrow: seeds the next hash"


@dataclass(frozen=True, slots=True)
class _Link:
    """One full block of the prompt.

    Args:
        tokens: its own.
        key: hash of the prefix that ends with it.
        block: the cache's; None if the prefix is not cached so far.
    """

    tokens: Int32Array
    key: int
    block: Block | None

    @property
    def state(self) -> str:
        if self.block is None:
            return "not cached"
        where = f"page {self.block.page}, "
        return where + (counted(self.block.ref_count, "reference") if self.block.ref_count else "evictable")


def hash_chain(cache: BlockHashCache, tokens: Sequence[int] | Int32Array, decode: Decode | None = None) -> Picture:
    """Every full block of a prompt: its tokens, its hash, and whether the cache has it, in which page and for how many.

    Args:
        cache: is not changed, and looking at it is no use of it.
        tokens: the prompt. Of more than 48 blocks, the others are left out.
        decode: shows text in the place of token ids.
    """
    prompt = np.asarray(tokens, dtype=np.int32)
    links = list(_chain(cache, prompt))
    cached = sum(link.block is not None for link in links)
    left_over = len(prompt) - len(links) * cache.page_size
    title = f"{counted(len(prompt), 'token')}: {counted(len(links), 'full block')}, {cached} cached"
    canvas, says = Canvas(), [f"{title}."]
    canvas.text(_MARGIN, 26, title, "text strong", "start")
    canvas.text(WIDTH - _MARGIN, 26, f"blocks of {counted(cache.page_size, 'token')}", anchor="end")
    canvas.text(_MARGIN, 46, _LEGEND, "muted small", "start")
    for index, link in enumerate(links):
        text = repr(decode(link.tokens.tolist()))[1:-1] if decode else " ".join(map(str, link.tokens.tolist()))
        says.append(f"Block {index}: {shorten(text, 60)}, hash {link.key:016x}, {link.state}.")
        if index < _MOST:
            line, column = divmod(index, _COLUMNS)
            x, y = _MARGIN + column * _CELL, _TOP + line * _LINE
            _draw_block(canvas, x, y, index, link, text)
            if index + 1 < min(len(links), _MOST):
                _draw_arrow(canvas, x + _WIDTH, y, starts_line=column == _COLUMNS - 1)
    bottom = _TOP + -(-min(len(links), _MOST) // _COLUMNS) * _LINE
    rest = [f"{counted(len(links) - _MOST, 'block')} more"] * (len(links) > _MOST)
    rest += [f"{counted(left_over, 'token')} after the last full block: never cached"] * (left_over > 0)
    if rest:
        canvas.text(_MARGIN, bottom + 10, f"… and {', '.join(rest)}", "muted", "start")
        says.append(f"And {', '.join(rest)}.")
    return canvas.picture(bottom + (22 if rest else 4), "\n".join(says))


def _chain(cache: BlockHashCache, prompt: Int32Array) -> Iterator[_Link]:
    """The blocks of a prompt. As in the cache's own look-up, equal hashes are not enough to be the same."""
    known = {block.key: block for block in cache.blocks()}
    key, parent, unbroken = 0, None, True
    for end in range(cache.page_size, len(prompt) + 1, cache.page_size):
        own = prompt[end - cache.page_size : end]
        key = cache.hash_block(key, own.tobytes())
        block = known.get(key)
        unbroken = unbroken and block is not None and block.tokens == own.tobytes() and block.parent is parent
        parent = block if unbroken else None
        yield _Link(own, key, parent)


def _draw_block(canvas: Canvas, x: float, y: float, index: int, link: _Link, text: str) -> None:
    kind, (fill, ink) = ("empty" if link.block is None else "shared"), ("", "")
    if link.block is not None and link.block.ref_count:
        fill, ink = request_colors(4)
    canvas.box(x, y, _WIDTH, _BOX, kind, fill)
    canvas.text(x + 8, y + 18, f"block {index}", "text small strong", "start", ink)
    canvas.text(x + 8, y + 38, shorten(text, _LONGEST), "text mono", "start", ink)
    canvas.text(x + 8, y + 58, f"{link.key:016x}"[:8] + "…", "text mono", "start", ink)
    canvas.text(x + 8, y + 76, link.state, "text small", "start", ink)


def _draw_arrow(canvas: Canvas, x: float, y: float, starts_line: bool) -> None:
    """From the right edge of a block at ``x`` to the next block, which may start the next line."""
    if starts_line:
        turn, end = y + _BOX + (_LINE - _BOX) / 2, _MARGIN + 20
        canvas.path(f"M{x - 20:g} {y + _BOX}V{turn:g}H{end:g}V{y + _LINE:g}")
        canvas.path(f"M{end - 4:g} {y + _LINE - 5:g}l4 5l4 -5")
    else:
        canvas.path(f"M{x:g} {y + 54:g}h{_GAP}m-6 -4l6 4l-6 4")
