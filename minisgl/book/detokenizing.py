"""Incremental detokenisation token by token: what is decoded again, what is held back, and what is sent."""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.book.players import Player, player
from minisgl.book.svg import JOINER, MARGIN, WIDTH, Canvas, Picture, shorten, visible
from minisgl.errors import ConfigError

_ROOM, _ROOM_OF_TOKENS = WIDTH - 2 * MARGIN, WIDTH - 2 * MARGIN - 180  # right of the tokens is their last offset
_SIGN, _PAD, _BOX = 8.4, 12.0, 28
_TOKENS, _BYTES, _WINDOW, _CLIENT = 86.0, 204.0, 266.0, 328.0
_LONGEST = 24
_GONE, _SEEN, _HELD, _NEW = -2, -1, 1, 4  # looks of a box; those that are not negative are colours

Cell = tuple[str, int]


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

    There is one step a token, and at least one. Raises `ConfigError` if offsets lie outside of the tokens so far, or of
    the window; names the step.
    """
    frames, captions = [], []
    for number, step in enumerate(steps, start=1):
        if not 0 <= step.surrogate <= step.read <= number or not 0 <= step.sent <= len(step.window):
            raise ConfigError(
                f"steps[{number - 1}]: offsets must be 0 <= surrogate {step.surrogate} <= read {step.read} <= {number} "
                f"tokens, and sent {step.sent} at most the {len(step.window)} signs of the window"
            )
        frames.append(_frame(steps[:number]))
        sent = shorten(_shown(step.piece), _LONGEST) or "nothing"
        captions.append(f"token {_label(step.token)} comes, {sent} is sent")
    return player(frames, captions)


def _frame(steps: Sequence[DetokenizerStep]) -> Picture:
    step, tokens = steps[-1], [each.token for each in steps]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(tokens))
    pending, unread = decoder.getstate()[0], b"".join(tokens[step.read :])
    title = f"As token {len(tokens)} comes: surrogate {step.surrogate}, read {step.read}, sent {step.sent}"
    legend = "outline: never looked at again  ·  grey: seen before  ·  blue: new  ·  orange: no complete character yet"
    canvas = Canvas(title, legend=legend, says=f"{title}.")
    looks = [_GONE] * step.surrogate + [_SEEN] * (step.read - step.surrogate) + [_NEW] * (len(tokens) - step.read)
    cells = list(zip(map(_label, tokens), looks, strict=True))
    _draw_offsets(canvas, step, _row(canvas, _TOKENS, "tokens", cells, _ROOM_OF_TOKENS))
    whole = len(unread) - len(pending)
    cells = [(f"{byte:02x}", _NEW if at < whole else _HELD) for at, byte in enumerate(unread)]
    _row(canvas, _BYTES, f"bytes of the tokens from read on; {len(pending)} of an incomplete character", cells)
    end = step.sent + len(step.piece)
    before, held = step.window[: step.sent], step.window[end:]
    cells = [(_shown(before), _SEEN), (_shown(step.window[step.sent : end]), _NEW), (_shown(held), _HELD)]
    _row(canvas, _WINDOW, "decoded again: the text from surrogate on, grey up to sent", cells)
    client = "".join(each.piece for each in steps[:-1])
    _row(canvas, _CLIENT, "what the client has", [(_shown(client), _SEEN), (_shown(step.piece), _NEW)])
    canvas.says += [
        f"Not read: {unread.hex(' ') or 'nothing'}; incomplete: {pending.hex(' ') or 'nothing'}.",
        f"Decoded again: {step.window!r}; sent before: {before!r}; held back: {held!r}.",
        f"Sent now: {step.piece!r}. The client has {client + step.piece!r}.",
    ]
    return canvas.picture(370.0)


def _row(canvas: Canvas, y: float, heading: str, cells: Sequence[Cell], room: float = _ROOM) -> list[float]:
    """Boxes beside each other, of too many or too long ones the end; returns the left border of each, and the end."""
    canvas.text(MARGIN, y - 8, heading, "text small", "start")
    fitting: list[Cell] = []
    for text, look in reversed(cells):
        left = room - sum(_width(each) for each, _ in fitting)
        if text and _width("…") < left < _width(text):
            text = next(short for at in range(1, len(text) + 1) if _width(short := f"…{text[at:]}") <= left)
        elif left < _width(text):
            break
        fitting.append((text, look))
    borders = [float(MARGIN)] * (len(cells) - len(fitting) + 1)
    for text, look in reversed(fitting):
        x, width, color = borders[-1], _width(text), look if look >= 0 else None
        kind, words = ("empty", "muted mono") if look == _GONE else ("shared", "text mono")
        if text:
            canvas.cell(x + 1, y, width - 2, _BOX, (text, words), color=color, kind=kind)
        borders.append(x + width)
    return borders


def _draw_offsets(canvas: Canvas, step: DetokenizerStep, borders: Sequence[float]) -> None:
    """Below the borders between tokens, the leftmost lowest: none covers another."""
    marks: dict[int, str] = {}
    for name, offset in (("end", len(borders) - 1), ("read", step.read), ("surrogate", step.surrogate)):
        marks[offset] = f"{name} = {marks[offset]}" if offset in marks else name
    for line, (offset, names) in enumerate(marks.items(), start=1):
        x, height = borders[offset], _BOX + 6 + line * 16
        canvas.path(f"M{x:g} {_TOKENS - 3:g}v{height}")
        canvas.text(x + 4, _TOKENS - 3 + height, f"{names}: {offset}", "text small strong", "start")


def _label(token: bytes) -> str:
    """Text of a token if it has one by itself, else its bytes."""
    try:
        return shorten(_shown(token.decode()) or "∅", _LONGEST)
    except UnicodeDecodeError:
        return shorten(token.hex(" "), _LONGEST)


def _shown(text: str) -> str:
    """A text with visible spaces, or its bytes if it is invisible."""
    return visible(text) if text.strip(JOINER) else text.encode().hex(" ")


def _width(text: str) -> float:
    """Of a box for it in the fixed-width font, in which some characters are two places wide; 0 without a text."""
    return _SIGN * sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text) + _PAD * bool(text)
