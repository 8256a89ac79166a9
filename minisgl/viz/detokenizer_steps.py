"""Incremental detokenisation token by token: what is decoded again, what is held back, and what is sent."""

from __future__ import annotations

import codecs
import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from minisgl.errors import ConfigError
from minisgl.viz.player import Player, player
from minisgl.viz.svg import JOINER, WIDTH, Canvas, Picture, counted, request_colors, shorten, visible

_MARGIN = 14
_ROOM = WIDTH - 2 * _MARGIN
_SIGN = 8.4
_PAD = 12.0
_BOX = 28
_BYTE = 30.0
_TOKENS, _BYTES, _WINDOW, _CLIENT = 86.0, 204.0, 266.0, 328.0
_HEIGHT = 370.0
_MARK_LINE = 16
_END = 100.0
"""Room to the right of the tokens, for the offset of their end."""
_LONGEST = 24
_NEW, _HELD = 4, 1
_LEGEND = "outline: never looked at again  ·  grey: seen before  ·  blue: new  ·  orange: no complete character yet"


@dataclass(frozen=True, slots=True)
class DetokenizerStep:
    """What a detokenizer does with one token.

    Args:
        token: the bytes that the new token stands for.
        surrogate: tokens before this one are never looked at again.
        read: tokens before this one have become text; from ``surrogate`` on they are the context of what follows.
        window: text of the tokens from ``surrogate`` on, the new one included.
        sent: signs of ``window`` that had been sent before.
        piece: the text that is sent now; often empty.
    """

    token: bytes
    surrogate: int
    read: int
    window: str
    sent: int
    piece: str


def detokenizer_steps(steps: Sequence[DetokenizerStep]) -> Player:
    """Step through a text: its tokens and the offsets in them, the bytes not yet read, the text decoded, and the text
    that the client has.

    Args:
        steps: one a token, at least one.

    Raises:
        ConfigError: offsets that do not lie in the tokens so far, or in the window; names the step.
    """
    for number, step in enumerate(steps):
        if not 0 <= step.surrogate <= step.read <= number + 1 or not 0 <= step.sent <= len(step.window):
            raise ConfigError(
                f"steps[{number}]: offsets must be 0 <= surrogate {step.surrogate} <= read {step.read} <= {number + 1} "
                f"tokens, and sent {step.sent} at most the {len(step.window)} signs of the window"
            )
    return player([_frame(steps, number) for number in range(len(steps))], [_caption(step) for step in steps])


def _caption(step: DetokenizerStep) -> str:
    sent = shorten(_shown(step.piece), _LONGEST) or "nothing"
    return f"token {_label(step.token)} comes, {sent} is sent"


def _frame(steps: Sequence[DetokenizerStep], number: int) -> Picture:
    step, tokens = steps[number], [each.token for each in steps[: number + 1]]
    end = len(tokens)
    pending = _incomplete(tokens)
    canvas = Canvas()
    title = f"After {counted(end, 'token')}: surrogate {step.surrogate}, read {step.read}, sent {step.sent}"
    canvas.text(_MARGIN, 26, title, "text strong", "start")
    canvas.text(_MARGIN, 46, _LEGEND, "muted small", "start")
    _draw_tokens(canvas, step, tokens)
    unread = b"".join(tokens[step.read :])
    _draw_bytes(canvas, unread, min(len(pending), len(unread)))
    _heading(canvas, _WINDOW, "decoded again: the text from surrogate on, grey up to sent")
    new = step.window[step.sent : step.sent + len(step.piece)]
    held = step.window[step.sent + len(step.piece) :]
    _draw_text(canvas, _WINDOW, step.window[: step.sent], new, held)
    _heading(canvas, _CLIENT, "what the client has")
    before = "".join(each.piece for each in steps[:number])
    _draw_text(canvas, _CLIENT, before, step.piece, "")
    says = [
        f"{title}.",
        f"Not read: {_hex(unread) or 'nothing'}; incomplete: {_hex(pending) or 'nothing'}.",
        f"Decoded again: {step.window!r}; sent before: {step.window[: step.sent]!r}; held back: {held!r}.",
        f"Sent now: {step.piece!r}. The client has {before + step.piece!r}.",
    ]
    return canvas.picture(_HEIGHT, "\n".join(says))


def _heading(canvas: Canvas, y: float, text: str) -> None:
    canvas.text(_MARGIN, y - 8, text, "text small", "start")


