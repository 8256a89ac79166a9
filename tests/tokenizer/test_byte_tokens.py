from __future__ import annotations

import pytest

from minisgl.tokenizer.byte_tokens import complete_characters

FOX = "🦊".encode()


@pytest.mark.parametrize(
    ("data", "text", "rest"),
    [
        (b"", "", b""),
        (b"the", "the", b""),
        (FOX, "🦊", b""),
        (b"a" + FOX[:3], "a", FOX[:3]),
        (FOX[:1], "", FOX[:1]),
        (b"\x80" + FOX, "\ufffd🦊", b""),
        (FOX[:3] + b"a", "\ufffd\ufffd\ufffda", b""),
        (b"\xff\xc0" + FOX[:2], "\ufffd\ufffd", FOX[:2]),
        (FOX + b"\xff" + FOX + FOX[:1], "🦊\ufffd🦊", FOX[:1]),
    ],
)
def test_characters_leave_and_the_beginning_of_one_stays(data: bytes, text: str, rest: bytes) -> None:
    assert complete_characters(data) == (text, rest)


def test_bytes_that_come_one_by_one_are_read_as_those_that_come_together() -> None:
    data, text, rest = FOX + b"\x80" + "é你".encode() + b"\xc3", "", b""
    for value in data:
        piece, rest = complete_characters(rest + bytes([value]))
        text += piece
    assert (text, rest) == complete_characters(data) == ("🦊\ufffdé你", b"\xc3")
