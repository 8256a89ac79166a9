"""Incremental detokenisation token by token: what is decoded again, what is held back, and what is sent."""

from __future__ import annotations

import codecs
import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from minisgl.book.players import Player, player
from minisgl.book.svg import JOINER, MARGIN, WIDTH, Canvas, Picture, counted, request_colors, shorten, visible
from minisgl.errors import ConfigError

_ROOM = WIDTH - 2 * MARGIN
_SIGN, _PAD = 8.4, 12.0
_BOX = 28
_BYTE = 30.0
_TOKENS, _BYTES, _WINDOW, _CLIENT = 86.0, 204.0, 266.0, 328.0
_LONGEST = 24
_NEW, _HELD = 4, 1


@dataclass(frozen=True, slots=True)
class DetokenizerStep:
    """What a detokenizer does with one token."""

    token: bytes  # the bytes that the new token stands for
    surrogate: int  # tokens before this one are never looked at again
    read: int  # tokens before this one have become text; from ``surrogate`` on they are the context of what follows
    window: str  # text of the tokens from ``surrogate`` on, the new one included
    sent: int  # characters of ``window`` that had been sent before
    piece: str  # the text that is sent now; often empty


def detokenizer_steps(steps: Sequence[DetokenizerStep]) -> Player:
    """Step through a text: its tokens with the offsets, the bytes not yet read, the text decoded, and the text sent.

    Args:
        steps: one a token, at least one.

    Raises `ConfigError` if offsets lie outside of the tokens so far, or of the window; names the step.
    """
    for number, step in enumerate(steps):
        if not 0 <= step.surrogate <= step.read <= number + 1 or not 0 <= step.sent <= len(step.window):
            raise ConfigError(
                f"steps[{number}]: offsets must be 0 <= surrogate {step.surrogate} <= read {step.read} <= {number + 1} "
                f"tokens, and sent {step.sent} at most the {len(step.window)} signs of the window"
            )
    captions = [
        f"token {_label(step.token)} comes, {shorten(_shown(step.piece), _LONGEST) or 'nothing'} is sent"
        for step in steps
    ]
    return player([_frame(steps, number) for number in range(len(steps))], captions)


def _frame(steps: Sequence[DetokenizerStep], number: int) -> Picture:
    step, tokens = steps[number], [each.token for each in steps[: number + 1]]
    pending, unread = _incomplete(tokens), b"".join(tokens[step.read :])
    title = f"After {counted(len(tokens), 'token')}: surrogate {step.surrogate}, read {step.read}, sent {step.sent}"
    legend = "outline: never looked at again  ·  grey: seen before  ·  blue: new  ·  orange: no complete character yet"
    canvas = Canvas(title, legend=legend)
    _draw_tokens(canvas, step, tokens)
    _draw_bytes(canvas, unread, min(len(pending), len(unread)))
    new = step.window[step.sent : step.sent + len(step.piece)]
    held = step.window[step.sent + len(step.piece) :]
    heading = "decoded again: the text from surrogate on, grey up to sent"
    _draw_text(canvas, _WINDOW, heading, step.window[: step.sent], new, held)
    before = "".join(each.piece for each in steps[:number])
    _draw_text(canvas, _CLIENT, "what the client has", before, step.piece, "")
    says = [
        f"{title}.",
        f"Not read: {_hex(unread) or 'nothing'}; incomplete: {_hex(pending) or 'nothing'}.",
        f"Decoded again: {step.window!r}; sent before: {step.window[: step.sent]!r}; held back: {held!r}.",
        f"Sent now: {step.piece!r}. The client has {before + step.piece!r}.",
    ]
    return canvas.picture(370.0, "\n".join(says))


def _heading(canvas: Canvas, y: float, text: str) -> None:
    canvas.text(MARGIN, y - 8, text, "text small", "start")


def _draw_tokens(canvas: Canvas, step: DetokenizerStep, tokens: Sequence[bytes]) -> None:
    """The last tokens that have room, and the offsets below the borders between them."""
    labels = [_label(token) for token in tokens]
    widths = [_width(label) for label in labels]
    from_end = list(accumulate(reversed(widths)))
    first = len(tokens) - bisect_right(from_end, _ROOM - 100)  # right of them there is room for the offset of the end
    _heading(canvas, _TOKENS, f"tokens{f', the last {len(tokens) - first}' * (first > 0)}")
    borders = {first: MARGIN + (30.0 if first else 0.0)}
    if first:
        canvas.text(MARGIN, _TOKENS + 19, "…", "muted", "start")
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
        x, height = borders.get(offset, float(MARGIN)), _BOX + 6 + line * 16
        canvas.path(f"M{x:g} {_TOKENS - 3:g}v{height}")
        canvas.text(x + 4, _TOKENS - 3 + height, f"{names}: {offset}", "text small strong", "start")


def _draw_bytes(canvas: Canvas, unread: bytes, pending: int) -> None:
    """A cell for each byte of the tokens not yet read; the last ``pending`` belong to no character yet."""
    _heading(canvas, _BYTES, "bytes of the tokens from read on")
    shown = unread[-(int(_ROOM / _BYTE) - 1) :]
    for index, byte in enumerate(shown):
        fill, ink = request_colors(_HELD if index >= len(shown) - pending else _NEW)
        x = MARGIN + index * _BYTE
        canvas.box(x + 1, _BYTES, _BYTE - 2, _BOX, fill=fill)
        canvas.text(x + _BYTE / 2, _BYTES + 19, f"{byte:02x}", "mono", fill=ink)
    words = f"{counted(pending, 'byte')} of a character that is not complete" if pending else ""
    x = MARGIN + len(shown) * _BYTE + 8
    if words and x + 7 * len(words) <= WIDTH - MARGIN:
        canvas.text(x, _BYTES + 19, words, "muted small", "start")


def _draw_text(canvas: Canvas, y: float, heading: str, before: str, new: str, held: str) -> None:
    """Three parts of a text beside each other; of long ones, the ends."""
    _heading(canvas, y, heading)
    shown = [_end_of(_shown(part), 0.4 * _ROOM) for part in (new, held)]
    rest = _ROOM - sum(map(_width, shown))
    x = float(MARGIN)
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
    """A text with visible spaces, or its bytes if it is invisible."""
    return visible(text) if text.strip(JOINER) else _hex(text.encode())


def _hex(data: bytes) -> str:
    return data.hex(" ")


def _width(text: str) -> float:
    """Of a box for it in the fixed-width font, in which some characters are two places wide; 0 without a text."""
    return _SIGN * sum(map(_places, text)) + _PAD if text else 0.0


def _places(sign: str) -> int:
    return 2 if unicodedata.east_asian_width(sign) in "WF" else 1
