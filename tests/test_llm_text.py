"""Stop strings and text, with an executor that says what the test wants said."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from tests.tiny_text_model import Scripted, assert_idle_and_clean, text_checkpoint

ANSWER = "the quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def shared_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(text_checkpoint(tmp_path_factory.mktemp("text")), page_size=4, num_pages=64)


@pytest.fixture
def llm(shared_llm: LLM) -> LLM:
    say(shared_llm, ANSWER)
    assert_idle_and_clean(shared_llm)
    return shared_llm


def say(llm: LLM, text: str) -> list[int]:
    """Let the model answer ``text``, then ``</s>``. Returns the tokens of the text."""
    tokens = llm.tokenizer.encode(text)[1:]  # without the BOS
    llm.loop.executor = Scripted([*tokens, 1])
    return tokens


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 60, **params})


def test_text_ends_before_the_end_token(llm: LLM) -> None:
    tokens = say(llm, ANSWER)
    output = llm.generate("Hello", greedy())[0]
    assert output.text == ANSWER
    assert output.token_ids == [*tokens, 1]
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("brown", "the quick "),
        ("k brown f", "the quic"),  # begins and ends within tokens
        (["jumps over", "fox"], "the quick brown "),
        (["over", "the lazy", "jumps over the"], "the quick brown fox jumps "),
        ("the", ""),
        ("cat", ANSWER),
        ("dog!", ANSWER),  # held back to the end, then released
    ],
)
def test_stop_strings_cut_the_text_before_them(llm: LLM, stop: str | list[str], text: str, streaming: bool) -> None:
    if streaming:
        pieces = list(llm.stream("Hello", greedy(stop=stop)))
        got, reason = "".join(piece.text for piece in pieces), pieces[-1].finish_reason
        assert all(ANSWER.startswith(piece.text) or piece.text in ANSWER for piece in pieces)
    else:
        output = llm.generate("Hello", greedy(stop=stop))[0]
        got, reason = output.text, output.finish_reason
    assert (got, reason) == (text, "stop")
    assert_idle_and_clean(llm)


def test_nothing_is_generated_after_a_stop_string(llm: LLM) -> None:
    tokens = say(llm, ANSWER)
    output = llm.generate("Hello", greedy(stop="brown"))[0]
    text = llm.tokenizer.decode(output.token_ids)
    assert "brown" in text
    assert "brown" not in llm.tokenizer.decode(output.token_ids[:-1])
    assert output.token_ids == tokens[: len(output.token_ids)]


def test_a_stop_string_that_the_last_token_allowed_completes_counts(llm: LLM) -> None:
    needed = len(llm.generate("Hello", greedy(stop="brown"))[0].token_ids)
    exact = llm.generate("Hello", greedy(stop="brown", max_tokens=needed))[0]
    assert (exact.text, exact.finish_reason) == ("the quick ", "stop")
    short = llm.generate("Hello", greedy(stop="brown", max_tokens=needed - 1))[0]
    assert short.finish_reason == "length"
    assert short.text == llm.tokenizer.decode(short.token_ids)
    last = list(llm.stream("Hello", greedy(stop="brown", max_tokens=needed)))[-1]
    assert last.finish_reason == "stop"


def test_min_tokens_defers_stop_strings(llm: LLM) -> None:
    say(llm, "the cat the cat the cat")
    first = llm.generate("Hello", greedy(stop="cat"))[0]
    assert first.text == "the "
    second = llm.generate("Hello", greedy(stop="cat", min_tokens=len(first.token_ids)))[0]
    assert second.text == "the cat the "


def test_several_requests_stop_on_their_own(llm: LLM) -> None:
    params = [greedy(stop="fox"), greedy(), greedy(stop="lazy"), greedy(max_tokens=3), greedy(stop="the")]
    outputs = llm.generate(["Hello"] * 5, params)
    assert [output.finish_reason for output in outputs] == ["stop", "stop", "stop", "length", "stop"]
    assert [output.text for output in outputs[:3]] == [
        "the quick brown ",
        ANSWER,
        "the quick brown fox jumps over the ",
    ]
    assert outputs[4].text == ""


def test_characters_arrive_whole(llm: LLM) -> None:
    say(llm, "naïve café 你好 世界")
    pieces = [delta.text for delta in llm.stream("Hello", greedy())]
    assert "".join(pieces) == "naïve café 你好 世界"
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 5


def test_a_character_cut_short_by_the_length_is_shown_as_such(llm: LLM) -> None:
    tokens = say(llm, "好")
    if len(tokens) > 1:
        deltas = list(llm.stream("Hello", greedy(max_tokens=1)))
        output = llm.generate("Hello", greedy(max_tokens=1))[0]
        assert "".join(delta.text for delta in deltas) == output.text == "\ufffd"
