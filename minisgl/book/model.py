"""What a model computes: attention weights, rotary positions, a layer, packed weights, next-token probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture, Point, circle, counted, request_colors, shorten, visible
from minisgl.context import AttentionSpec
from minisgl.layers.linear import MergedColumnParallelLinear
from minisgl.layers.mlp import GatedMLP, MoE
from minisgl.layers.rotary import Rotary, rotate
from minisgl.models.decoder import DecoderLayer

LARGEST_CELL = 30.0
_LONGEST = 8
"""Characters of a token's text."""


def attention_map(maps: Mapping[str, torch.Tensor], texts: Sequence[str]) -> Picture:
    """Draw a panel for each head: the area of a square is the weight with which its row's token reads its column's.

    Args:
        maps: title → [T, T] weights; each row sums to 1 and is 0 right of the diagonal.
        texts: [T] text of each token.
    """
    panel, label, top = (WIDTH - 2 * MARGIN) / len(maps), 84, 62
    cell = min((panel - label - 10) / len(texts), LARGEST_CELL)
    canvas = Canvas()
    says: list[str] = []
    for number, (title, weights) in enumerate(maps.items()):
        x = MARGIN + number * panel
        canvas.text(x, 26, title, "text strong", "start")
        _draw_head(canvas, x + label, top, cell, weights, texts)
        reads = ", ".join(f"{row} reads {column}" for row, column in enumerate(weights.argmax(dim=1).tolist()))
        says.append(f"{title}. What each token reads most: {reads}.")
    bottom = top + len(texts) * cell
    legend = "row: the token that reads  ·  column: the token that is read  ·  area: weight, a full cell is 1"
    canvas.text(MARGIN, bottom + 22, legend, "muted small", "start")
    return canvas.picture(bottom + 34, "\n".join(says))


def _draw_head(
    canvas: Canvas, left: float, top: float, cell: float, weights: torch.Tensor, texts: Sequence[str]
) -> None:
    for row, text in enumerate(texts):
        y = top + row * cell
        canvas.text(left - 22, y + cell / 2 + 5, shorten(visible(text), _LONGEST), "text mono", "end")
        canvas.text(left - 4, y + cell / 2 + 4, row, "muted small", "end")
        canvas.text(left + (row + 0.5) * cell, top - 8, row, "muted small")
        for column, weight in enumerate(weights[row, : row + 1].tolist()):
            canvas.box(left + column * cell, y, cell, cell)
            if weight >= 0.005:
                side = (cell - 2) * weight**0.5
                inset = (cell - side) / 2
                canvas.box(left + column * cell + inset, y + inset, side, side, fill=request_colors(0)[0])


def softmax_panels(scores: torch.Tensor, texts: Sequence[str]) -> Picture:
    """Draw attention of one head in three steps: scores, scores with the future hidden, weights.

    Args:
        scores: [T, T] q·k / √d of a query (row) and a key (column); T is at most 6.
        texts: [T] text of each token.
    """
    count = len(texts)
    hidden = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), -torch.inf)
    weights = hidden.softmax(dim=-1)
    canvas, label, gap = Canvas(), 64.0, 18.0
    cell = (WIDTH - 2 * MARGIN - label - 2 * gap) / (3 * count)
    height, top = min(cell, 40.0), 66.0
    for panel, title in enumerate(("1. scores q·k / √d", "2. the future is hidden", "3. softmax, in %")):
        left = MARGIN + label + panel * (count * cell + gap)
        canvas.text(left, 26, title, "text strong", "start")
        for column, text in enumerate(texts):
            canvas.text(left + (column + 0.5) * cell, top - 8, shorten(visible(text), 5), "muted small")
        for row in range(count):
            y = top + row * height
            for column in range(count):
                x = left + column * cell
                if panel == 2:
                    filled = float(weights[row, column]) * (height - 2)
                    canvas.box(x + 1, y + height - 1 - filled, cell - 2, filled, "shade")
                canvas.box(x + 1, y + 1, cell - 2, height - 2)
                words = f"{float(scores[row, column]):.1f}".replace("-", "−")
                if panel and column > row:
                    words = "−∞" if panel == 1 else "–"
                elif panel == 2:
                    words = _percent(float(weights[row, column]))
                kind = "muted small" if panel and column > row else "text small"
                canvas.text(x + cell / 2, y + height / 2 + 4, words, kind)
    says = []
    for row, text in enumerate(texts):
        canvas.text(MARGIN + label - 6, top + row * height + height / 2 + 4, shorten(visible(text), 7), "text", "end")
        reads = ", ".join(f"{texts[column]!r} {_percent(float(weights[row, column]))}" for column in range(row + 1))
        says.append(f"{text!r} reads, in %: {reads}.")
    bottom = top + count * height
    canvas.text(
        MARGIN, bottom + 22, "row: the token whose query it is  ·  column: the token whose key", "muted small", "start"
    )
    return canvas.picture(bottom + 34, "\n".join(says))


