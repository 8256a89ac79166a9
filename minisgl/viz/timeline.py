"""Which request fed how many tokens in which step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minisgl.viz.svg import WIDTH, Canvas, Picture, request_colors

_MARGIN = 14
_LABEL = 44
_LINE = 32


def step_timeline(steps: Sequence[Mapping[int, int]]) -> Picture:
    """Steps from left to right, requests from top to bottom, and in each box the tokens fed.

    Args:
        steps: for each step, tokens fed by the ``uid`` of the request.
    """
    uids = sorted({uid for step in steps for uid in step})
    width = min((WIDTH - 2 * _MARGIN - _LABEL) / max(len(steps), 1), 48.0)
    canvas = Canvas()
    title = "Tokens that each request feeds in each step (more than one: prefill; one: decode)"
    canvas.text(_MARGIN, 26, title, "text strong", "start")
    top = 62
    for step in range(len(steps)):
        canvas.text(_MARGIN + _LABEL + (step + 0.5) * width, top - 8, step, "muted small")
    for line, uid in enumerate(uids):
        y = top + line * _LINE
        canvas.text(_MARGIN, y + 19, f"r{uid}", "text strong", "start")
        fill, ink = request_colors(uid)
        for step, fed in enumerate(steps):
            if uid in fed:
                x = _MARGIN + _LABEL + step * width
                canvas.box(x + 1, y, width - 2, _LINE - 4, fill=fill)
                canvas.text(x + width / 2, y + 19, fed[uid], "small", fill=ink)
    return canvas.picture(top + len(uids) * _LINE + 8, "\n".join(_describe(uid, steps) for uid in uids))


def _describe(uid: int, steps: Sequence[Mapping[int, int]]) -> str:
    prefill = [f"{step[uid]} tokens in step {number}" for number, step in enumerate(steps) if step.get(uid, 0) > 1]
    decode = [str(number) for number, step in enumerate(steps) if step.get(uid) == 1]
    parts = [*prefill, *([f"1 token in each of the steps {', '.join(decode)}"] if decode else [])]
    return f"Request r{uid} feeds {', '.join(parts)}."
