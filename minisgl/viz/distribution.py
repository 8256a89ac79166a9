"""What the stages of a sampler make of a distribution: a row of bars a stage, one column a token."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from minisgl.viz.svg import WIDTH, Canvas, Picture, counted, request_colors, shorten, visible

_MARGIN = 14
_LABEL = 150
_LINE = 96
_TALLEST = 54
_TOP = 78
_LONGEST = 8
_TOKEN, _OTHERS = request_colors(0)[0], request_colors(1)[0]
_LEGEND = "numbers: probability in %  ·  filled: may be drawn  ·  dashed outline: cut by this stage  ·  –: cut"


def distribution(stages: Mapping[str, torch.Tensor], text: Callable[[int], str], columns: int = 9) -> Picture:
    """One row a stage: the probability of the tokens that are the likeliest in any of them, and of all others.

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
    canvas = Canvas()
    canvas.text(_MARGIN, 26, "The distribution of the next token, stage by stage", "text strong", "start")
    step = (WIDTH - 2 * _MARGIN - _LABEL) / (columns + 1)
    middles = [_MARGIN + _LABEL + (column + 0.5) * step for column in range(columns + 1)]
    for middle, token in zip(middles, tokens.tolist(), strict=False):
        canvas.text(middle, 54, shorten(visible(text(token)), _LONGEST), "text mono")
    canvas.text(middles[-1], 54, "all others", "muted small")
    scale = _TALLEST / max(float(highest.max()), max(1.0 - float(share[tokens].sum()) for share in shares.values()))
    says: list[str] = []
    before = torch.zeros_like(first)
    for line, (name, share) in enumerate(shares.items()):
        base = _TOP + line * _LINE + _TALLEST + 12
        left = counted(int((share > 0).sum()), "token") + " left"
        canvas.text(_MARGIN, base - 22, name, "text strong", "start")
        canvas.text(_MARGIN, base - 5, left, "muted small", "start")
        canvas.path(f"M{_MARGIN + _LABEL} {base}H{WIDTH - _MARGIN}", "rule")
        now, then = _with_others(share, tokens), _with_others(before, tokens)
        for column, middle in enumerate(middles):
            fill = _OTHERS if column == columns else _TOKEN
            _draw_bar(canvas, middle, base, 0.56 * step, scale * now[column], scale * then[column], fill)
            canvas.text(middle, base + 15, _percent(now[column]), "text small")
        words = [f"{text(token)!r} {_percent(chance)}" for token, chance in zip(tokens.tolist(), now, strict=False)]
        says.append(f"{name}: {left}; in %: {', '.join(words)}, all others {_percent(now[-1])}.")
        before = share
    bottom = _TOP + len(shares) * _LINE
    canvas.text(_MARGIN, bottom + 14, _LEGEND, "muted small", "start")
    return canvas.picture(bottom + 28, "\n".join(says))


def _with_others(share: torch.Tensor, tokens: torch.Tensor) -> list[float]:
    """Probabilities of the tokens, and of all others together."""
    others = share.clone()
    others[tokens] = 0.0
    return [*share[tokens].tolist(), float(others.sum())]


def _draw_bar(canvas: Canvas, middle: float, base: float, width: float, now: float, then: float, fill: str) -> None:
    """A bar as high as ``now``; if that is nothing, the outline of what was there before."""
    left = middle - width / 2
    if now > 0:
        canvas.box(left, base - max(now, 1.0), width, max(now, 1.0), fill=fill)
    elif then > 0:
        top = base - max(then, 6.0)
        canvas.path(f"M{left:g} {base}V{top:g}H{left + width:g}V{base}", "line dashed")


def _percent(share: float) -> str:
    """``23``, ``4.1``, ``0.0``; ``–`` for exactly nothing."""
    if share == 0:
        return "–"
    return f"{100 * share:.0f}" if share >= 0.1 else f"{100 * share:.1f}"
