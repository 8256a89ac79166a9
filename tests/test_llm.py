"""The offline API on a tiny checkpoint: what goes in, what comes out, in which order, and several at a time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl.errors import ConfigError, InvalidRequest
from minisgl.kvcache.radix import RadixCache
from minisgl.llm import LLM
from minisgl.outputs import Delta
from minisgl.sampling_params import SamplingParams
from tests.tiny_text_model import Scripted, assert_idle_and_clean, directed_llm, text_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TEXTS = ["the quick brown fox", "the cat", "the cat and the dog", "naïve café", "12 of them"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("llm"))


def make(path: Path, **options: Any) -> LLM:
    return LLM(path, **{"page_size": 4, "num_pages": 256, "dtype": "float64", "device": "cpu", **options})


@pytest.fixture(scope="module")
def shared_llm(path: Path) -> LLM:
    return make(path)


@pytest.fixture
def llm(shared_llm: LLM) -> LLM:
    """The same engine for all tests, which leave it idle and clean."""
    assert_idle_and_clean(shared_llm)
    return shared_llm


# -- prompts and parameters ----------------------------------------------------------------------------------------


def test_a_single_text_or_list_of_ids_is_one_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode("the cat")
    for prompt in ("the cat", ids, tuple(ids), np.array(ids), np.array(ids, dtype=np.uint16)):
        outputs = llm.generate(prompt, GREEDY)
        assert len(outputs) == 1
        assert outputs[0].prompt_token_ids == ids
    assert outputs[0].token_ids == llm.generate("the cat", GREEDY)[0].token_ids


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [*TEXTS, [7, 8, 9], np.array([5])]
    params = [SamplingParams(temperature=0.0, max_tokens=20 - 3 * i, ignore_eos=True) for i in range(len(prompts))]
    together = llm.generate(prompts, params)
    alone = [llm.generate([prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert [len(output.token_ids) for output in together] == [20, 17, 14, 11, 8, 5, 2]
    assert all(output.finish_reason == "length" for output in together)
    assert len({tuple(output.token_ids[:2]) for output in together}) == len(prompts)


def test_one_set_of_parameters_serves_all_prompts(llm: LLM) -> None:
    outputs = llm.generate(TEXTS, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    assert [len(output.token_ids) for output in outputs] == [3] * len(TEXTS)
    assert all(1 <= len(output.token_ids) <= 128 for output in llm.generate(TEXTS))


def test_no_prompts_are_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    for output in llm.generate(TEXTS, GREEDY):
        assert output.text == llm.tokenizer.decode(output.token_ids)
        assert output.text


def test_chat_answers_one_conversation_or_many(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in TEXTS[:2]]
    one, other = (llm.chat(conversation, GREEDY) for conversation in conversations)
    many = llm.chat(conversations, GREEDY)
    assert isinstance(many, list)
    assert not isinstance(one, list)
    assert not isinstance(other, list)
    assert one.prompt_token_ids == llm.tokenizer.encode_chat(conversations[0])
    assert [output.token_ids for output in many] == [one.token_ids, other.token_ids]


def test_more_prompts_than_the_queue_holds(path: Path) -> None:
    llm = make(path, max_queued_requests=2, max_running_requests=3)
    prompts = [[i, i + 1, 3] for i in range(20)]
    assert [o.prompt_token_ids for o in llm.generate(prompts, GREEDY)] == prompts
    assert_idle_and_clean(llm)


def test_a_second_turn_finds_the_first_in_the_cache(path: Path, llm: LLM) -> None:
    first = llm.generate([[11] * 9], GREEDY)[0]
    second = llm.generate([[*first.prompt_token_ids, *first.token_ids, 7]], GREEDY)[0]
    assert second.cached_tokens == 20  # of 9 + 12 tokens, the last was never fed
    assert second.token_ids == make(path, prefix_cache="none").generate([second.prompt_token_ids], GREEDY)[0].token_ids


# -- sampling ------------------------------------------------------------------------------------------------------


def test_n_completions_are_those_of_consecutive_seeds(llm: LLM) -> None:
    output = llm.generate("the cat", SamplingParams(max_tokens=10, seed=40, n=3, ignore_eos=True))[0]
    assert len(output.completions) == 3
    single = [SamplingParams(max_tokens=10, seed=40 + i, ignore_eos=True) for i in range(3)]
    expected = [o.token_ids for o in llm.generate(["the cat"] * 3, single)]
    assert [completion.token_ids for completion in output.completions] == expected
    assert len({tuple(tokens) for tokens in expected}) == 3
    assert output.token_ids == expected[0]


def test_a_seed_decides_whatever_else_runs(llm: LLM) -> None:
    seeded = SamplingParams(max_tokens=10, seed=5, ignore_eos=True)
    alone = llm.generate("the cat", seeded)[0].token_ids
    crowd = llm.generate([*TEXTS, "the cat", *TEXTS], [SamplingParams()] * 5 + [seeded] + [SamplingParams()] * 5)
    assert crowd[5].token_ids == alone
    assert llm.generate("the cat", SamplingParams(max_tokens=10, seed=6, ignore_eos=True))[0].token_ids != alone


def test_the_engines_seed_decides_for_requests_without_one(path: Path) -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    drawn = [[o.token_ids for o in make(path, seed=seed).generate(["the cat"] * 3, params)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != drawn[0][1]


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, ignore_eos=True)
    plain, asked, sampled_only = llm.generate(
        ["the cat"] * 3, [GREEDY, params, SamplingParams(max_tokens=6, logprobs=0, ignore_eos=True)]
    )
    assert plain.logprobs is None
    assert asked.logprobs is not None
    assert sampled_only.logprobs is not None
    assert [entry.token_id for entry in asked.logprobs] == asked.token_ids == plain.token_ids[:6]
    for entry in asked.logprobs:
        assert len(entry.top) == 3
        assert entry.top[0] == (entry.token_id, entry.logprob)
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert values[0] < 0
        assert sum(np.exp(values)) < 1
    assert [entry.token_id for entry in sampled_only.logprobs] == sampled_only.token_ids
    assert all(entry.top == () and entry.logprob < 0 for entry in sampled_only.logprobs)


def test_every_end_token_of_the_generation_config_counts(path: Path, tmp_path: Path, llm: LLM) -> None:
    tokens = llm.generate("the cat", GREEDY)[0].token_ids
    assert tokens.index(tokens[4]) == 4
    several = make(text_checkpoint(tmp_path, eos=[299, tokens[4], tokens[8]]))
    stopped, ignored = several.generate(
        ["the cat"] * 2, [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=ignore) for ignore in (False, True)]
    )
    assert (stopped.token_ids, stopped.finish_reason) == (tokens[:5], "stop")
    assert (ignored.token_ids, ignored.finish_reason) == (tokens, "length")
    own = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=[tokens[8]])
    assert several.generate("the cat", own)[0].token_ids == tokens[: tokens.index(tokens[8]) + 1]


def test_min_tokens_keeps_end_tokens_away(path: Path, tmp_path: Path, llm: LLM) -> None:
    tokens = llm.generate("the cat", GREEDY)[0].token_ids
    ends_early = make(text_checkpoint(tmp_path, eos=[tokens[2]]))
    output = ends_early.generate("the cat", SamplingParams(temperature=0.0, max_tokens=12, min_tokens=6))[0]
    assert len(output.token_ids) > 6
    assert tokens[2] not in output.token_ids[:6]


# -- streams -------------------------------------------------------------------------------------------------------


def collect(deltas: list[Delta], index: int = 0) -> tuple[str, list[int], str | None]:
    mine = [delta for delta in deltas if delta.index == index]
    assert [delta.finish_reason for delta in mine[:-1]] == [None] * (len(mine) - 1)
    return "".join(d.text for d in mine), [t for d in mine for t in d.token_ids], mine[-1].finish_reason


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_adds_up_to_what_generate_returns(llm: LLM, text: str) -> None:
    deltas = list(llm.stream(text, GREEDY))
    output = llm.generate(text, GREEDY)[0]
    assert collect(deltas) == (output.text, output.token_ids, "length")
    assert len(deltas) >= len(output.token_ids)


def test_a_stream_of_several_completions(llm: LLM) -> None:
    params = SamplingParams(max_tokens=7, seed=3, n=3, logprobs=1, ignore_eos=True)
    deltas = list(llm.stream("the cat", params))
    output = llm.generate("the cat", params)[0]
    for index, completion in enumerate(output.completions):
        assert collect(deltas, index) == (completion.text, completion.token_ids, "length")
        assert [e for d in deltas if d.index == index for e in d.logprobs or []] == completion.logprobs


def test_interleaved_streams_and_calls(llm: LLM) -> None:
    expected = [(o.text, o.token_ids, "length") for o in llm.generate(TEXTS[:3], GREEDY)]
    streams = [llm.stream(text, GREEDY) for text in TEXTS[:3]]
    deltas: list[list[Delta]] = [[next(stream)] for stream in streams]
    assert llm.generate(TEXTS[1], GREEDY)[0].token_ids == expected[1][1]
    for i in (2, 0, 1):
        deltas[i].append(next(streams[i]))
    for got, stream in zip(deltas, streams, strict=True):
        got += stream
    assert [collect(got) for got in deltas] == expected
    assert_idle_and_clean(llm)


def test_closing_a_stream_aborts_its_request(llm: LLM) -> None:
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    stream, other = llm.stream("the cat", long), llm.stream("the dog", GREEDY)
    next(stream)
    next(other)
    assert len(llm.scheduler.requests) == 2
    stream.close()
    assert len(llm.scheduler.requests) == 1
    assert len(list(other)) >= 11
    assert_idle_and_clean(llm)


# -- several engines, metrics --------------------------------------------------------------------------------------


def test_several_engines_side_by_side(path: Path, llm: LLM) -> None:
    expected = [llm.generate(text, GREEDY)[0].token_ids for text in TEXTS]
    others = [make(path, prefix_cache="none", page_size=1), make(path, batch_policy="mixed", max_prefill_tokens=2)]
    streams = [other.stream(text, GREEDY) for other in (*others, llm) for text in TEXTS]
    got: list[list[int]] = [[] for _ in streams]
    alive = list(range(len(streams)))
    while alive:
        for i in list(alive):
            delta = next(streams[i], None)
            if delta is None:
                alive.remove(i)
            else:
                got[i] += delta.token_ids
    assert got == expected * 3


def test_metrics_are_in_order(llm: LLM) -> None:
    start = time.perf_counter()
    outputs = llm.generate(TEXTS, GREEDY)
    elapsed = time.perf_counter() - start
    for output in outputs:
        metrics = output.metrics
        assert 0 <= metrics.queue_time <= metrics.ttft <= metrics.latency <= elapsed
        assert metrics.latency == pytest.approx(metrics.ttft + 11 * metrics.tpot)
        assert metrics.preemptions == 0


def test_a_progress_bar_counts_requests_and_shows_throughput(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(TEXTS, GREEDY, progress=True)
    shown = capsys.readouterr().err
    assert "5/5" in shown
    assert "prefill=" in shown
    assert "decode=" in shown
    llm.generate(TEXTS, GREEDY)
    assert not capsys.readouterr().err


def test_a_request_stepped_by_hand_needs_no_generation(llm: LLM) -> None:
    """A notebook adds requests to the scheduler itself; `LLM.step` must not look for somebody to tell."""
    request = llm.prepare(llm.tokenizer.encode("the cat"), GREEDY, streaming=True)[0].request
    llm.scheduler.add(request)
    while llm.scheduler.has_work:
        llm.step()
    assert request.output == llm.generate("the cat", GREEDY)[0].token_ids


def test_an_eviction_policy_is_chosen_with_the_cache(path: Path) -> None:
    assert type(make(path, prefix_cache="radix", eviction_policy="lru").scheduler.memory.cache) is RadixCache
    with pytest.raises(ConfigError, match="eviction_policy: unknown name 'oldest'"):
        make(path, eviction_policy="oldest")


def test_a_stream_checks_its_arguments_when_it_is_called(llm: LLM) -> None:
    with pytest.raises(InvalidRequest):
        llm.stream([], GREEDY)


ANSWER = "the quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def shared_text_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return directed_llm(text_checkpoint(tmp_path_factory.mktemp("text")), page_size=4, num_pages=64)


@pytest.fixture
def text_llm(shared_text_llm: LLM) -> LLM:
    say(shared_text_llm, ANSWER)
    assert_idle_and_clean(shared_text_llm)
    return shared_text_llm


def say(text_llm: LLM, text: str) -> list[int]:
    """Let the model answer ``text``, then ``</s>``. Returns the tokens of the text."""
    tokens = text_llm.tokenizer.encode(text)[1:]  # without the BOS
    text_llm.executor.launcher = Scripted([*tokens, 1])
    return tokens


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 60, **params})


def test_text_ends_before_the_end_token(text_llm: LLM) -> None:
    tokens = say(text_llm, ANSWER)
    output = text_llm.generate("Hello", greedy())[0]
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
def test_stop_strings_cut_the_text_before_them(
    text_llm: LLM, stop: str | list[str], text: str, streaming: bool
) -> None:
    if streaming:
        pieces = list(text_llm.stream("Hello", greedy(stop=stop)))
        got, reason = "".join(piece.text for piece in pieces), pieces[-1].finish_reason
        assert all(ANSWER.startswith(piece.text) or piece.text in ANSWER for piece in pieces)
    else:
        output = text_llm.generate("Hello", greedy(stop=stop))[0]
        got, reason = output.text, output.finish_reason
    assert (got, reason) == (text, "stop")
    assert_idle_and_clean(text_llm)


def test_nothing_is_generated_after_a_stop_string(text_llm: LLM) -> None:
    tokens = say(text_llm, ANSWER)
    output = text_llm.generate("Hello", greedy(stop="brown"))[0]
    text = text_llm.tokenizer.decode(output.token_ids)
    assert "brown" in text
    assert "brown" not in text_llm.tokenizer.decode(output.token_ids[:-1])
    assert output.token_ids == tokens[: len(output.token_ids)]


def test_a_stop_string_that_the_last_token_allowed_completes_counts(text_llm: LLM) -> None:
    needed = len(text_llm.generate("Hello", greedy(stop="brown"))[0].token_ids)
    exact = text_llm.generate("Hello", greedy(stop="brown", max_tokens=needed))[0]
    assert (exact.text, exact.finish_reason) == ("the quick ", "stop")
    short = text_llm.generate("Hello", greedy(stop="brown", max_tokens=needed - 1))[0]
    assert short.finish_reason == "length"
    assert short.text == text_llm.tokenizer.decode(short.token_ids)
    last = list(text_llm.stream("Hello", greedy(stop="brown", max_tokens=needed)))[-1]
    assert last.finish_reason == "stop"


def test_min_tokens_defers_stop_strings(text_llm: LLM) -> None:
    say(text_llm, "the cat the cat the cat")
    first = text_llm.generate("Hello", greedy(stop="cat"))[0]
    assert first.text == "the "
    second = text_llm.generate("Hello", greedy(stop="cat", min_tokens=len(first.token_ids)))[0]
    assert second.text == "the cat the "


def test_several_requests_stop_on_their_own(text_llm: LLM) -> None:
    params = [greedy(stop="fox"), greedy(), greedy(stop="lazy"), greedy(max_tokens=3), greedy(stop="the")]
    outputs = text_llm.generate(["Hello"] * 5, params)
    assert [output.finish_reason for output in outputs] == ["stop", "stop", "stop", "length", "stop"]
    assert [output.text for output in outputs[:3]] == [
        "the quick brown ",
        ANSWER,
        "the quick brown fox jumps over the ",
    ]
    assert outputs[4].text == ""


def test_characters_arrive_whole(text_llm: LLM) -> None:
    say(text_llm, "naïve café 你好 世界")
    pieces = [delta.text for delta in text_llm.stream("Hello", greedy())]
    assert "".join(pieces) == "naïve café 你好 世界"
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 5


def test_a_character_cut_short_by_the_length_is_shown_as_such(text_llm: LLM) -> None:
    tokens = say(text_llm, "好")
    if len(tokens) > 1:
        deltas = list(text_llm.stream("Hello", greedy(max_tokens=1)))
        output = text_llm.generate("Hello", greedy(max_tokens=1))[0]
        assert "".join(delta.text for delta in deltas) == output.text == "\ufffd"
