"""Prompt lookup and the suffix automaton against searches that are too simple to be wrong, and what does not fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from minisgl.config import EngineConfig
from minisgl.drafters.eagle import EagleDrafter
from minisgl.drafters.model import ModelDrafter
from minisgl.drafters.ngram import NgramDrafter
from minisgl.drafters.protocol import DraftRow, DraftTarget, hidden_layers
from minisgl.drafters.suffix import Match, SuffixAutomaton, SuffixDrafter
from minisgl.errors import ConfigError

TARGET = DraftTarget(EngineConfig(drafter="mine:Own"), 100, 64, 1024, torch.float32)


def texts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, vocab, length).tolist() for vocab in (1, 2, 3, 8) for length in (1, 2, 3, 5, 20, 60)]


def occurrences(text: list[int], piece: list[int]) -> list[int]:
    """Where ``piece`` ends in ``text``, but for the end of the text itself."""
    return [end for end in range(len(piece), len(text)) if text[end - len(piece) : end] == piece]


@pytest.mark.parametrize("text", texts())
@pytest.mark.parametrize("count", [1, 3])
def test_lookup_finds_the_longest_ngram(text: list[int], count: int) -> None:
    expected: list[int] = []
    for n in range(NgramDrafter.SHORTEST, NgramDrafter.LONGEST + 1):
        ends = occurrences(text, text[-n:]) if n <= len(text) else []
        whole = [end for end in ends if end + count <= len(text)]
        if ends:
            begin = whole[-1] if whole else ends[0]
            expected = text[begin : begin + count]
    assert NgramDrafter(TARGET).look_up(np.array(text, dtype=np.int32), count).tolist() == expected


def test_lookup_returns_an_array_of_its_own() -> None:
    tokens = np.array([1, 2, 3, 4, 1, 2], dtype=np.int32)
    drafts = NgramDrafter(TARGET).look_up(tokens, 2)
    assert drafts.dtype == np.int32
    assert drafts.tolist() == [3, 4]
    assert not np.shares_memory(drafts, tokens), "the tokens may change before the drafts are read"


@pytest.mark.parametrize("text", texts())
def test_an_automaton_knows_the_longest_repeated_suffix(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for length, token in enumerate(text, 1):
        automaton.extend(token)
        so_far = text[:length]
        repeated = [n for n in range(1, length) if occurrences(so_far, so_far[-n:])]
        longest = max(repeated, default=0)
        assert automaton.repeated_suffix()[0] == longest
        if longest:
            assert automaton.repeated_suffix()[1] == occurrences(so_far, so_far[-longest:])[0]


@pytest.mark.parametrize("text", texts())
def test_an_automaton_matches_another_text(text: list[int]) -> None:
    automaton, match = SuffixAutomaton(), None
    known: list[int] = []
    match = Match(automaton)
    for length, token in enumerate(text, 1):
        for new in np.random.default_rng(length).integers(0, 3, 4).tolist():  # it grows while it is matched
            automaton.extend(new)
            known.append(new)
        automaton.advance(match, token)
        piece = text[length - match.length : length]
        assert not match.length or automaton.end_of(match) in [*occurrences(known, piece), len(known)]
    fresh = Match(automaton)
    for length, token in enumerate(text, 1):
        automaton.advance(fresh, token)
        ends = [n for n in range(length + 1) if not n or occurrences([*known, -1], text[length - n : length])]
        assert fresh.length == max(ends)


def test_a_suffix_drafter_learns_from_answers_and_forgets_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.drafters.suffix._REMEMBERED", 20)
    drafter = SuffixDrafter(TARGET)

    def drafts(uid: int, *tokens: int) -> list[int]:
        return drafter.propose([DraftRow(uid, 0, np.array(tokens, dtype=np.int32), 4)])[0]

    drafter.finish(0, 3, np.array([70, 71, 72, *range(10)], dtype=np.int32))
    assert drafts(1, 50, 3, 4) == [5, 6, 7, 8]
    assert drafts(2, 50, 70, 71) == [], "a prompt is no answer"
    for uid in range(3, 5):  # both fill an automaton; a request that is running finds them, too
        drafter.finish(uid, 0, np.arange(20 * uid, 20 * uid + 20, dtype=np.int32))
    assert drafts(1, 50, 3, 4, 81, 82) == [83, 84, 85, 86]
    assert drafts(6, 50, 3, 4) == []


@pytest.mark.parametrize("drafter", [ModelDrafter, EagleDrafter])
def test_a_drafter_with_a_model_is_refused_where_ranks_share_the_other(drafter: type) -> None:
    config = EngineConfig(drafter="mine:Own", draft_model="default", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"^drafter: 'mine:Own' works beside the model, and .* is 2"):
        drafter(DraftTarget(config, 100, 64, 1024))
    assert hidden_layers(replace(config, drafter="eagle"), 30) == ()


@pytest.mark.parametrize(
    ("misfit", "message"),
    [
        ({"vocab_size": 99}, "'mine:Own' has a vocabulary of 99 and the model has one of 100"),
        ({"vocab_size": 100, "hidden_size": 32}, "has a hidden size of 32 and the model has one of 64"),
        ({"dtype": torch.bfloat16}, "computes in bfloat16 and the model in float32"),
    ],
)
def test_a_drafter_for_another_model_is_refused(misfit: dict[str, object], message: str) -> None:
    TARGET.check_fits(vocab_size=100, hidden_size=64, dtype=torch.float32)
    with pytest.raises(ConfigError, match=f"^drafter: .*{message}"):
        TARGET.check_fits(**misfit)