def _draw_tokens(canvas: Canvas, step: DetokenizerStep, tokens: Sequence[bytes]) -> None:
    """The last tokens that have room, and the offsets below the borders between them."""
    labels = [_label(token) for token in tokens]
    widths = [_width(label) for label in labels]
    from_end = list(accumulate(reversed(widths)))
    first = len(tokens) - bisect_right(from_end, _ROOM - _END)
    _heading(canvas, _TOKENS, f"tokens{f', the last {len(tokens) - first}' * (first > 0)}")
    borders = {first: _MARGIN + (30.0 if first else 0.0)}
    if first:
        canvas.text(_MARGIN, _TOKENS + 19, "…", "muted", "start")
    for index in range(first, len(tokens)):
        x, width = borders[index], widths[index]
        borders[index + 1] = x + width
        kind, look = ("empty", "muted mono") if index < step.surrogate else ("shared", "text mono")
        fill, ink = request_colors(_NEW) if index >= step.read else ("", "")
        canvas.box(x + 1, _TOKENS, width - 2, _BOX, kind, fill)
        canvas.text(x + width / 2, _TOKENS + 19, labels[index], look, fill=ink)
    marks: dict[int, str] = {}
    for name, offset in (("end", len(tokens)), ("read", step.read), ("surrogate", step.surrogate)):
        marks[offset] = f"{name} = {marks[offset]}" if offset in marks else name
    for line, (offset, names) in enumerate(marks.items(), start=1):  # the leftmost is the lowest: none covers another
        x, height = borders.get(offset, float(_MARGIN)), _BOX + 6 + line * _MARK_LINE
        canvas.path(f"M{x:g} {_TOKENS - 3:g}v{height}")
        canvas.text(x + 4, _TOKENS - 3 + height, f"{names}: {offset}", "text small strong", "start")


def _draw_bytes(canvas: Canvas, unread: bytes, pending: int) -> None:
    """A cell a byte of the tokens that have not been read; the last ones may belong to no character yet."""
    _heading(canvas, _BYTES, "bytes of the tokens from read on")
    most = int(_ROOM / _BYTE) - 1
    shown = unread[-most:]
    for index, byte in enumerate(shown):
        incomplete = index >= len(shown) - pending
        fill, ink = request_colors(_HELD if incomplete else _NEW)
        x = _MARGIN + index * _BYTE
        canvas.box(x + 1, _BYTES, _BYTE - 2, _BOX, fill=fill)
        canvas.text(x + _BYTE / 2, _BYTES + 19, f"{byte:02x}", "mono", fill=ink)
    words = f"{counted(pending, 'byte')} of a character that is not complete" if pending else ""
    x = _MARGIN + len(shown) * _BYTE + 8
    if words and x + 7 * len(words) <= WIDTH - _MARGIN:
        canvas.text(x, _BYTES + 19, words, "muted small", "start")


def _draw_text(canvas: Canvas, y: float, before: str, new: str, held: str) -> None:
    """Three parts of a text beside each other; of long ones, the ends."""
    shown = [_end_of(_shown(part), 0.4 * _ROOM) for part in (new, held)]
    rest = _ROOM - sum(map(_width, shown))
    x = float(_MARGIN)
    for text, look in ((_end_of(_shown(before), rest), None), (shown[0], _NEW), (shown[1], _HELD)):
        if text:
            fill, ink = ("", "") if look is None else request_colors(look)
            canvas.box(x, y, _width(text) - 2, _BOX, "shared", fill)
            canvas.text(x + _width(text) / 2 - 1, y + 19, text, "text mono", fill=ink)
            x += _width(text)


def _end_of(text: str, room: float) -> str:
    """As much as there is room for."""
    if _width(text) <= room:
        return text
    from_end = list(accumulate(map(_places, reversed(text)), initial=_places("…")))
    count = bisect_right(from_end, (room - _PAD) / _SIGN) - 1
    return f"…{text[len(text) - count :]}"


def _incomplete(tokens: Sequence[bytes]) -> bytes:
    """The bytes at the end that may still become a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        decoder.decode(token)
    return decoder.getstate()[0]


def _label(token: bytes) -> str:
    """Text of a token if it has one by itself, else its bytes."""
    try:
        return shorten(_shown(token.decode()) or "∅", _LONGEST)
    except UnicodeDecodeError:
        return shorten(_hex(token), _LONGEST)


def _shown(text: str) -> str:
    """A text as one can see it, or else its bytes."""
    return visible(text) if text.strip(JOINER) else _hex(text.encode())


def _hex(data: bytes) -> str:
    return data.hex(" ")


def _width(text: str) -> float:
    """Of a box for it in the fixed-width font, in which some characters are two places wide; 0 without a text."""
    return _SIGN * sum(map(_places, text)) + _PAD if text else 0.0


def _places(sign: str) -> int:
    return 2 if unicodedata.east_asian_width(sign) in "WF" else 1
