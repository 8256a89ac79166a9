from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minisgl.tokenizer import StopStrings

few_letters = st.text("ab", max_size=12)
stop_words = st.text("ab", min_size=1, max_size=4)


def test_text_is_cut_before_the_stop_string() -> None:
    stop = StopStrings(["END"])
    assert [stop.feed(piece) for piece in ["one E", "N two EN", "D three", "four"]] == ["one ", "EN two ", "", ""]
    assert stop.matched == "END"
    assert stop.finish() == ""


def test_what_only_began_like_a_stop_string_is_released() -> None:
    stop = StopStrings(["END", "\n\n"])
    assert stop.feed("the EN") == "the "
    assert stop.finish() == "EN"
    assert stop.matched is None


def test_without_stop_strings_nothing_is_held() -> None:
    stop = StopStrings([])
    assert stop.feed("text") == "text"
    assert stop.finish() == ""


def test_the_stop_string_that_is_complete_first_counts() -> None:
    stop = StopStrings(["abcd", "bc"])
    assert stop.feed("xabcd") == "xa"
    assert stop.matched == "bc"


@given(pieces=st.lists(few_letters, max_size=6), word=stop_words)
def test_one_stop_string_is_str_find(pieces: list[str], word: str) -> None:
    text = "".join(pieces)
    stop = StopStrings([word])
    shown = "".join(stop.feed(piece) for piece in pieces) + stop.finish()
    found = text.find(word)
    assert shown == (text if found < 0 else text[:found])
    assert stop.matched == (None if found < 0 else word)


@given(pieces=st.lists(few_letters, max_size=6), words=st.lists(stop_words, max_size=4))
def test_pieces_do_not_matter(pieces: list[str], words: list[str]) -> None:
    text = "".join(pieces)
    letters, chunks = StopStrings(words), StopStrings(words)
    by_letter = "".join(letters.feed(letter) for letter in text) + letters.finish()
    assert "".join(chunks.feed(piece) for piece in pieces) + chunks.finish() == by_letter
    assert chunks.matched == letters.matched
    assert (letters.matched is None) == (not any(word in text for word in words))


@given(pieces=st.lists(few_letters, max_size=6), words=st.lists(stop_words, min_size=1, max_size=4))
def test_no_more_is_held_than_could_become_a_stop_string(pieces: list[str], words: list[str]) -> None:
    stop = StopStrings(words)
    shown = ""
    for number, piece in enumerate(pieces):
        shown += stop.feed(piece)
        if stop.matched is None:
            held = "".join(pieces[: number + 1])[len(shown) :]
            assert held == "" or any(word.startswith(held) and word != held for word in words)