def head_sharing(layouts: Mapping[str, AttentionSpec]) -> Picture:
    """Draw which query heads read which KV head; a query head has its KV head's colour. At most 16 query heads."""
    canvas, left, top, line = Canvas(), MARGIN + 150.0, 20.0, 92.0
    says = []
    for number, (name, spec) in enumerate(layouts.items()):
        y, group = top + number * line, spec.num_heads // spec.num_kv_heads
        width = (WIDTH - MARGIN - left) / spec.num_heads
        canvas.text(MARGIN, y + 18, name, "text strong", "start")
        canvas.text(MARGIN, y + 36, f"{spec.num_heads} query heads", "muted small", "start")
        canvas.text(MARGIN, y + 54, counted(spec.num_kv_heads, "KV head"), "muted small", "start")
        for head in range(spec.num_heads):
            fill, ink = request_colors(head // group)
            x = left + head * width
            canvas.box(x + 3, y, width - 6, 24, fill=fill)
            canvas.text(x + width / 2, y + 17, f"q{head}", "text small", fill=ink)
            canvas.path(f"M{x + width / 2:g} {y + 24:g}V{y + 40:g}", "rule")
        for head in range(spec.num_kv_heads):
            fill, ink = request_colors(head)
            x = left + head * group * width
            canvas.box(x + 3, y + 40, group * width - 6, 24, fill=fill)
            canvas.text(x + group * width / 2, y + 57, f"k{head}, v{head}", "text small", fill=ink)
        says.append(
            f"{name}: {spec.num_heads} query heads, {group} for each of {counted(spec.num_kv_heads, 'KV head')}."
        )
    return canvas.picture(top + len(layouts) * line - 8, "\n".join(says))


# -- rotary positions ------------------------------------------------------------------------------------------------

_RADIUS = 56.0
_DIAL_TOP, _DIAL = 48, 2 * (_RADIUS + 24)


def rotation_dials(rotary: Rotary, pairs: Sequence[int], positions: Sequence[int]) -> Picture:
    """Draw a dial for each pair of dimensions, with an arrow for each position: a vector that points right, turned.

    Args:
        rotary: a live embedding; the arrows come from `rotate`.
        pairs: at most four; pair ``i`` is the dimensions ``i`` and ``i + head_dim / 2``.
        positions: ascending; the first and the last are always labelled, the others where there is room.
    """
    half = rotary.table.shape[1] // 2
    vectors = torch.cat([torch.ones(half), torch.zeros(half)]).expand(len(positions), 1, -1)
    rotation = rotary(torch.tensor(positions, dtype=torch.int32), torch.float32)
    turned = rotate(vectors, rotation)[:, 0]
    canvas = Canvas(
        f"The same vector at the positions {positions[0]} to {positions[-1]}, in {len(pairs)} of {half} pairs"
    )
    width = (WIDTH - 2 * MARGIN) / len(pairs)
    says: list[str] = []
    for number, pair in enumerate(pairs):
        points = [(float(row[pair]), float(row[pair + half])) for row in turned]
        step = math.degrees(math.atan2(float(rotary.table[1, pair + half]), float(rotary.table[1, pair])))
        x = MARGIN + (number + 0.5) * width
        _draw_dial(canvas, x, points, positions)
        canvas.text(x, _DIAL_TOP + _DIAL + 16, f"pair {pair}: dimensions {pair} and {pair + half}", "text small")
        canvas.text(x, _DIAL_TOP + _DIAL + 33, f"{step:.3g}° a position", "muted small")
        says.append(f"Pair {pair}, dimensions {pair} and {pair + half}, turns by {step:.3g} degrees a position.")
    return canvas.picture(_DIAL_TOP + _DIAL + 46, "\n".join(says))


def _draw_dial(canvas: Canvas, x: float, points: Sequence[Point], positions: Sequence[int]) -> None:
    """``points`` are (cos, sin) and turn counter-clockwise from the right."""
    y = _DIAL_TOP + _DIAL / 2
    canvas.path(circle(x, y, _RADIUS), "rule")
    placed: list[Point] = []
    for index in (0, len(points) - 1, *range(1, len(points) - 1)):
        cos, sin = points[index]
        dot = x + cos * _RADIUS, y - sin * _RADIUS
        label = x + cos * (_RADIUS + 14), y - sin * (_RADIUS + 14)
        canvas.path(f"M{x:g} {y:g}L{dot[0]:g} {dot[1]:g}", "rule")
        canvas.arrow((x, y), dot, fill=request_colors(0)[0], thickness=1.2)
        if all(math.dist(label, other) >= 16 for other in placed):  # neither label covers the other
            placed.append(label)
            canvas.text(label[0], label[1] + 4, positions[index], "text small")


# -- a layer ---------------------------------------------------------------------------------------------------------


def layer_flow(layer: DecoderLayer) -> Picture:
    """Draw both blocks of a live layer with the widths of their weights; ``T`` is the number of tokens in the step."""
    attention, mlp, spec = layer.self_attn, layer.mlp, layer.self_attn.spec
    attention_steps = [
        ("qkv_proj", _widths(attention.qkv_proj.weight.shape)),
        ("q, k, v heads", f"{spec.num_heads} + {spec.num_kv_heads} + {spec.num_kv_heads}"),
        (
            "rotate" if attention.q_norm is None else "norm, rotate",
            f"q, k: {spec.num_heads + spec.num_kv_heads} heads",
        ),
        ("attend", f"T × {spec.num_heads} × {spec.head_dim}"),
        ("o_proj", _widths(attention.o_proj.weight.shape)),
    ]
    if isinstance(mlp, MoE):
        experts, rows, hidden = mlp.experts.gate_up_proj.shape
        mlp_steps = [
            ("router", _widths(mlp.gate.weight.shape)),
            ("top k", f"{mlp.experts_per_token} of {experts}"),
            ("experts", f"{hidden} → {rows // 2} → {hidden}"),
            ("weighted sum", f"T × {hidden}"),
        ]
    else:
        assert isinstance(mlp, GatedMLP)
        mlp_steps = [
            ("gate_up_proj", _widths(mlp.gate_up_proj.weight.shape)),
            ("silu(gate) × up", f"T × {mlp.down_proj.weight.shape[1]}"),
            ("down_proj", _widths(mlp.down_proj.weight.shape)),
        ]
    canvas, width = Canvas(), layer.input_layernorm.weight.shape[0]
    says = []
    for number, (title, steps) in enumerate((("attention block", attention_steps), ("MLP block", mlp_steps))):
        _draw_block(canvas, 14.0 + 142 * number, title, steps, width)
        words = ", ".join(" ".join(step) for step in steps)
        says.append(f"{title}: x is added to the stream and normed, then {words}.")
    return canvas.picture(298.0, "\n".join(says))


def _widths(shape: Sequence[int]) -> str:
    return f"{shape[1]} → {shape[0]}"


def _draw_block(canvas: Canvas, y: float, title: str, steps: Sequence[tuple[str, str]], width: int) -> None:
    """What the block computes above, the residual stream of a ``width`` below it."""
    height, gap, norm = 52.0, 16.0, 78.0
    top = y + 24
    canvas.text(MARGIN, y + 12, title, "text strong", "start")
    middle, stream = top + height / 2, top + 88.0
    left, right = MARGIN + 48.0, WIDTH - MARGIN - 22.0
    box = (right - left - norm - len(steps) * gap) / len(steps)
    for lane, name in ((middle, "x"), (stream, "stream")):
        _draw_arrow(canvas, MARGIN, left, lane)
        canvas.text(MARGIN, lane - 7, name, "muted small", "start")
    canvas.box(left, top, norm, stream + 14 - top, "shared")
    canvas.text(left + norm / 2, top + 42, "add,", "text small strong")
    canvas.text(left + norm / 2, top + 59, "then norm", "text small strong")
    x = left + norm
    for name, detail in steps:
        _draw_arrow(canvas, x, x + gap, middle)
        canvas.box(x + gap, top, box, height)
        canvas.text(x + gap + box / 2, top + 22, name, "text small strong")
        canvas.text(x + gap + box / 2, top + 40, detail, "muted small")
        x += gap + box
    _draw_arrow(canvas, x, WIDTH - MARGIN, middle)
    canvas.text(WIDTH - MARGIN, middle - 7, "x", "muted small", "end")
    _draw_arrow(canvas, left + norm, WIDTH - MARGIN, stream)
    words = f"the sum, T × {width}, to the next norm"
    canvas.text((left + norm + right) / 2, stream - 7, words, "muted small")


def _draw_arrow(canvas: Canvas, start: float, stop: float, y: float) -> None:
    canvas.path(f"M{start:g} {y:g}H{stop:g}")
    canvas.path(f"M{stop:g} {y:g}l-7 -4v8z", "text")


# -- packed weights --------------------------------------------------------------------------------------------------


def packed_rows(modules: Mapping[str, MergedColumnParallelLinear]) -> Picture:
    """Draw checkpoint tensors on the left, and on the right the one parameter whose rows they fill.

    Args:
        modules: one to three live layers by name; they may be on the meta device.
    """
    canvas, says = Canvas(), []
    column = (WIDTH - 2 * MARGIN) / len(modules)
    lowest = 0.0
    for number, (name, module) in enumerate(modules.items()):
        left = MARGIN + number * column
        rows, width = module.weight.shape
        canvas.text(left, 26, f"{name}.weight", "text strong", "start")
        canvas.text(left, 46, f"{rows:,} × {width:,}, filled by", "muted small", "start")
        bottom, filled = _draw_parts(canvas, module, left, column - 24)
        lowest = max(lowest, bottom)
        says.append(f"{name}.weight, {rows} × {width}: {filled}.")
    return canvas.picture(lowest + 14, "\n".join(says))


def _draw_parts(canvas: Canvas, module: MergedColumnParallelLinear, left: float, width: float) -> tuple[float, str]:
    """One column; returns where it ends, and what it says."""
    parts = [part for part in module.weight_parts() if part.parameter == "weight"]
    rows, apart = module.weight.shape[0], 10.0
    box, gap = 0.38 * width, 0.16 * width
    right = left + box + gap
    source_y, target_y = 66.0, 66.0 + (len(parts) - 1) * apart / 2
    filled = []
    for number, part in enumerate(parts):
        region = part.index[0]
        assert isinstance(region, slice)
        start, stop, _ = region.indices(rows)
        height = max(24.0, 210.0 * (stop - start) / rows)
        fill, ink = request_colors(number)
        canvas.path(
            f"M{left + box:g} {source_y:g}L{right:g} {target_y:g}M{left + box:g} {source_y + height:g}"
            f"L{right:g} {target_y + height:g}",
            "rule",
        )
        canvas.box(left, source_y, box, height, fill=fill)
        canvas.box(right, target_y, width - box - gap, height, fill=fill)
        name = part.source.removesuffix(".weight")
        canvas.text(left + box / 2, source_y + height / 2 + 5, name, "text small strong", fill=ink)
        label = f"rows {start:,}–{stop - 1:,}"
        canvas.text(right + (width - box - gap) / 2, target_y + height / 2 + 5, label, "text small", fill=ink)
        filled.append(f"{name} fills rows {start} to {stop - 1}")
        source_y += height + apart
        target_y += height
    return source_y - apart, "; ".join(filled)


# -- the next token --------------------------------------------------------------------------------------------------


def distribution(stages: Mapping[str, torch.Tensor], text: Callable[[int], str], columns: int = 9) -> Picture:
    """Draw a row for each stage of a sampler: the probability of the likeliest tokens, and of all others.

    Args:
        stages: name → [vocab] weights after the stage, not negative, not normalised; 0 is a token that was cut.
        text: of a token id.
        columns: how many tokens get a column of their own.
    """
    shares = {name: weights.double().cpu() / weights.double().sum().cpu() for name, weights in stages.items()}
    first = next(iter(shares.values()))
    highest = torch.stack(list(shares.values())).amax(0)
    tokens = highest.argsort(descending=True, stable=True)[:columns]
    tokens = tokens[first[tokens].argsort(descending=True, stable=True)]
    canvas = Canvas("The distribution of the next token, stage by stage")
    left, top, line, tallest = MARGIN + 150, 78, 96, 54
    step = (WIDTH - MARGIN - left) / (columns + 1)
    middles = [left + (column + 0.5) * step for column in range(columns + 1)]
    for middle, token in zip(middles, tokens.tolist(), strict=False):
        canvas.text(middle, 54, shorten(visible(text(token)), _LONGEST), "text mono")
    canvas.text(middles[-1], 54, "all others", "muted small")
    scale = tallest / max(float(highest.max()), max(1.0 - float(share[tokens].sum()) for share in shares.values()))
    says: list[str] = []
    then = [0.0] * (columns + 1)
    for number, (name, share) in enumerate(shares.items()):
        base = top + number * line + tallest + 12
        still = counted(int((share > 0).sum()), "token") + " left"
        canvas.text(MARGIN, base - 22, name, "text strong", "start")
        canvas.text(MARGIN, base - 5, still, "muted small", "start")
        canvas.path(f"M{left} {base}H{WIDTH - MARGIN}", "rule")
        others = share.clone()
        others[tokens] = 0.0
        now = [*share[tokens].tolist(), float(others.sum())]
        for column, middle in enumerate(middles):
            fill, _ = request_colors(int(column == columns))
            _draw_bar(canvas, middle, base, 0.56 * step, scale * now[column], scale * then[column], fill)
            canvas.text(middle, base + 15, _percent(now[column]), "text small")
        words = [f"{text(token)!r} {_percent(chance)}" for token, chance in zip(tokens.tolist(), now, strict=False)]
        says.append(f"{name}: {still}; in %: {', '.join(words)}, all others {_percent(now[-1])}.")
        then = now
    bottom = top + len(shares) * line
    legend = "numbers: probability in %  ·  filled: may be drawn  ·  dashed outline: cut by this stage  ·  –: cut"
    canvas.text(MARGIN, bottom + 14, legend, "muted small", "start")
    return canvas.picture(bottom + 28, "\n".join(says))


def _draw_bar(canvas: Canvas, middle: float, base: float, width: float, now: float, then: float, fill: str) -> None:
    """A bar as high as ``now``; if that is 0, the outline of what was there before."""
    left = middle - width / 2
    if now > 0:
        canvas.box(left, base - max(now, 1.0), width, max(now, 1.0), fill=fill)
    elif then > 0:
        top = base - max(then, 6.0)
        canvas.path(f"M{left:g} {base}V{top:g}H{left + width:g}V{base}", "line dashed")


def _percent(share: float) -> str:
    """``23``, ``4.1``, ``0.0``; ``–`` for exactly 0."""
    if share == 0:
        return "–"
    return f"{100 * share:.0f}" if share >= 0.1 else f"{100 * share:.1f}"
