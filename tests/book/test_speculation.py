from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from minisgl.book import DraftLog, DraftStep, accept_or_resample, draft_player, draft_steps, suffix_automaton
from minisgl.drafters.suffix import SuffixAutomaton
from minisgl.sampling_params import SamplingParams
from minisgl.trace import observed
from tests.book.drawing import assert_sound, boxes, texts
from tests.drafting import KnowsTheAnswers, draft_always
from tests.tiny_text_model import directed_llm, text_checkpoint

# -- rejection sampling ----------------------------------------------------------------------------------------------


def tables(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """What follows each of three tokens, by the model and by the drafter."""
    rng = np.random.default_rng(seed)
    return rng.dirichlet([1.0] * 3, 3), rng.dirichlet([1.0] * 3, 3)


@pytest.mark.parametrize("seed", range(3))
def test_texts_have_the_models_distribution(seed: int) -> None:
    """Chi-square over the joint distribution of three tokens, with two drafts at a time."""
    model, drafter = tables(seed)
    rng, count = np.random.default_rng(seed), 3000
    seen = np.zeros((3, 3, 3))
    for _ in range(count):
        text = [0]
        while len(text) < 4:
            guess = [text[-1]]
            for _ in range(2):
                guess.append(int(rng.choice(3, p=drafter[guess[-1]])))
            text += accept_or_resample(guess[1:], drafter[guess[:-1]], model[guess], rng)
        seen[tuple(text[1:4])] += 1
    expected = count * model[0][:, None, None] * model[:, :, None] * model[None]
    assert ((seen - expected) ** 2 / expected).sum() < 26 + 4 * np.sqrt(2 * 26)


def test_nothing_is_kept_behind_a_rejected_draft() -> None:
    q = np.array([[1.0, 0.0, 0.0]] * 3)
    p = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    assert accept_or_resample([0, 0, 0], q, p, np.random.default_rng(0)) == [0, 2]


def test_a_token_comes_behind_drafts_that_are_all_accepted() -> None:
    q = np.eye(3)[[0, 1]]
    p = np.eye(3)[[0, 1, 2]]
    assert accept_or_resample([0, 1], q, p, np.random.default_rng(0)) == [0, 1, 2]
    assert accept_or_resample([], q[:0], p[:1], np.random.default_rng(0)) == [0]


# -- pictures --------------------------------------------------------------------------------------------------------


def letters(tokens: list[int]) -> str:
    return "".join(chr(97 + token) for token in tokens)


STEPS = [DraftStep([1, 2, 3], [1, 4]), DraftStep([], [0]), DraftStep([5, 6], [5, 6, 7])]


def test_each_draft_has_a_box_that_says_what_became_of_it() -> None:
    picture = draft_steps(STEPS, letters)
    assert_sound(picture)
    assert [text for text in texts(picture) if text[0] in "✓✗+" and len(text) == 3] == [
        "✓ b",
        "+ e",
        "✗ c",
        "✗ d",
        "+ a",
        "✓ f",
        "✓ g",
        "+ h",
    ]
    assert len(boxes(picture)) == 8
    assert "Step 0: ✓ 'b', + 'e', ✗ 'c', ✗ 'd'." in picture.text


def test_a_player_shows_the_last_steps_and_the_text_so_far() -> None:
    shown = draft_player(STEPS, letters, at_once=2)
    assert len(shown.frames) == 3
    assert shown.headings[-1] == "3 of 3: 6 tokens: …beafgh"
    assert "step 0" not in texts(shown.frames[-1])
    for frame in shown.frames:
        assert_sound(frame)


def test_an_automaton_is_drawn_while_it_grows() -> None:
    automaton = SuffixAutomaton()
    for token in (0, 1, 2, 1, 2, 0):
        automaton.extend(token)
        picture = suffix_automaton(automaton, letters)
        assert_sound(picture)
        assert len(boxes(picture)) == len(automaton._next)
    assert "State 7: 'bc', first ends at 3, link 0; 'b' leads to 4, 'a' leads to 8." in picture.text


def test_a_log_has_every_token_and_every_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = text_checkpoint(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    options = {"page_size": 4, "num_pages": 64, "dtype": "float64", "device": "cpu"}
    prompts = [[3, 4, 5], [9, 8]]
    plain = directed_llm(path, **options).generate(prompts, params)
    monkeypatch.setattr(KnowsTheAnswers, "answers", [each.prompt_token_ids + each.token_ids for each in plain])
    llm = draft_always(directed_llm(path, **options, drafter="tests.drafting:KnowsTheAnswers"))
    log = DraftLog(llm.scheduler.table)
    with observed(log, llm.loop.observers):
        llm.generate(prompts, params)
    for uid, output in enumerate(plain):
        steps = log.steps[uid]
        assert [token for step in steps for token in step.kept] == output.token_ids
        assert steps[0].drafts == []
        assert any(step.drafts for step in steps)
        assert all(step.drafts[: len(step.kept) - 1] == step.kept[:-1] for step in steps)
    stats = llm.scheduler.speculation.stats
    assert sum(len(step.drafts) for steps in log.steps.values() for step in steps) == stats.drafted
