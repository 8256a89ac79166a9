"""What a model computes: attention weights, rotary positions, a layer, packed weights, next-token probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture, Point, circle, counted, request_colors, shorten, visible
from minisgl.context import AttentionSpec
from minisgl.layers.linear import MergedColumnParallelLinear, Weight
from minisgl.layers.mlp import GatedMLP, MoE
from minisgl.layers.rotary import Rotary, rotate
from minisgl.models.decoder import DecoderLayer

LARGEST_CELL = 30.0
_LONGEST = 8  # characters of a token's text


def attention_map(maps: Mapping[str, torch.Tensor], texts: Sequence[str]) -> Picture:
    """Draw a panel for each head: the area of a square is the weight with which its row's token reads its column's.

    ``maps``: title → [T, T] weights, each row sums to 1 and is 0 right of the diagonal. ``texts``: [T], of the tokens.
    """
    panel, label, top = (WIDTH - 2 * MARGIN) / len(maps), 84, 62
    cell = min((panel - label - 10) / len(texts), LARGEST_CELL)
    canvas = Canvas()
    for number, (title, weights) in enumerate(maps.items()):
        left = MARGIN + number * panel + label
        canvas.text(left - label, 26, title, "text strong", "start")
        for row, text in enumerate(texts):
            y = top + row * cell
            canvas.text(left - 22, y + cell / 2 + 5, shorten(visible(text), _LONGEST), "text mono", "end")
            canvas.text(left - 4, y + cell / 2 + 4, row, "muted small", "end")
            canvas.text(left + (row + 0.5) * cell, top - 8, row, "muted small")
            for column, weight in enumerate(weights[row, : row + 1].tolist()):
                x, side = left + column * cell, (cell - 2) * weight**0.5
                canvas.box(x, y, cell, cell)
                if weight >= 0.005:
                    canvas.cell(x + (cell - side) / 2, y + (cell - side) / 2, side, side, color=0)
        reads = ", ".join(f"{row} reads {column}" for row, column in enumerate(weights.argmax(dim=1).tolist()))
        canvas.says.append(f"{title}. What each token reads most: {reads}.")
    bottom = top + len(texts) * cell
    legend = "row: the token that reads  ·  column: the token that is read  ·  area: weight, a full cell is 1"
    canvas.note(bottom + 22, legend)
    return canvas.picture(bottom + 34)


def softmax_panels(scores: torch.Tensor, texts: Sequence[str]) -> Picture:
    """Draw attention of one head in three steps: scores, scores with the future hidden, weights.

    ``scores`` are [T, T], q·k / √d of a query (row) and a key (column), and ``texts`` [T] the tokens'; T is at most 6.
    """
    count = len(texts)
    hidden = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), -torch.inf)
    weights = hidden.softmax(dim=-1)
    canvas, label, gap, top = Canvas(), 64.0, 18.0, 66.0
    cell = (WIDTH - 2 * MARGIN - label - 2 * gap) / (3 * count)
    height = min(cell, 40.0)
    panels = (("1. scores q·k / √d", scores), ("2. the future is hidden", hidden), ("3. softmax, in %", weights))
    for panel, (title, values) in enumerate(panels):
        left = MARGIN + label + panel * (count * cell + gap)
        canvas.text(left, 26, title, "text strong", "start")
        for row, text in enumerate(texts):
            canvas.text(left + (row + 0.5) * cell, top - 8, shorten(visible(text), 5), "muted small")
            for column, value in enumerate(values[row].tolist()):
                x, y = left + column * cell + 1, top + row * height + 1
                words = f"{value:.1f}".replace("-", "−").replace("inf", "∞")
                if values is weights:
                    filled, words = value * (height - 2), _percent(value)
                    canvas.box(x, y + height - 2 - filled, cell - 2, filled, "shade")
                look = "muted small" if panel and column > row else "text small"
                canvas.cell(x, y, cell - 2, height - 2, (words, look))
    for row, text in enumerate(texts):
        canvas.text(MARGIN + label - 6, top + (row + 0.5) * height + 4, shorten(visible(text), 7), "text", "end")
        reads = zip(texts, weights[row, : row + 1].tolist(), strict=False)
        says = ", ".join(f"{read!r} {_percent(weight)}" for read, weight in reads)
        canvas.says.append(f"{text!r} reads, in %: {says}.")
    bottom = top + count * height
    canvas.note(bottom + 22, "row: the token whose query it is  ·  column: the token whose key")
    return canvas.picture(bottom + 34)


def head_sharing(layouts: Mapping[str, AttentionSpec]) -> Picture:
    """Draw which query heads read which KV head; a query head has its KV head's colour. At most 16 query heads."""
    canvas, left, y, line = Canvas(), MARGIN + 150.0, 20.0, 92.0
    for name, spec in layouts.items():
        group, width = spec.num_heads // spec.num_kv_heads, (WIDTH - MARGIN - left) / spec.num_heads
        heads, kv_heads = f"{spec.num_heads} query heads", counted(spec.num_kv_heads, "KV head")
        words = (name, "text strong"), (heads, "muted small"), (kv_heads, "muted small")
        canvas.lines(MARGIN, y + 32, *words, anchor="start")
        for head in range(spec.num_heads):
            x = left + head * width
            canvas.cell(x + 3, y, width - 6, 24, (f"q{head}", "text small"), color=head // group)
            canvas.path(f"M{x + width / 2:g} {y + 24:g}V{y + 40:g}", "rule")
        for head in range(spec.num_kv_heads):
            x, names = left + head * group * width, (f"k{head}, v{head}", "text small")
            canvas.cell(x + 3, y + 40, group * width - 6, 24, names, color=head)
        canvas.says.append(f"{name}: {heads}, {group} for each of {kv_heads}.")
        y += line
    return canvas.picture(y - 8)


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
    turned = rotate(vectors, rotary(torch.tensor(positions, dtype=torch.int32), torch.float32))[:, 0]
    title = f"The same vector at the positions {positions[0]} to {positions[-1]}, in {len(pairs)} of {half} pairs"
    canvas, width = Canvas(title), (WIDTH - 2 * MARGIN) / len(pairs)
    for number, pair in enumerate(pairs):
        step = math.degrees(math.atan2(float(rotary.table[1, pair + half]), float(rotary.table[1, pair])))
        x = MARGIN + (number + 0.5) * width
        _draw_dial(canvas, x, turned[:, [pair, pair + half]].tolist(), positions)
        dimensions, turn = f"dimensions {pair} and {pair + half}", f"{step:.3g}"
        canvas.text(x, _DIAL_TOP + _DIAL + 16, f"pair {pair}: {dimensions}", "text small")
        canvas.text(x, _DIAL_TOP + _DIAL + 33, f"{turn}° a position", "muted small")
        canvas.says.append(f"Pair {pair}, {dimensions}, turns by {turn} degrees a position.")
    return canvas.picture(_DIAL_TOP + _DIAL + 46)


def _draw_dial(canvas: Canvas, x: float, points: Sequence[Sequence[float]], positions: Sequence[int]) -> None:
    """``points`` are (cos, sin) and turn counter-clockwise from the right."""
    y = _DIAL_TOP + _DIAL / 2
    canvas.path(circle(x, y, _RADIUS), "rule")
    placed: list[Point] = []
    for index in (0, len(points) - 1, *range(1, len(points) - 1)):
        cos, sin = points[index]
        dot, label = ((x + cos * radius, y - sin * radius) for radius in (_RADIUS, _RADIUS + 14))
        canvas.path(f"M{x:g} {y:g}L{dot[0]:g} {dot[1]:g}", "rule")
        canvas.arrow((x, y), dot, fill=request_colors(0)[0], thickness=1.2)
        if all(math.dist(label, other) >= 16 for other in placed):  # neither label covers the other
            placed.append(label)
            canvas.text(label[0], label[1] + 4, positions[index], "text small")


def layer_flow(layer: DecoderLayer) -> Picture:
    """Draw both blocks of a live layer with the widths of their weights; ``T`` is the number of tokens in the step."""
    attention, mlp, spec = layer.self_attn, layer.mlp, layer.self_attn.spec
    blocks: dict[str, list[tuple[str, str]]] = {
        "attention block": [
            ("qkv_proj", _widths(attention.qkv_proj.weight)),
            ("q, k, v heads", f"{spec.num_heads} + {spec.num_kv_heads} + {spec.num_kv_heads}"),
            ("norm, rotate" if attention.q_norm else "rotate", f"q, k: {spec.num_heads + spec.num_kv_heads} heads"),
            ("attend", f"T × {spec.num_heads} × {spec.head_dim}"),
            ("o_proj", _widths(attention.o_proj.weight)),
        ]
    }
    if isinstance(mlp, MoE):
        experts, rows, hidden = mlp.experts.gate_up_proj.shape
        blocks["MLP block"] = [
            ("router", _widths(mlp.gate.weight)),
            ("top k", f"{mlp.experts_per_token} of {experts}"),
            ("experts", f"{hidden} → {rows // 2} → {hidden}"),
            ("weighted sum", f"T × {hidden}"),
        ]
    else:
        assert isinstance(mlp, GatedMLP)
        blocks["MLP block"] = [
            ("gate_up_proj", _widths(mlp.gate_up_proj.weight)),
            ("silu(gate) × up", f"T × {mlp.down_proj.weight.shape[1]}"),
            ("down_proj", _widths(mlp.down_proj.weight)),
        ]
    canvas = Canvas()
    for number, (title, steps) in enumerate(blocks.items()):
        _draw_block(canvas, MARGIN + 142.0 * number, title, steps, layer.input_layernorm.weight.shape[0])
        words = ", ".join(" ".join(step) for step in steps)
        canvas.says.append(f"{title}: x is added to the stream and normed, then {words}.")
    return canvas.picture(298.0)


def _widths(weight: Weight) -> str:
    return f"{weight.shape[1]} → {weight.shape[0]}"


def _draw_block(canvas: Canvas, y: float, title: str, steps: Sequence[tuple[str, str]], width: int) -> None:
    """What the block computes above, the residual stream of a ``width`` below it."""
    top, height, gap, norm = y + 24, 52.0, 16.0, 78.0
    middle, stream, left, end = top + height / 2, top + 88.0, MARGIN + 48.0, WIDTH - MARGIN
    canvas.text(MARGIN, y + 12, title, "text strong", "start")
    for lane, name in ((middle, "x"), (stream, "stream")):
        canvas.arrow((MARGIN, lane), (left, lane))
        canvas.text(MARGIN, lane - 7, name, "muted small", "start")
    words = ("add,", "text small strong"), ("then norm", "text small strong")
    canvas.cell(left, top, norm, stream + 14 - top, *words, kind="shared")
    x, box = left + norm, (end - 22 - left - norm - len(steps) * gap) / len(steps)
    for name, detail in steps:
        canvas.arrow((x, middle), (x + gap, middle))
        canvas.cell(x + gap, top, box, height, (name, "text small strong"), (detail, "muted small"))
        x += gap + box
    canvas.arrow((x, middle), (end, middle))
    canvas.text(end, middle - 7, "x", "muted small", "end")
    canvas.arrow((left + norm, stream), (end, stream))
    canvas.text((left + norm + end) / 2, stream - 7, f"the sum, T × {width}, to the next norm", "muted small")


def packed_rows(modules: Mapping[str, MergedColumnParallelLinear]) -> Picture:
    """Draw checkpoint tensors on the left, and on the right the one parameter whose rows they fill.

    ``modules`` are one to three live layers by name; they may be on the meta device.
    """
    canvas, apart, lowest = Canvas(), 10.0, 0.0
    column = (WIDTH - 2 * MARGIN) / len(modules)
    box, gap = 0.38 * (column - 24), 0.16 * (column - 24)
    for number, (name, module) in enumerate(modules.items()):
        left, (rows, width) = MARGIN + number * column, module.weight.shape
        right, parts = left + box + gap, [each for each in module.weight_parts() if each.parameter == "weight"]
        canvas.text(left, 26, f"{name}.weight", "text strong", "start")
        canvas.text(left, 46, f"{rows:,} × {width:,}, filled by", "muted small", "start")
        source_y, target_y, filled = 66.0, 66.0 + (len(parts) - 1) * apart / 2, []
        for color, part in enumerate(parts):
            region = part.index[0]
            assert isinstance(region, slice)
            start, stop, _ = region.indices(rows)
            height, source = max(24.0, 210.0 * (stop - start) / rows), part.source.removesuffix(".weight")
            edges = ((source_y + edge, target_y + edge) for edge in (0.0, height))
            canvas.path("".join(f"M{left + box:g} {a:g}L{right:g} {b:g}" for a, b in edges), "rule")
            canvas.cell(left, source_y, box, height, (source, "text small strong"), color=color)
            label = f"rows {start:,}–{stop - 1:,}"
            canvas.cell(right, target_y, column - 24 - box - gap, height, (label, "text small"), color=color)
            filled.append(f"{source} fills rows {start} to {stop - 1}")
            source_y, target_y = source_y + height + apart, target_y + height
        lowest = max(lowest, source_y - apart)
        canvas.says.append(f"{name}.weight, {rows} × {width}: {'; '.join(filled)}.")
    return canvas.picture(lowest + 14)


def distribution(stages: Mapping[str, torch.Tensor], text: Callable[[int], str], columns: int = 9) -> Picture:
    """Draw a row for each stage of a sampler: the probability of the likeliest tokens, and of all others.

    Args:
        stages: name → [vocab] weights after the stage, not negative, not normalised; 0 is a token that was cut.
        text: of a token id.
        columns: how many tokens get a column of their own.
    """
    shares = {name: weights.double().cpu() / weights.double().sum().cpu() for name, weights in stages.items()}
    first = next(iter(shares.values()))
    tokens = torch.stack(list(shares.values())).amax(0).argsort(descending=True, stable=True)[:columns]
    tokens = tokens[first[tokens].argsort(descending=True, stable=True)]
    names = [text(token) for token in tokens.tolist()]
    others = {name: float(share.index_fill(0, tokens, 0.0).sum()) for name, share in shares.items()}
    drawn = {name: [*share[tokens].tolist(), others[name]] for name, share in shares.items()}
    canvas = Canvas("The distribution of the next token, stage by stage")
    left, base, line, tallest = MARGIN + 150, 144, 96, 54
    step = (WIDTH - MARGIN - left) / (columns + 1)
    middles = [left + (column + 0.5) * step for column in range(columns + 1)]
    for middle, name in zip(middles, names, strict=False):
        canvas.text(middle, 54, shorten(visible(name), _LONGEST), "text mono")
    canvas.text(middles[-1], 54, "all others", "muted small")
    scale = tallest / max(max(now) for now in drawn.values())
    then = [0.0] * (columns + 1)
    for name, now in drawn.items():
        still = counted(int((shares[name] > 0).sum()), "token") + " left"
        canvas.lines(MARGIN, base - 18, (name, "text strong"), (still, "muted small"), anchor="start")
        canvas.path(f"M{left} {base}H{WIDTH - MARGIN}", "rule")
        for column, (middle, chance, before) in enumerate(zip(middles, now, then, strict=True)):
            x, height = middle - 0.28 * step, max(scale * chance, 1.0)
            if chance > 0:
                canvas.cell(x, base - height, 0.56 * step, height, color=int(column == columns))
            elif before > 0:
                top = base - max(scale * before, 6.0)
                canvas.path(f"M{x:g} {base}V{top:g}h{0.56 * step:g}V{base}", "line dashed")
            canvas.text(middle, base + 15, _percent(chance), "text small")
        words = [f"{token!r} {_percent(chance)}" for token, chance in zip(names, now, strict=False)]
        canvas.says.append(f"{name}: {still}; in %: {', '.join(words)}, all others {_percent(now[-1])}.")
        base, then = base + line, now
    legend = "numbers: probability in %  ·  filled: may be drawn  ·  dashed outline: cut by this stage  ·  –: cut"
    canvas.note(base - 52, legend)
    return canvas.picture(base - 38)


def _percent(share: float) -> str:
    """``23``, ``4.1``, ``0.0``; ``–`` for exactly 0."""
    if share == 0:
        return "–"
    return f"{100 * share:.0f}" if share >= 0.1 else f"{100 * share:.1f}"
