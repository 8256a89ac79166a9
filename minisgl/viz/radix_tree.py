"""A radix tree as a picture: a line for each node, indented by its depth."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from minisgl.kvcache.radix import Node, RadixCache
from minisgl.viz.svg import WIDTH, Canvas, Picture, counted, request_colors, runs, shorten

Decode = Callable[[list[int]], str]
"""From token ids to text, such as ``llm.tokenizer.decode``."""

_MARGIN = 14
_TOP = 44
_LINE = 50
_BOX = 40
_RIGHT = 560
_DEEPEST = 280
_INDENT = 26
_MOST = 80
_CHARACTER = 7.9
_SMALL_CHARACTER = 7.0
_LEGEND = "blue: locked  ·  grey: evictable, no. 1 goes first  ·  time: counts every match and insert"


def radix_tree(cache: RadixCache, decode: Decode | None = None) -> Picture:
    """Every node with the tokens of its edge, its pages, its locks, and when it was last used.

    An unlocked node says as which it would be evicted, if all that can go had to go now.

    Args:
        cache: the tree; it is not changed, and looking at it is no use of it.
        decode: shows text in the place of token ids.
    """
    drawn = list(_lines(cache))
    order = {node: number for number, node in enumerate(_eviction_order(cache), start=1)}
    deepest = max((depth for depth, _ in drawn), default=1)
    indent = min(_INDENT, _DEEPEST / max(deepest, 1))
    counts = f"{counted(len(drawn), 'node')}, {counted(cache.num_pages, 'page')}, {cache.num_evictable} evictable"
    size = counted(cache.page_size, "token")
    canvas = Canvas()
    canvas.text(_MARGIN, 26, f"Radix tree, pages of {size}", "text strong", "start")
    canvas.text(WIDTH - _MARGIN, 26, counts, anchor="end")
    canvas.text(_MARGIN, _TOP + 14, "root" if drawn else "root: nothing is cached", "text", "start")
    says = [f"Radix tree, pages of {size}: {counts}."]
    top = {cache.root: _TOP - 18.0}
    for line, (depth, node) in enumerate(drawn):
        y = top[node] = _TOP + 24 + line * _LINE
        tokens = node.tokens.tolist()
        text = repr(decode(tokens))[1:-1] if decode else " ".join(map(str, tokens))
        state = f"locked {node.lock_count}×" if node.lock_count else f"evictable, no. {order[node]}"
        parent = node.parent or cache.root
        says.append(
            f"Node {node.uid} below {f'node {parent.uid}' if parent.uid else 'the root'}: {shorten(text, 60)} "
            f"({counted(len(tokens), 'token')}), pages {runs(node.pages.tolist())}, {state}, last used at "
            f"{node.last_access}."
        )
        if line < _MOST:
            x = _MARGIN + depth * indent
            elbow = x - indent + min(indent / 2, 8)
            canvas.path(f"M{elbow:g} {top[parent] + _BOX:g}V{y + _BOX / 2:g}H{x:g}", "rule")
            _draw_node(canvas, x, y, node, text, state)
    if len(drawn) > _MOST:
        rest = f"… and {counted(len(drawn) - _MOST, 'node')} more"
        canvas.text(_MARGIN, _TOP + 40 + _MOST * _LINE, rest, "muted", "start")
    bottom = _TOP + 24 + min(len(drawn), _MOST) * _LINE + (24 if len(drawn) > _MOST else 0)
    canvas.text(_MARGIN, bottom + 12, _LEGEND, "muted small", "start")
    return canvas.picture(bottom + 24, "\n".join(says))


def _draw_node(canvas: Canvas, x: float, y: float, node: Node, text: str, state: str) -> None:
    fill, ink = request_colors(4) if node.lock_count else ("", "")
    canvas.box(x, y, _RIGHT - x, _BOX, "shared", fill)
    room = _RIGHT - x - 20
    pages = "page " if len(node.pages) == 1 else "pages "
    where = f"node {node.uid} · {counted(len(node.tokens), 'token')} · {pages}{runs(node.pages.tolist())}"
    canvas.text(x + 10, y + 17, shorten(text, int(room / _CHARACTER)), "text mono", "start", ink)
    canvas.text(x + 10, y + 33, shorten(where, int(room / _SMALL_CHARACTER)), "text small", "start", ink)
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
