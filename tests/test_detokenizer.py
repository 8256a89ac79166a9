"""Text out of tokens: whole characters, no matter how tokens arrive, cut before a stop string."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.detokenizer import IncrementalDetokenizer, StopStrings, TextStream, complete_characters
from minisgl.tokenizer import Tokenizer
from tests.tiny_tokenizer import KINDS, tiny_tokenizer

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


FAMILY = "👩‍👩‍👧‍👦"
TEXTS = ["the dog", "  the  dog ", "你好, 世界", f"the {FAMILY} dog", "🦊" * 9, "naïve\n\tcafé", "a\ufffdb"]


random_text = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\ufffd"), max_size=40)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_pieces_add_up_to_the_text(kind: str, text: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
@given(text=random_text)
def test_pieces_of_any_text_add_up(kind: str, text: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_long_run_of_replacement_characters() -> None:
    """They look like characters that are not complete yet, and must leave all the same."""
    tokenizer = tiny_tokenizer("byte-level")
    sent = pieces(tokenizer, tokenizer.encode("\ufffd" * 50))
    assert "".join(sent) == "\ufffd" * 50
    assert len(sent[-1]) <= 1


@given(ids=st.lists(st.integers(0, 299), max_size=120))
def test_pieces_of_any_token_ids_add_up(ids: list[int]) -> None:
    """Byte-level text is a function of the bytes alone, so even tokens that spell no UTF-8 must add up."""
    tokenizer = tiny_tokenizer("byte-level")
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@given(ids=st.lists(st.sampled_from([0, 1, *range(260, 276)]), max_size=120))
def test_pieces_of_any_words_with_fallback_add_up(ids: list[int]) -> None:
    tokenizer = tiny_tokenizer("byte-fallback")
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@given(ids=st.lists(st.sampled_from([*range(4, 132), *range(260, 276)]), max_size=120))
def test_pieces_of_any_ascii_bytes_with_fallback_add_up(ids: list[int]) -> None:
    tokenizer = tiny_tokenizer("byte-fallback")
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 275), max_size=120), word=st.sampled_from(["the", "dog"]))
def test_text_after_broken_bytes_is_right_again(ids: list[int], word: str) -> None:
    tokenizer = tiny_tokenizer("byte-fallback")
    after = [261, *tokenizer.encode(f"the {word}")[2:]]  # "▁the", "▁" + word
    assert "".join(pieces(tokenizer, [*ids, *after, *after])).endswith(f" the {word} the {word}"[1:])


@pytest.mark.parametrize("broken", [[0x80], [0xFF, 0xC0], [0xF0, 0x9F, 0xA6]], ids=["stray", "never", "half"])
def test_a_wrong_byte_spoils_nothing_beside_it(broken: list[int]) -> None:
    """All bytes of a run would become U+FFFD if they were decoded together: those too whose text has left."""
    tokenizer = tiny_tokenizer("byte-fallback")
    fox = [token_id for token_id in tokenizer.encode("🦊") if 4 <= token_id < 260]
    wrong = [4 + value for value in broken]
    ids = [261, *fox, *wrong, *fox, 4 + ord("A"), *wrong, *fox, 262]
    spoiled = "\ufffd" * len(broken)
    assert tokenizer.decode(ids).count("🦊") == 0
    assert "".join(pieces(tokenizer, ids)) == f"the🦊{spoiled}🦊A{spoiled}🦊 dog"


def test_a_word_after_byte_tokens_keeps_its_space() -> None:
    tokenizer = tiny_tokenizer("byte-fallback")
    fox = [token_id for token_id in tokenizer.encode("🦊") if 4 <= token_id < 260]
    assert "".join(pieces(tokenizer, [*fox, 262])) == tokenizer.decode([*fox, 262]) == "🦊 dog"


@pytest.mark.parametrize("kind", KINDS)
@given(ids=st.lists(st.integers(0, 275), max_size=150), cuts=st.lists(st.integers(1, 60), max_size=20))
def test_it_does_not_matter_how_tokens_are_cut_up(kind: str, ids: list[int], cuts: list[int]) -> None:
    tokenizer = tiny_tokenizer(kind)
    rest, runs = list(ids), []
    for cut in cuts:
        runs.append(rest[:cut])
        rest = rest[cut:]
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = "".join(detokenizer.feed(run) for run in [*runs, rest]) + detokenizer.finish()
    assert text == "".join(pieces(tokenizer, ids))


@pytest.fixture(scope="module")
def default_tokenizer(default_model_dir: Path) -> Tokenizer:
    return Tokenizer(default_model_dir)


@given(text=st.one_of(random_text, st.sampled_from(TEXTS)), cuts=st.lists(st.integers(1, 9), max_size=30))
def test_the_default_models_tokenizer(default_tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    rest = default_tokenizer.encode(text)
    whole = default_tokenizer.decode(rest)  # not always the text: it has no tokens for some bytes
    detokenizer = IncrementalDetokenizer(default_tokenizer)
    sent = ""
    for cut in [*cuts, len(rest)]:
        sent += detokenizer.feed(rest[:cut])
        assert whole.startswith(sent)
        rest = rest[cut:]
    assert sent + detokenizer.finish() == whole


def test_many_silent_tokens_are_no_context() -> None:
    tokenizer = tiny_tokenizer("byte-fallback")
    the = tokenizer.encode("the")[-1]
    ids = [the, *[999] * 100, the, 260, 260, the]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_only_complete_characters_leave(kind: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    ids = tokenizer.encode(f"the {FAMILY}")
    sent = pieces(tokenizer, ids)
    assert not any("\ufffd" in piece for piece in sent)
    assert len([piece for piece in sent if piece]) > 6, "text must leave as it comes, not at the end"


def test_a_character_leaves_with_its_last_byte() -> None:
    tokenizer = tiny_tokenizer("byte-fallback")
    fox = [token_id for token_id in tokenizer.encode("🦊") if 4 <= token_id < 260]
    assert len(fox) == 4
    assert pieces(tokenizer, fox) == ["", "", "", "🦊", ""]
    assert pieces(tokenizer, fox[:3]) == ["", "", "", "\ufffd\ufffd\ufffd"]


def test_a_list_of_tokens_at_once() -> None:
    tokenizer = tiny_tokenizer("byte-fallback")
    ids = tokenizer.encode("the 🦊 dog")
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.feed(ids[:4]) + detokenizer.feed(ids[4:]) + detokenizer.finish() == "the 🦊 dog"


@pytest.mark.parametrize("silent", [[1] * 50, [999] * 20], ids=["special", "padding"])
def test_tokens_without_text_do_not_eat_the_space_after_them(silent: list[int]) -> None:
    """A sentence's first space is no text, that of a later word is: whatever stands between them."""
    tokenizer = tiny_tokenizer("byte-fallback")
    the = tokenizer.encode("the")[-1]
    ids = [the, *silent, the]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == "the the"


