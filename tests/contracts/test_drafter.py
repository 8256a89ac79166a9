"""What every drafter must fulfil: guesses are tokens, few enough, of the right request, and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from minisgl.config import EngineConfig
from minisgl.drafters.protocol import DRAFTERS, Drafter, DraftRow, DraftTarget
from minisgl.engine.build import build_engine
from minisgl.registry import resolve
from tests.model_zoo import tiny_checkpoint
from tools.drafter_head import Head, HeadConfig, save

CONTRACTS = {"make_drafter": (DRAFTERS, Drafter)}
VOCAB = 50
MakeDrafter = Callable[[], Drafter]


WITH_MODELS = ("eagle", "model")  # they say what their weights make them say, whatever was said before


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, and what a drafter with a model drafts with; weights are random."""
    path, _ = tiny_checkpoint(
        tmp_path_factory.mktemp("model"), "LlamaForCausalLM", vocab_size=VOCAB, num_hidden_layers=4
    )
    head = tmp_path_factory.mktemp("head")
    torch.manual_seed(0)
    save(Head(AutoConfig.from_pretrained(path), HeadConfig(VOCAB, 16)), torch.arange(VOCAB), head)
    return {"model": path, "eagle": head}


@pytest.fixture
def make_drafter(request: pytest.FixtureRequest) -> MakeDrafter:
    make = resolve("--impl", request.param, DRAFTERS)
    config, engine = EngineConfig(drafter=request.param), None
    if request.param in WITH_MODELS:
        paths = request.getfixturevalue("checkpoints")
        sizes = {"max_running_requests": 32, "num_pages": 64, "device": "cpu", "dtype": "float32"}
        config = EngineConfig(
            model=str(paths["model"]), drafter=request.param, draft_model=str(paths[request.param]), **sizes
        )
        engine = build_engine(config, paths["model"])
    hidden_size = 8 if engine is None else engine.model_config.hidden_size
    max_seq_len = 4096 if engine is None else engine.max_seq_len
    target = DraftTarget(config, VOCAB, hidden_size, max_seq_len, None if engine is None else engine.dtype, engine)
    return lambda: make(target)


def row(uid: int, tokens: list[int], count: int = 4, slot: int = 0) -> DraftRow:
    return DraftRow(uid, slot, np.array(tokens, dtype=np.int32), count)


def guess(drafter: Drafter, *rows: DraftRow) -> list[list[int]]:
    return [np.asarray(tokens).tolist() for tokens in drafter.propose(rows)]


SENTENCE = [11, 12, 13, 14, 15, 16, 17, 18]


@pytest.mark.not_for(*WITH_MODELS)
def test_a_repetition_is_continued(make_drafter: MakeDrafter) -> None:
    for count in (1, 3, 4):
        assert guess(make_drafter(), row(0, [*SENTENCE, 1, 2, *SENTENCE[:4]], count)) == [SENTENCE[4 : 4 + count]]


def test_guesses_are_few_enough_and_in_the_vocabulary(make_drafter: MakeDrafter) -> None:
    drafter = make_drafter()
    rng = np.random.default_rng(0)
    for uid in range(30):
        tokens = rng.integers(0, VOCAB if uid % 2 else 3, 1 + uid * 2).tolist()
        for count in (1, 2, 7):
            (drafts,) = guess(drafter, row(uid, tokens, count))
            assert len(drafts) <= count
            assert all(0 <= token < VOCAB for token in drafts)


def test_rows_are_answered_in_their_order_and_by_themselves(make_drafter: MakeDrafter) -> None:
    prompts = [[*range(i, i + 8), 0, 49, *range(i, i + 4)] for i in (3, 14, 25, 36)]
    alone = [guess(make_drafter(), row(uid, tokens))[0] for uid, tokens in enumerate(prompts)]
    assert len({tuple(drafts) for drafts in alone}) > 2
    rows = [row(uid, tokens) for uid, tokens in enumerate(prompts)]
    drafter = make_drafter()
    assert guess(drafter, *reversed(rows)) == alone[::-1]
    assert guess(drafter, *rows) == alone, "whoever comes first"
    assert guess(drafter) == []


def test_what_was_verified_counts_and_not_what_was_guessed(make_drafter: MakeDrafter) -> None:
    drafter = make_drafter()
    tokens = [*SENTENCE, 1, 2, *SENTENCE[:4]]
    (drafts,) = guess(drafter, row(5, tokens))
    # The model wanted something else behind the first draft, and went on from there as it did before.
    wanted = 30 if drafts[1] != 30 else 29
    tokens += [drafts[0], wanted, 31, 32, 33, 34, 40, 41, wanted, 31]
    assert guess(drafter, row(5, tokens)) == guess(make_drafter(), row(5, tokens)), "as if it had never guessed"


def test_the_tokens_of_a_request_are_not_changed(make_drafter: MakeDrafter) -> None:
    drafter = make_drafter()
    asked = row(0, [*SENTENCE, *SENTENCE[:3]])
    before = asked.tokens.copy()
    drafts = drafter.propose([asked])[0]
    assert np.array_equal(asked.tokens, before)
    if isinstance(drafts, np.ndarray):
        assert not np.shares_memory(drafts, asked.tokens), "a guess is read after the tokens may have changed"


def test_a_request_comes_back_in_another_slot(make_drafter: MakeDrafter) -> None:
    drafter = make_drafter()
    tokens = [*SENTENCE, 1, 2, *SENTENCE[:3]]
    guess(drafter, row(7, tokens, slot=1), row(8, [9] * 20, slot=2))
    tokens += [SENTENCE[3]]
    alone = guess(make_drafter(), row(7, tokens))[0]
    assert guess(drafter, row(8, [9] * 21, slot=1), row(7, tokens, slot=2))[1] == alone


def test_a_finished_request_is_forgotten(make_drafter: MakeDrafter) -> None:
    drafter = make_drafter()
    drafter.finish(99, 1, np.array([1, 2], dtype=np.int32))  # never seen
    for uid in range(20):
        tokens = [*SENTENCE, uid, *SENTENCE[:4]]
        assert guess(drafter, row(uid, tokens))[0]
        drafter.finish(uid, len(tokens) - 4, np.array(tokens, dtype=np.int32))
    kept = [value for value in vars(drafter).values() if isinstance(value, dict)]
    assert not any(uid in each for each in kept for uid in range(20))


def test_two_drafters_share_nothing(make_drafter: MakeDrafter) -> None:
    one, other = make_drafter(), make_drafter()
    one.finish(0, 1, np.array([1, *SENTENCE], dtype=np.int32))
    guess(one, row(1, [*SENTENCE, *SENTENCE]))
    assert guess(other, row(1, SENTENCE)) == guess(make_drafter(), row(1, SENTENCE))
