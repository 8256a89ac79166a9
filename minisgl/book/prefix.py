"""Prefix caches: the radix tree, the chain of block hashes, and rows that are grouped by a shared prefix."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture, counted, request_colors, runs, shorten
from minisgl.kvcache.block_hash import Block, BlockHashCache
from minisgl.kvcache.radix import Node, RadixCache
from minisgl.request import Int32Array

if TYPE_CHECKING:
    from minisgl.attention.cascade import PrefixGroups

Decode = Callable[[list[int]], str]
"""From token ids to text, such as ``llm.tokenizer.decode``."""


def _as_text(tokens: list[int], decode: Decode | None) -> str:
    return repr(decode(tokens))[1:-1] if decode else " ".join(map(str, tokens))


# -- the radix tree --------------------------------------------------------------------------------------------------

_TOP, _NODE_LINE, _NODE = 44, 50, 40
_RIGHT = 560


def radix_tree(cache: RadixCache, decode: Decode | None = None) -> Picture:
    """Draw every node below its parent, with its tokens, pages, locks, last use, and its place in the eviction order.

    Args:
        cache: the tree; drawing it counts as no use of it. Of more than 80 nodes, the others are left out.
        decode: shows text instead of token ids.
    """
    drawn = list(_lines(cache))
    most, shown = 80, min(len(drawn), 80)
    order = {node: number for number, node in enumerate(_eviction_order(cache), start=1)}
    indent = min(26, 280 / max([1, *(depth for depth, _ in drawn)]))
    counts = f"{counted(len(drawn), 'node')}, {counted(cache.num_pages, 'page')}, {cache.num_evictable} evictable"
    title = f"Radix tree, pages of {counted(cache.page_size, 'token')}"
    canvas, says = Canvas(title, counts), [f"{title}: {counts}."]
    canvas.text(MARGIN, _TOP + 14, "root" if drawn else "root: nothing is cached", "text", "start")
    top = {cache.root: _TOP - 18.0}
    for line, (depth, node) in enumerate(drawn):
        y = top[node] = _TOP + 24 + line * _NODE_LINE
        text = _as_text(node.tokens.tolist(), decode)
        state = f"locked {node.lock_count}×" if node.lock_count else f"evictable, no. {order[node]}"
        parent = node.parent or cache.root
        says.append(
            f"Node {node.uid} below {f'node {parent.uid}' if parent.uid else 'the root'}: {shorten(text, 60)} "
            f"({counted(len(node.tokens), 'token')}), pages {runs(node.pages.tolist())}, {state}, last used at "
            f"{node.last_access}."
        )
        if line < most:
            x = MARGIN + depth * indent
            elbow = x - indent + min(indent / 2, 8)
            canvas.path(f"M{elbow:g} {top[parent] + _NODE:g}V{y + _NODE / 2:g}H{x:g}", "rule")
            _draw_node(canvas, x, y, node, text, state)
    if len(drawn) > most:
        canvas.rest(_TOP + 40 + most * _NODE_LINE, len(drawn) - most, "node")
    bottom = _TOP + 24 + shown * _NODE_LINE + (24 if len(drawn) > most else 0)
    legend = "blue: locked  ·  grey: evictable, no. 1 goes first  ·  time: counts every match and insert"
    canvas.text(MARGIN, bottom + 12, legend, "muted small", "start")
    return canvas.picture(bottom + 24, "\n".join(says))


def _draw_node(canvas: Canvas, x: float, y: float, node: Node, text: str, state: str) -> None:
    fill, ink = request_colors(4) if node.lock_count else ("", "")
    canvas.box(x, y, _RIGHT - x, _NODE, "shared", fill)
    room = _RIGHT - x - 20
    pages = "page " if len(node.pages) == 1 else "pages "
    where = f"node {node.uid} · {counted(len(node.tokens), 'token')} · {pages}{runs(node.pages.tolist())}"
    canvas.text(x + 10, y + 17, shorten(text, int(room / 7.9)), "text mono", "start", ink)
    canvas.text(x + 10, y + 33, shorten(where, int(room / 7.0)), "text small", "start", ink)
    canvas.text(_RIGHT + 12, y + 17, state, "text strong", "start")
    canvas.text(_RIGHT + 12, y + 33, f"last used at time {node.last_access}", "muted small", "start")


def _lines(cache: RadixCache) -> Iterator[tuple[int, Node]]:
    """(depth, node), children below their parents and in the order in which they came."""
    stack = [(1, child) for child in reversed(cache.root.children.values())]
    while stack:
        depth, node = stack.pop()
        yield depth, node
        stack.extend((depth + 1, child) for child in reversed(node.children.values()))


def _eviction_order(cache: RadixCache) -> Iterator[Node]:
    """Nodes in the order in which `RadixCache.evict` would take them: leaves first, the least recently used before."""
    children = {node: len(node.children) for node in cache.nodes()}
    leaves = [(node.last_access, node.uid, node) for node in children if not (node.children or node.lock_count)]
    heapq.heapify(leaves)
    while leaves:
        _, _, node = heapq.heappop(leaves)
        yield node
        parent = node.parent
        if parent in children:
            children[parent] -= 1
            if children[parent] == 0 and parent.lock_count == 0:
                heapq.heappush(leaves, (parent.last_access, parent.uid, parent))


# -- block hashes ----------------------------------------------------------------------------------------------------

_PER_LINE, _GAP = 4, 24
_STEP = (WIDTH - 2 * MARGIN + _GAP) / _PER_LINE
_BLOCK, _BLOCK_LINE = 86, 102


@dataclass(frozen=True, slots=True)
class _Link:
    """One full block of a prompt: its tokens, the hash of the prefix up to its end, and the cache's block if any."""

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
    """Draw every full block of a prompt: its tokens, its hash, and whether the cache has it, where and for how many.

    Args:
        cache: is not changed, and drawing it counts as no use of it.
        tokens: the prompt. Of more than 48 blocks, the others are left out.
        decode: shows text instead of token ids.
    """
    prompt, most = np.asarray(tokens, dtype=np.int32), 48
    links = list(_chain(cache, prompt))
    cached = sum(link.block is not None for link in links)
    left_over = len(prompt) - len(links) * cache.page_size
    title = f"{counted(len(prompt), 'token')}: {counted(len(links), 'full block')}, {cached} cached"
    legend = (
        "blue: cached, referenced  ·  grey: cached, evictable  ·  outline: not cached  ·  arrow: seeds the next hash"
    )
    canvas, says, top = Canvas(title, f"blocks of {counted(cache.page_size, 'token')}", legend), [f"{title}."], 60
    for index, link in enumerate(links):
        text = _as_text(link.tokens.tolist(), decode)
        says.append(f"Block {index}: {shorten(text, 60)}, hash {link.key:016x}, {link.state}.")
        if index < most:
            line, column = divmod(index, _PER_LINE)
            x, y = MARGIN + column * _STEP, top + line * _BLOCK_LINE
            _draw_block(canvas, x, y, index, link, text)
            if index + 1 < min(len(links), most):
                _draw_arrow(canvas, x + _STEP - _GAP, y, starts_line=column == _PER_LINE - 1)
    bottom = top + -(-min(len(links), most) // _PER_LINE) * _BLOCK_LINE
    rest = [f"{counted(len(links) - most, 'block')} more"] * (len(links) > most)
    rest += [f"{counted(left_over, 'token')} after the last full block: never cached"] * (left_over > 0)
    if rest:
        canvas.text(MARGIN, bottom + 10, f"… and {', '.join(rest)}", "muted", "start")
        says.append(f"And {', '.join(rest)}.")
    return canvas.picture(bottom + (22 if rest else 4), "\n".join(says))


def _chain(cache: BlockHashCache, prompt: Int32Array) -> Iterator[_Link]:
    """The blocks of a prompt. As in the cache's own look-up, an equal hash alone is not a hit."""
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
    width = _STEP - _GAP
    canvas.box(x, y, width, _BLOCK, kind, fill)
    canvas.text(x + 8, y + 18, f"block {index}", "text small strong", "start", ink)
    canvas.text(x + 8, y + 38, shorten(text, int((width - 16) / 7.9)), "text mono", "start", ink)
    canvas.text(x + 8, y + 58, f"{link.key:016x}"[:8] + "…", "text mono", "start", ink)
    canvas.text(x + 8, y + 76, link.state, "text small", "start", ink)


def _draw_arrow(canvas: Canvas, x: float, y: float, starts_line: bool) -> None:
    """From the right edge of a block at ``x`` to the next block, which may start the next line."""
    if starts_line:
        turn, end = y + _BLOCK + (_BLOCK_LINE - _BLOCK) / 2, MARGIN + 20
        canvas.path(f"M{x - 20:g} {y + _BLOCK}V{turn:g}H{end:g}V{y + _BLOCK_LINE:g}")
        canvas.path(f"M{end - 4:g} {y + _BLOCK_LINE - 5:g}l4 5l4 -5")
    else:
        canvas.path(f"M{x:g} {y + 54:g}h{_GAP}m-6 -4l6 4l-6 4")


# -- rows with a shared prefix ---------------------------------------------------------------------------------------


def prefix_groups(
    groups: PrefixGroups, seq_lens: Int32Array, uids: Sequence[int], most_rows: int = 0, most_keys: int = 0
) -> Picture:
    """Draw one plan of the cascade backend: each box is read once, a group's prefix or a row's own keys.

    Args:
        groups: of `PrefixGroupTracker`.
        seq_lens: [R] keys of each row.
        uids: of the rows' requests.
        most_rows, most_keys: that the picture has room for, if more than there are: to compare pictures.
    """
    left, top, line = 58.0, 58.0, 22
    scale = (WIDTH - MARGIN - left) / max(int(seq_lens.max()), most_keys)
    needed = int(seq_lens.sum())
    title = f"{counted(len(uids), 'row')} with {needed} keys, of which {needed - groups.saved_tokens} are read"
    legend = "grey: a prefix, read once for all rows beside it; coloured: a row's own keys"
    canvas, says, y = Canvas(title, legend=legend), [f"{title}."], top
    for rows, shared in _in_groups(groups, len(uids)):
        width = shared * scale
        if shared:
            canvas.box(left, y, width - 2, len(rows) * line - 3, "shared")
            canvas.text(left + width / 2, y + len(rows) * line / 2 + 3, shared, "text small strong")
            says.append(f"{' + '.join(f'r{uids[row]}' for row in rows)}: {shared} keys read once.")
        for row in rows:
            own = int(seq_lens[row]) - shared
            fill, ink = request_colors(uids[row])
            canvas.text(MARGIN, y + 14, f"r{uids[row]}", "text", "start")
            canvas.box(left + width, y, own * scale, line - 3, fill=fill)
            canvas.text(left + width + own * scale / 2, y + 14, own, "small", fill=ink)
            says.append(f"r{uids[row]}: {own} keys of its own.")
            y += line
    return canvas.picture(max(y, top + most_rows * line) + 8, "\n".join(says))


def _in_groups(groups: PrefixGroups, num_rows: int) -> Iterator[tuple[list[int], int]]:
    """Rows and the length of their prefix: group by group, then each row that is alone, with none."""
    begin = 0
    for end, length in zip(groups.ends.tolist(), groups.lens.tolist(), strict=True):
        yield groups.members[begin:end].tolist(), length
        begin = end
    for row in np.flatnonzero(groups.shared_lens[:num_rows] == 0).tolist():
        yield [row], 0