@pytest.mark.parametrize("broken", [False, True], ids=["text", "broken-bytes"])
def test_work_per_token_is_bounded(monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    tokenizer = tiny_tokenizer("byte-fallback")
    lengths: list[int] = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: lengths.append(len(ids)) or decode(ids))
    ids = [4 + 0x80] * 500 if broken else tokenizer.encode("the dog 🦊 " * 60)
    pieces(tokenizer, ids)
    assert max(lengths) <= 70
    assert len(lengths) <= 2 * len(ids) + 1


class Letters:
    """A tokenizer whose tokens are an "a", a U+FFFD, and one without text."""

    A, HALF, SILENT = range(3)

    def __init__(self, byte_tokens: dict[int, int] | None = None) -> None:
        self.byte_tokens = byte_tokens or {}

    def decode(self, ids: list[int]) -> str:
        return "".join(("a", "\ufffd", "")[token_id] for token_id in ids)


A, HALF, SILENT = Letters.A, Letters.HALF, Letters.SILENT


def fed(*chunks: list[int], tokenizer: Letters) -> list[tuple[str, int | None]]:
    """The text that each chunk of tokens lets out, and with how much unsent the window has moved on, if it has."""
    detokenizer = IncrementalDetokenizer(tokenizer)  # type: ignore[arg-type]
    answers: list[tuple[str, int | None]] = []
    moved: list[int] = []
    move = detokenizer._move

    def note(unsent: int) -> None:
        moved.append(unsent)
        move(unsent)

    detokenizer._move = note  # type: ignore[method-assign]
    for chunk in chunks:
        text = detokenizer._feed_chunk(chunk)
        answers.append((text, moved.pop() if moved else None))
        assert not moved, "it moves once"
    return answers


