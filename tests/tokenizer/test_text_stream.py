from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.tokenizer import TextStream, Tokenizer
from tests.tokenizer.tiny import KINDS, tiny_tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_cut_before_a_stop_string(kind: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    stream = TextStream(tokenizer, ["dog", "🦊"])
    text = "".join(stream.feed([token]) for token in tokenizer.encode("the the 🦊 the dog")[1:])
    assert (text + stream.finish(), stream.stopped) == ("the the ", True)


def test_a_stop_string_in_the_last_half_of_a_character_counts() -> None:
    tokenizer = tiny_tokenizer("byte-level")
    stream = TextStream(tokenizer, ["\ufffd"])
    assert stream.feed(tokenizer.encode("the 🦊")[1:-1]) == "the "
    assert not stream.stopped
    assert (stream.finish(), stream.stopped) == ("", True)


def test_stop_strings_do_not_count_at_first() -> None:
    tokenizer = tiny_tokenizer("byte-level")
    the = tokenizer.encode("the")[1:]
    stream = TextStream(tokenizer, ["the"], min_tokens=len(the))
    assert "".join(stream.feed([token]) for token in the) == "the"
    assert "".join(stream.feed([token]) for token in the) == ""
    assert stream.stopped


def test_without_a_tokenizer_there_is_no_text(tmp_path: Path) -> None:
    stream = TextStream(Tokenizer(tmp_path))
    assert (stream.feed([1, 2]), stream.finish(), stream.stopped) == ("", "", False)
