from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from minisgl.book import DetokenizerStep, Picture, detokenizer_steps
from minisgl.book.svg import _PALETTE
from minisgl.errors import ConfigError
from tests.book.drawing import assert_sound, boxes, texts

NEW, HELD = _PALETTE[4][0], _PALETTE[1][0]
FOX = [b"The", b" fox", b" ", b"\xf0\x9f", b"\xa6", b"\x8a", b" said"]


def record(tokens: Sequence[bytes]) -> list[DetokenizerStep]:
    """What an incremental detokenizer does, written down."""
    steps: list[DetokenizerStep] = []
    surrogate = read = sent = 0
    for end in range(1, len(tokens) + 1):
        window = b"".join(tokens[surrogate:end]).decode("utf-8", "replace")
        held = window.endswith("\ufffd")
        piece = window[sent : len(window) - held]
        steps.append(DetokenizerStep(tokens[end - 1], surrogate, read, window, sent, piece))
        sent += len(piece)
        if piece and not held:
            surrogate, read = read, end
            sent = len(b"".join(tokens[surrogate:read]).decode("utf-8", "replace"))
    return steps


def filled(picture: Picture, colour: str) -> list[float]:
    """Heights of the boxes of one colour."""
    return [float(box.get("y", "")) for box in boxes(picture) if box.get("fill") == colour]


def test_the_bytes_of_an_emoji_are_held_back_until_the_last_has_come() -> None:
    made = detokenizer_steps(record(FOX))
    for frame in made.frames:
        assert_sound(frame)
    assert [heading.partition(": ")[2] for heading in made.headings[2:6]] == [
        "token · comes, · is sent",
        "token f0 9f comes, nothing is sent",
        "token a6 comes, nothing is sent",
        "token 8a comes, 🦊 is sent",
    ]
    fourth, fifth, sixth = made.frames[3:6]
    assert [len(filled(frame, HELD)) for frame in (fourth, fifth, sixth)] == [3, 4, 0], "bytes, and the sign at the end"
    assert "bytes of the tokens from read on; 3 of an incomplete character" in texts(fifth)
    bytes_of_fox = ["f0", "9f", "a6", "8a"]
    start = texts(sixth).index("f0")
    assert texts(sixth)[start : start + 4] == bytes_of_fox
    assert texts(sixth).count("🦊") == 2, "in the text decoded, and in what the client has"
    assert "Sent now: '🦊'. The client has 'The fox 🦊'." in sixth.text
    assert "Not read: f0 9f a6; incomplete: f0 9f a6." in fifth.text
    assert "Decoded again: ' \ufffd'; sent before: ' '; held back: '\ufffd'." in fifth.text


def test_offsets_stand_at_the_borders_of_tokens() -> None:
    picture = detokenizer_steps(record(FOX)).frames[4]
    found = texts(picture)
    assert {"surrogate: 2", "read: 3", "end: 5"} <= set(found)
    assert "As token 5 comes: surrogate 2, read 3, sent 1" in found
    top = min(float(box.get("y", "")) for box in boxes(picture))
    tokens = [box for box in boxes(picture) if float(box.get("y", "")) == top]
    kinds = [box.get("class") or box.get("fill") for box in tokens]
    assert kinds == ["viz-empty", "viz-empty", "viz-shared", NEW, NEW], "forgotten, context, and not yet read"


def test_offsets_that_are_the_same_share_a_mark() -> None:
    found = texts(detokenizer_steps(record(FOX)).frames[0])
    assert {"surrogate = read: 0", "end: 1"} <= set(found)


def test_of_a_long_text_the_end_is_shown() -> None:
    tokens = [f" word{number}".encode() for number in range(200)]
    picture = detokenizer_steps(record(tokens)).frames[-1]
    assert_sound(picture)
    found = texts(picture)
    assert "end: 200" in found
    assert "·word199" in found
    assert any(text.startswith("…") and text.endswith("·word198") for text in found)


def test_signs_that_are_not_latin_or_not_printable() -> None:
    tokens = [b"\xe6\x97\xa5\xe6\x9c\xac", "👩\u200d👧".encode(), b"\n\x00<b>", b"", b"\xff", b"x" * 500]
    made = detokenizer_steps(record(tokens))
    for frame in made.frames:
        assert_sound(frame)
    assert "日本" in texts(made.frames[0])
    assert "👩\u200d👧" in texts(made.frames[1])
    assert "↵\ufffd<b>" in texts(made.frames[2])
    assert "∅" in texts(made.frames[3])
    for frame in made.frames:
        assert_sound(frame)


def test_what_joins_two_emoji_is_seen_by_itself_as_bytes() -> None:
    made = detokenizer_steps(record(["👩".encode(), b"\xe2\x80", b"\x8d", "👧".encode()]))
    assert made.headings[2] == "3 of 4: token 8d comes, e2 80 8d is sent"
    assert "👩\u200d" in texts(made.frames[3])
    assert "👧" in texts(made.frames[3])


@pytest.mark.parametrize("change", [{"surrogate": 2}, {"read": 3}, {"sent": 9}, {"surrogate": -1}])
def test_offsets_that_cannot_be(change: dict[str, int]) -> None:
    fields: dict[str, Any] = {"token": b"a", "surrogate": 0, "read": 1, "window": "ba", "sent": 1, "piece": "a"}
    good = DetokenizerStep(b"b", 0, 0, "b", 0, "b")
    detokenizer_steps([good, DetokenizerStep(**fields)])
    with pytest.raises(ConfigError, match=r"steps\[1\]"):
        detokenizer_steps([good, DetokenizerStep(**{**fields, **change})])


def test_no_steps() -> None:
    with pytest.raises(ValueError, match="0 frames"):
        detokenizer_steps([])