def test_the_window_moves_on_once_a_text_has_left_whole() -> None:
    chunks = [[A], [HALF], [A], [A, HALF], [SILENT], [A]]
    texts = [("a", 0), ("", None), ("\ufffda", 0), ("a", None), ("", None), ("\ufffda", 0)]
    assert fed(*chunks, tokenizer=Letters()) == texts


def test_the_window_moves_on_when_too_much_is_unread() -> None:
    assert fed([HALF] * 32, [HALF], [HALF], tokenizer=Letters()) == [
        ("\ufffd" * 31, None),
        ("\ufffd", 1),
        ("\ufffd", None),
    ], "the last one is held back, whether or not the window has moved"
    assert fed([A] * 20, [HALF] * 20, tokenizer=Letters())[1] == ("\ufffd" * 19, None), "the context was read before"


def test_nothing_is_held_back_where_bytes_have_tokens_of_their_own() -> None:
    assert fed([A, HALF], [HALF], tokenizer=Letters({9: 0})) == [("a\ufffd", 0), ("\ufffd", 0)]


@pytest.mark.parametrize(
    ("window", "read", "unsent", "expected"),
    [
        ([A, A, A], 1, 0, ([A, A], 2, 2)),
        ([A, A, HALF], 1, 1, ([A, HALF], 2, 1)),
        ([A, A, SILENT], 2, 0, ([A, A], 2, 2)),
        ([A, SILENT, SILENT], 1, 0, ([A], 1, 1)),
        ([SILENT, A], 0, 0, ([SILENT, A], 2, 1)),
    ],
)
def test_unread_tokens_become_the_context_unless_they_have_no_text(
    window: list[int], read: int, unsent: int, expected: tuple[list[int], int, int]
) -> None:
    detokenizer = IncrementalDetokenizer(Letters())  # type: ignore[arg-type]
    detokenizer._window, detokenizer._read = window, read
    detokenizer._move(unsent)
    assert (detokenizer._window, detokenizer._read, detokenizer._sent) == expected


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


def test_of_those_that_end_together_the_longest_counts() -> None:
    stop = StopStrings(["bc", "abc", "c"])
    assert stop.feed("xabc") == "x"
    assert stop.matched == "abc"
    stop = StopStrings(["a", "ba"])
    assert stop.feed("xba") == "x"
    assert stop.matched == "ba", "the longest isn't always the first in the order"


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
    ends = [(text.find(word) + len(word), -len(word), word) for word in words if word in text]
    assert letters.matched == (min(ends)[2] if ends else None)


@given(pieces=st.lists(few_letters, max_size=6), words=st.lists(stop_words, min_size=1, max_size=4))
def test_no_more_is_held_than_could_become_a_stop_string(pieces: list[str], words: list[str]) -> None:
    stop = StopStrings(words)
    shown = ""
    for number, piece in enumerate(pieces):
        shown += stop.feed(piece)
        if stop.matched is None:
            held = "".join(pieces[: number + 1])[len(shown) :]
            assert held == "" or any(word.startswith(held) and word != held for word in words)


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
