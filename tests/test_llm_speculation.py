"""Speculative decoding through the offline API: whatever is drafted, the answers are those of the engine without it."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.errors import ConfigError, InvalidRequest
from minisgl.llm import LLM
from minisgl.outputs import RequestOutput
from minisgl.sampling_params import SamplingParams
from tests.drafting import DraftsAreFree, Fails, KnowsTheAnswers, draft_always, drafts_of
from tests.model_zoo import tiny_checkpoint
from tests.sampling import fits
from tests.tiny_text_model import Scripted, assert_idle_and_clean, directed_llm, text_checkpoint

ORACLE = "tests.drafting:KnowsTheAnswers"
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.0, max_tokens=30, logprobs=2),
    SamplingParams(temperature=1.0, max_tokens=15, seed=1, n=2),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_tokens=18, seed=2, logprobs=0),
    SamplingParams(temperature=1.0, min_p=0.05, repetition_penalty=1.3, max_tokens=22, seed=3),
    SamplingParams(temperature=1.0, presence_penalty=0.7, frequency_penalty=0.9, max_tokens=26, seed=4),
    SamplingParams(temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.5, max_tokens=26),
    SamplingParams(temperature=1.0, max_tokens=1, seed=5),
    SamplingParams(temperature=1.2, max_tokens=20, min_tokens=5, stop_token_ids=list(range(0, 300, 5)), seed=6),
    SamplingParams(temperature=1.0, max_tokens=20, seed=7, logit_bias={9: 3.0}, stop=["e", " "]),
    SamplingParams(temperature=1.0, max_tokens=24, seed=8, regex=r"[a-f]{4,9}-[0-9]{3,9}"),
    SamplingParams(temperature=1.0, max_tokens=24, seed=9, json_schema='{"type": "object"}'),
    SamplingParams(temperature=0.0, max_tokens=20, num_draft_tokens=0),
    SamplingParams(temperature=1.0, max_tokens=20, seed=10, logit_bias={9: 100.0, 8: 99.0}),  # repeats itself
]
PROMPTS = [[7, 8, 9] * 3 + [i] * (1 + i % 4) for i in range(len(PARAMS))]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("speculation"))


def make(path: Path, **options: Any) -> LLM:
    sizes = {"page_size": 4, "num_pages": 64, "dtype": "float64", "device": "cpu", "max_running_requests": 4}
    llm = directed_llm(path, **{**sizes, **options})
    return llm if llm.scheduler.speculation is None else draft_always(llm)


def answers(outputs: list[RequestOutput]) -> list[Any]:
    completions = [completion for output in outputs for completion in output.completions]
    return [(c.token_ids, c.text, c.finish_reason, c.error) for c in completions]


def logprobs(outputs: list[RequestOutput]) -> np.ndarray:
    entries = [entry for output in outputs for entry in output.logprobs or ()]
    return np.array([entry.logprob for entry in entries] + [pair for entry in entries for pair in sum(entry.top, ())])


@pytest.fixture(scope="module")
def plain(path: Path) -> list[RequestOutput]:
    return make(path).generate(PROMPTS, PARAMS)


@pytest.fixture
def oracle(plain: list[RequestOutput], monkeypatch: pytest.MonkeyPatch) -> type[KnowsTheAnswers]:
    """Knows the first completion of each prompt, and what would follow some of them."""
    known = [output.prompt_token_ids + output.token_ids for output in plain]
    monkeypatch.setattr(KnowsTheAnswers, "answers", known)
    return KnowsTheAnswers


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_pages": 16, "max_prefill_tokens": 8, "batch_policy": "mixed"},
        {"page_size": 1, "num_pages": 60, "num_draft_tokens": 7, "prefix_cache": "block-hash"},
        {"drafter": "ngram"},
        {"drafter": "suffix", "prefix_cache": "none"},
    ],
)
def test_every_way_to_sample_gives_the_same_tokens(
    path: Path, plain: list[RequestOutput], oracle: type[KnowsTheAnswers], options: dict[str, Any], overlap: bool
) -> None:
    llm = make(path, **{"drafter": ORACLE, "overlap": overlap, **options})
    for _ in range(2):  # what the first time has left in the prefix cache serves the second
        outputs = llm.generate(PROMPTS, PARAMS)
        assert_idle_and_clean(llm)
        assert answers(outputs) == answers(plain)
        assert np.allclose(logprobs(outputs), logprobs(plain), atol=1e-9)
    drafted, accepted = drafts_of(llm)
    assert 0 < accepted < drafted
    assert sum(output.metrics.preemptions for output in outputs) > 0 or "max_prefill_tokens" not in options


def test_right_drafts_save_steps_and_wrong_ones_cost_none(
    path: Path, oracle: type[KnowsTheAnswers], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {}
    for errors in (0.0, 1.0):
        monkeypatch.setattr(oracle, "errors", errors)
        llm = make(path, drafter=ORACLE, num_draft_tokens=3)
        request = llm.prepare(PROMPTS[0], GREEDY)[0]
        llm.submit(request)
        count = 0
        while llm.scheduler.has_work:
            llm.step()
            count += 1
        steps[errors] = count
        assert (request.request.rejected_drafts == 0) == (errors == 0.0)
        assert (request.request.accepted_drafts == 0) == (errors == 1.0)
    assert steps == {0.0: 1 + 10, 1.0: 40}  # 39 tokens behind the prefill's, four a step


def test_a_request_may_have_fewer_drafts(path: Path, oracle: type[KnowsTheAnswers]) -> None:
    llm = make(path, drafter=ORACLE, num_draft_tokens=3)
    longest = []
    launch = llm.executor.launch
    llm.executor.launch = lambda batch: (longest.append(len(batch.drafts)), launch(batch))[1]
    for asked, most in ((None, 3), (2, 2), (0, 0), (9, 3)):
        longest.clear()
        llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=12, num_draft_tokens=asked))
        assert max(longest) == most


def next_probabilities(logits: np.ndarray, tokens: list[int], params: SamplingParams) -> np.ndarray:
    """What a draw behind ``tokens`` must follow: what the fields of ``params`` say, as plainly as it can be written."""
    logits = logits.copy()
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in set(tokens):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    probabilities = np.exp((logits - logits.max()) / params.temperature)
    likeliest_first = np.argsort(-probabilities)
    probabilities[likeliest_first[params.top_k or len(logits) :]] = 0
    probabilities /= probabilities.sum()
    before = 0.0
    for token in likeliest_first.tolist():
        before, probabilities[token] = before + probabilities[token], probabilities[token] * (before < params.top_p)
    probabilities[probabilities < params.min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()


@pytest.mark.parametrize(
    ("fields", "cuts"),
    [
        ({"temperature": 0.7}, False),  # so that some answers are likely and many are possible
        ({"temperature": 2.0, "top_k": 4, "top_p": 0.9}, True),
        ({"temperature": 1.5, "min_p": 0.1, "repetition_penalty": 1.4, "logit_bias": {4: 0.5}}, True),
    ],
    ids=["temperature", "top-k and top-p", "min-p, penalty and bias"],
)
def test_the_draw_of_several_tokens_has_the_models_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], cuts: bool
) -> None:
    """Chi-square over the joint distribution of three tokens, with drafts that prefer some answers."""
    path, model = tiny_checkpoint(tmp_path, "LlamaForCausalLM", vocab_size=6)
    model.double()
    prompt = [1, 2, 3, 1, 2]
    count = 4000
    params = [SamplingParams(**fields, max_tokens=4, seed=seed, ignore_eos=True) for seed in range(count)]

    def behind(*tokens: int) -> np.ndarray:
        known = [*prompt, *tokens]
        with torch.no_grad():
            logits = model(torch.tensor([known])).logits[0, -1]
        return next_probabilities(logits.numpy(), known, params[0])

    joint = np.zeros((6, 6, 6))
    for i, j in itertools.product(range(6), repeat=2):
        joint[i, j] = behind()[i] * behind(i)[j] * behind(i, j)
    assert (joint == 0).any() == cuts
    likely = np.stack(np.unravel_index(np.argsort(-joint.ravel())[:3], joint.shape), 1).tolist()
    monkeypatch.setattr(KnowsTheAnswers, "answers", [prompt + answer for answer in likely])
    llm = LLM(path, dtype="float64", device="cpu", drafter=ORACLE, num_pages=512, max_running_requests=64)
    draft_always(llm)
    outputs = llm.generate([prompt] * count, params)
    drafted, accepted = drafts_of(llm)
    assert 0.1 * drafted < accepted < drafted

    seen = np.zeros_like(joint)
    for output in outputs:
        seen[tuple(output.token_ids[:3])] += 1
    assert (joint * count >= 5).sum() >= 8, "or there is little to compare"
    assert fits(torch.from_numpy(seen.ravel()), torch.from_numpy(joint.ravel()))


def test_nothing_follows_a_stop_string(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(path, drafter=ORACLE, num_draft_tokens=8)
    prompt, tokens = llm.tokenizer.encode("12 of them"), llm.tokenizer.encode("the cat and the dog")
    monkeypatch.setattr(KnowsTheAnswers, "answers", [prompt + tokens])
    monkeypatch.setattr(KnowsTheAnswers, "errors", 0.0)
    llm.executor.launcher = Scripted(tokens)
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, stop=" and")
    output = llm.generate("12 of them", params)[0]
    assert (output.text, output.finish_reason) == ("the cat", "stop")
    alone = make(path)
    alone.executor.launcher = Scripted(tokens)
    assert output.token_ids == alone.generate("12 of them", params)[0].token_ids
    assert drafts_of(llm)[1] >= len(output.token_ids) - 2, "the stop string and what follows it came in one step"
    deltas = list(llm.stream("12 of them", params))
    assert "".join(delta.text for delta in deltas) == "the cat"
    assert [token for delta in deltas for token in delta.token_ids] == output.token_ids
    assert_idle_and_clean(llm)


def test_an_abort_between_steps_spares_the_others(path: Path, oracle: type[KnowsTheAnswers]) -> None:
    for overlap, steps in itertools.product((False, True), range(7)):
        llm = make(path, drafter=ORACLE, overlap=overlap)
        expected = [answer[len(prompt) :] for answer, prompt in zip(oracle.answers[:2], PROMPTS, strict=False)]
        first, other = [llm.prepare(PROMPTS[i], PARAMS[i])[0] for i in range(2)]
        llm.submit(first)
        llm.submit(other)
        for _ in range(steps):
            llm.step()
        llm.abort(first)
        while llm.scheduler.has_work:
            llm.step()
        assert first.request.output == expected[0][: len(first.request.output)]
        assert other.completion().token_ids == expected[1]
        assert_idle_and_clean(llm)


@pytest.mark.parametrize("how", ["raises", "stands still", "too many", "not a token", "negative", "text"])
def test_a_drafter_that_fails_is_switched_off_for_that_request(
    path: Path,
    oracle: type[KnowsTheAnswers],
    how: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Fails, "how", how)
    monkeypatch.setattr("minisgl.scheduler.speculation.TIME_LIMIT", 0.1)
    bad = [9, 9, 9, 4]
    expected = make(path).generate(bad, GREEDY)[0].token_ids
    monkeypatch.setattr(KnowsTheAnswers, "answers", [*oracle.answers, bad + expected])
    llm = make(path, drafter="tests.drafting:Fails")
    with caplog.at_level(logging.ERROR):
        outputs = llm.generate([PROMPTS[0], bad, PROMPTS[1]], [PARAMS[0], GREEDY, PARAMS[1]])
    assert [len(output.token_ids) for output in outputs] == [40, 40, 30]
    assert outputs[1].token_ids == expected
    assert [outputs[0].token_ids, outputs[2].token_ids] == [
        answer[len(prompt) :] for answer, prompt in zip(oracle.answers[:2], PROMPTS, strict=False)
    ]
    errors = [record.message for record in caplog.records]
    assert len(errors) == 1, "once, and not for the others"
    assert "drafts no more for request 1" in errors[0]
    assert drafts_of(llm)[1] > 0, "the others had drafts"
    assert_idle_and_clean(llm)


def test_a_drafter_that_always_stands_still_is_left_alone(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fails, "how", "stands still")
    monkeypatch.setattr("minisgl.scheduler.speculation.TIME_LIMIT", 0.02)
    llm = make(path, drafter="tests.drafting:Fails")
    outputs = llm.generate([[9, i] for i in range(8)], GREEDY)
    assert answers(outputs) == answers(make(path).generate([[9, i] for i in range(8)], GREEDY))
    assert "it stood still 4 times" in caplog.text


def test_what_an_option_must_be(path: Path) -> None:
    for options, message in (
        ({"drafter": "nonesuch"}, "drafter: unknown name 'nonesuch'; choose from eagle, model, ngram, suffix"),
        ({"drafter": 3}, "drafter: must be a string"),
        ({"num_draft_tokens": 0}, "num_draft_tokens: must be an integer from 1 to 64, got 0"),
        ({"num_draft_tokens": 65}, "num_draft_tokens: must be an integer from 1 to 64, got 65"),
    ):
        with pytest.raises(ConfigError, match=f"^{message}"):
            make(path, **options)
    for value in (-1, 65, 1.5, True):
        with pytest.raises(InvalidRequest, match="num_draft_tokens"):
            SamplingParams(num_draft_tokens=value)


def test_the_default_costs_draft_too(path: Path, oracle: type[KnowsTheAnswers]) -> None:
    llm = directed_llm(path, dtype="float64", device="cpu", drafter=ORACLE, num_pages=64)
    assert not isinstance(llm.scheduler.speculation.costs, DraftsAreFree)
    assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == oracle.answers[0][len(PROMPTS[0]) :]
    assert drafts_of(llm)[0] > 0
