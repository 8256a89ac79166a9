"""Prefix caches: the radix tree, the chain of block hashes, and rows that are grouped by a shared prefix."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture, counted, runs, shorten
from minisgl.kvcache.block_hash import Block, BlockHashCache
from minisgl.kvcache.radix import Node, RadixCache
from minisgl.request import Int32Array

if TYPE_CHECKING:
    from minisgl.attention.cascade import PrefixGroups

Decode = Callable[[list[int]], str]  # from token ids to text, such as ``llm.tokenizer.decode``


def _as_text(tokens: list[int], decode: Decode | None) -> str:
    return repr(decode(tokens))[1:-1] if decode else " ".join(map(str, tokens))


_TOP, _NODE_LINE, _NODE = 44, 50, 40
_RIGHT = 560


def radix_tree(cache: RadixCache, decode: Decode | None = None) -> Picture:
    """Draw every node below its parent, with its tokens, pages, locks, last use, and its place in the eviction order.

    Drawing the tree counts as no use of it. Of more than 80 nodes, the others are left out. ``decode`` shows text
    instead of token ids.
    """
    drawn, most = list(_lines(cache)), 80
    order = {node: number for number, node in enumerate(_eviction_order(cache), start=1)}
    indent = min(26, 280 / max([1, *(depth for depth, _ in drawn)]))
    counts = f"{counted(len(drawn), 'node')}, {counted(cache.num_pages, 'page')}, {cache.num_evictable} evictable"
    title = f"Radix tree, pages of {counted(cache.page_size, 'token')}"
    canvas = Canvas(title, counts, says=f"{title}: {counts}.")
    canvas.text(MARGIN, _TOP + 14, "root" if drawn else "root: nothing is cached", "text", "start")
    top = {cache.root: _TOP - 18.0}
    for line, (depth, node) in enumerate(drawn):
        x, y, parent = MARGIN + depth * indent, _TOP + 24 + line * _NODE_LINE, node.parent or cache.root
        top[node] = y
        text, tokens = _as_text(node.tokens.tolist(), decode), counted(len(node.tokens), "token")
        state = f"locked {node.lock_count}×" if node.lock_count else f"evictable, no. {order[node]}"
        below = f"node {parent.uid}" if parent.uid else "the root"
        pages = f"page{'s' * (len(node.pages) != 1)} {runs(node.pages.tolist())}"
        says = f"Node {node.uid} below {below}: {shorten(text, 60)} ({tokens}), {pages}, {state}"
        canvas.says.append(f"{says}, last used at {node.last_access}.")
        if line < most:
            elbow, room = x - indent + min(indent / 2, 8), _RIGHT - x - 20
            canvas.path(f"M{elbow:g} {top[parent] + _NODE:g}V{y + _NODE / 2:g}H{x:g}", "rule")
            what = shorten(text, int(room / 7.9)), "text mono"
            where = shorten(f"node {node.uid} · {tokens} · {pages}", int(room / 7)), "text small"
            color = 4 if node.lock_count else None
            canvas.cell(x, y, _RIGHT - x, _NODE, what, where, color=color, kind="shared", anchor="start")
            used = f"last used at time {node.last_access}", "muted small"
            canvas.lines(_RIGHT + 12, y + _NODE / 2, (state, "text strong"), used, anchor="start")
    bottom = _TOP + 24 + min(len(drawn), most) * _NODE_LINE
    if len(drawn) > most:
        canvas.rest(bottom + 16, len(drawn) - most, "node")
        bottom += 24
    canvas.note(bottom + 12, "blue: locked  ·  grey: evictable, no. 1 goes first  ·  time: counts matches and inserts")
    return canvas.picture(bottom + 24)


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


_PER_LINE, _GAP = 4, 24
_STEP = (WIDTH - 2 * MARGIN + _GAP) / _PER_LINE
_WIDTH, _BLOCK, _BLOCK_LINE = _STEP - _GAP, 86, 102


def hash_chain(cache: BlockHashCache, tokens: Sequence[int] | Int32Array, decode: Decode | None = None) -> Picture:
    """Draw every full block of a prompt: its tokens, its hash, and whether the cache has it, where and for how many.

    The cache is not changed, and drawing it counts as no use of it. Of more than 48 blocks, the others are left out.
    ``decode`` shows text instead of token ids.
    """
    prompt, most = np.asarray(tokens, dtype=np.int32), 48
    links = list(_chain(cache, prompt))
    cached = sum(block is not None for *_, block in links)
    title = f"{counted(len(prompt), 'token')}: {counted(len(links), 'full block')}, {cached} cached"
    looks = "blue: cached, referenced  ·  grey: cached, evictable  ·  outline: not cached"
    legend = f"{looks}  ·  arrow: seeds the next hash"
    canvas, top = Canvas(title, f"blocks of {counted(cache.page_size, 'token')}", legend, f"{title}."), 60
    for index, (own, key, block) in enumerate(links):
        text, state, color = _as_text(own.tolist(), decode), "not cached", None
        if block is not None:
            references = counted(block.ref_count, "reference") if block.ref_count else "evictable"
            state, color = f"page {block.page}, {references}", 4 if block.ref_count else None
        canvas.says.append(f"Block {index}: {shorten(text, 60)}, hash {key:016x}, {state}.")
        if index < most:
            x, y = MARGIN + index % _PER_LINE * _STEP, top + index // _PER_LINE * _BLOCK_LINE
            words = shorten(text, int((_WIDTH - 16) / 7.9)), f"{key:016x}"[:8] + "…"
            lines = (f"block {index}", "text small strong"), *((each, "text mono") for each in words)
            kind = "empty" if block is None else "shared"
            canvas.cell(x, y, _WIDTH, _BLOCK, *lines, (state, "text small"), color=color, kind=kind, anchor="start")
            if index + 1 < min(len(links), most):
                _draw_arrow(canvas, x + _WIDTH, y, starts_line=index % _PER_LINE == _PER_LINE - 1)
    bottom = top + -(-min(len(links), most) // _PER_LINE) * _BLOCK_LINE
    left_over = len(prompt) - len(links) * cache.page_size
    rest = [f"{counted(len(links) - most, 'block')} more"] * (len(links) > most)
    rest += [f"{counted(left_over, 'token')} after the last full block: never cached"] * (left_over > 0)
    if rest:
        canvas.text(MARGIN, bottom + 10, f"… and {', '.join(rest)}", "muted", "start")
        canvas.says.append(f"And {', '.join(rest)}.")
    return canvas.picture(bottom + (22 if rest else 4))


def _chain(cache: BlockHashCache, prompt: Int32Array) -> Iterator[tuple[Int32Array, int, Block | None]]:
    """Tokens of each full block of a prompt, hash of the prefix up to its end, and the cache's block if it has one.

    As in the cache's own look-up, an equal hash alone is not a hit.
    """
    known = {block.key: block for block in cache.blocks()}
    key, parent, unbroken = 0, None, True
    for end in range(cache.page_size, len(prompt) + 1, cache.page_size):
        own = prompt[end - cache.page_size : end]
        key = cache.hash_block(key, own.tobytes())
        block = known.get(key)
        unbroken = unbroken and block is not None and block.tokens == own.tobytes() and block.parent is parent
        parent = block if unbroken else None
        yield own, key, parent


def _draw_arrow(canvas: Canvas, x: float, y: float, starts_line: bool) -> None:
    """From the right edge of a block at ``x`` to the next block, which may start the next line."""
    if starts_line:
        turn, end = y + _BLOCK + 7, MARGIN + 20
        canvas.path(f"M{x - 20:g} {y + _BLOCK}V{turn:g}H{end:g}")
        canvas.arrow((end, turn), (end, y + _BLOCK_LINE))
    else:
        canvas.arrow((x, y + _BLOCK / 2), (x + _GAP, y + _BLOCK / 2))


def prefix_groups(
    groups: PrefixGroups, seq_lens: Int32Array, uids: Sequence[int], most_rows: int = 0, most_keys: int = 0
) -> Picture:
    """Draw one plan of the cascade backend: each box is read once, a group's prefix or a row's own keys.

    Args:
        seq_lens, uids: [R] keys of each row, and the ``uid`` of its request.
        most_rows, most_keys: that the picture has room for, if more than there are: to compare pictures.
    """
    left, top, line = 58.0, 58.0, 22
    scale = (WIDTH - MARGIN - left) / max(int(seq_lens.max()), most_keys)
    needed = int(seq_lens.sum())
    title = f"{counted(len(uids), 'row')} with {needed} keys, of which {needed - groups.saved_tokens} are read"
    legend, y = "grey: a prefix, read once for all rows beside it; coloured: a row's own keys", top
    canvas = Canvas(title, legend=legend, says=f"{title}.")
    for rows, shared in _in_groups(groups, len(uids)):
        width = shared * scale
        if shared:
            words = (shared, "text small strong")
            canvas.cell(left, y, width - 2, len(rows) * line - 3, words, kind="shared")
            canvas.says.append(f"{' + '.join(f'r{uids[row]}' for row in rows)}: {shared} keys read once.")
        for row in rows:
            own = int(seq_lens[row]) - shared
            canvas.text(MARGIN, y + 14, f"r{uids[row]}", "text", "start")
            canvas.cell(left + width, y, own * scale, line - 3, (own, "small"), color=uids[row])
            canvas.says.append(f"r{uids[row]}: {own} keys of its own.")
            y += line
    return canvas.picture(max(y, top + most_rows * line) + 8)


def _in_groups(groups: PrefixGroups, num_rows: int) -> Iterator[tuple[list[int], int]]:
    """Rows and the length of their prefix: group by group, then each row that is alone, with none."""
    begin = 0
    for end, length in zip(groups.ends.tolist(), groups.lens.tolist(), strict=True):
        yield groups.members[begin:end].tolist(), length
        begin = end
    for row in np.flatnonzero(groups.shared_lens[:num_rows] == 0).tolist():
        yield [row], 0
