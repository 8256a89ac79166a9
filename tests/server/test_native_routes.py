"""The endpoints that OpenAI's API has not: ``/generate``, ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from tests.server.harness import MESSAGES, PROMPT, RunningServer, wait_until

GREEDY = {"temperature": 0, "max_new_tokens": 12}


def generate(server: RunningServer, **fields: Any) -> Any:
    return server.http.post("/generate", json={"sampling_params": GREEDY, **fields}).json()


def test_text_and_token_ids_give_what_the_offline_engine_gives(server: RunningServer, reference: LLM) -> None:
    (expected,) = reference.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))
    ids = reference.tokenizer.encode(PROMPT)
    for answer in (generate(server, text=PROMPT), generate(server, input_ids=ids)):
        assert (answer["text"], answer["output_ids"]) == (expected.text, expected.token_ids)
        meta = answer["meta_info"]
        assert (meta["finish_reason"], meta["prompt_tokens"]) == ({"type": "length", "length": 12}, len(ids))
        assert meta["completion_tokens"] == 12


def test_several_prompts_or_choices_give_a_list(server: RunningServer) -> None:
    single = generate(server, text=PROMPT)
    lists = [generate(server, text=[PROMPT, "the fox"]), generate(server, input_ids=[[5, 6, 7]])]
    assert [len(answers) for answers in lists] == [2, 1]
    assert lists[0][0]["text"] == single["text"]
    assert lists[0][1]["meta_info"]["prompt_tokens"] < lists[0][0]["meta_info"]["prompt_tokens"]
    sampled = {"max_new_tokens": 8, "sampling_seed": 3, "n": 2, "top_k": -1, "temperature": 1.2}
    both = generate(server, text=PROMPT, sampling_params=sampled)
    second = generate(server, text=PROMPT, sampling_params={**sampled, "sampling_seed": 4, "n": 1})
    assert both[1]["text"] == second["text"] != both[0]["text"]


def test_a_stream_repeats_the_text_so_far(server: RunningServer) -> None:
    whole = generate(server, text=PROMPT)
    events = server.http.post("/generate", json={"sampling_params": GREEDY, "text": PROMPT, "stream": True}).text
    *chunks, done, rest = events.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    bodies = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
    for before, after in pairwise(bodies):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    last = bodies[-1]
    assert (last["text"], last["output_ids"], last["index"]) == (whole["text"], whole["output_ids"], 0)
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 12}


def test_log_probabilities_come_as_sglang_writes_them(server: RunningServer, reference: LLM) -> None:
    (expected,) = reference.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, logprobs=3))
    assert expected.logprobs is not None
    spell = reference.tokenizer.token_text
    top = {"top_logprobs_num": 3, "return_text_in_logprobs": True}
    for fields in ({}, top):
        meta = generate(server, text=PROMPT, return_logprob=True, **fields)["meta_info"]
        assert meta["input_token_logprobs"] == []
        assert [token for _, token, _ in meta["output_token_logprobs"]] == expected.token_ids
        for (logprob, token, text), entry in zip(meta["output_token_logprobs"], expected.logprobs, strict=True):
            assert (logprob, text) == (pytest.approx(entry.logprob, abs=1e-3), spell(token) if fields else None)
        assert ("output_top_logprobs" in meta) is bool(fields)
    for likely, entry in zip(meta["output_top_logprobs"], expected.logprobs, strict=True):
        assert [(token, text) for _, token, text in likely] == [(token, spell(token)) for token, _ in entry.top]
    assert "output_token_logprobs" not in generate(server, text=PROMPT, top_logprobs_num=3)["meta_info"]


@pytest.mark.parametrize("start", [0, 3])
def test_the_prompt_has_log_probabilities_from_where_it_was_asked_for(server: RunningServer, start: int) -> None:
    ids = server.core.tokenizer.encode(PROMPT)
    echoed = server.complete(prompt=ids, max_tokens=0, echo=True, logprobs=2).choices[0].logprobs
    fields = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 2, "sampling_params": {"n": 2}}
    fields["sampling_params"] |= {"max_new_tokens": 0}
    for prompts in ({"text": [PROMPT, "the fox"]}, {"input_ids": [ids, [5, 6, 7, 8]]}):
        answers = generate(server, **prompts, **fields)
        assert [answer["output_ids"] for answer in answers] == [[]] * 4
        assert answers[0]["meta_info"]["output_token_logprobs"] == []
        for meta in (answers[0]["meta_info"], answers[1]["meta_info"]):
            (missing, *logprobs), likely = meta["input_token_logprobs"], meta["input_top_logprobs"]
            assert missing == [None, ids[start], None]
            assert [token for _, token, _ in logprobs] == ids[start + 1 :]
            given = echoed.token_logprobs[start + 1 :]
            assert [logprob for logprob, *_ in logprobs] == pytest.approx(given, abs=1e-3)
            assert (likely[0], [len(each) for each in likely[1:]]) == (None, [2] * len(logprobs))
    assert server.idle()


def test_a_stream_repeats_the_log_probabilities_so_far(server: RunningServer) -> None:
    whole = generate(server, text=PROMPT, return_logprob=True, logprob_start_len=2)["meta_info"]
    body = {"sampling_params": GREEDY, "text": PROMPT, "return_logprob": True, "logprob_start_len": 2, "stream": True}
    *chunks, _, _ = server.http.post("/generate", json=body).text.split("\n\n")
    for answer in (json.loads(chunk.removeprefix("data: ")) for chunk in chunks):
        meta = answer["meta_info"]
        assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
        assert len(meta["input_token_logprobs"]) == len(whole["input_token_logprobs"])
    assert len(meta["output_token_logprobs"]) == 12


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": "x", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"text": [1]}, "text"),
        ({"input_ids": [True]}, "input_ids"),
        ({"input_ids": [[]]}, "input_ids"),
        ({"input_ids": [300]}, "input_ids"),
        ({"text": "x" * 3000}, "text"),
        ({"text": "x", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "x", "sampling_params": {"max_new_tokens": 1000}}, "sampling_params.max_new_tokens"),
        ({"text": "x", "sampling_params": {"sampling_seed": -2}}, "sampling_params.sampling_seed"),
        ({"text": "x", "sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
        ({"text": "x", "sampling_params": {"top_k": -2}}, "sampling_params.top_k"),
        ({"text": "x", "sampling_params": {"skip_special_tokens": False}}, "sampling_params.skip_special_tokens"),
        ({"text": "x", "return_logprob": 1}, "return_logprob"),
        ({"text": "x", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "x", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "x", "return_logprob": True, "logprob_start_len": 9}, "logprob_start_len"),
        (
            {"text": "x", "return_logprob": True, "sampling_params": {"max_new_tokens": 0, "min_new_tokens": 1}},
            "sampling_params.min_new_tokens",
        ),
        ({"text": "x", "image_data": "http://x"}, "image_data"),
    ],
)
def test_mistakes_are_named_as_the_client_knows_them(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    reply = server.http.post("/generate", json=fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    wait_until(server.idle)


def test_text_to_tokens_and_back(server: RunningServer, reference: LLM) -> None:
    tokenizer = reference.tokenizer
    for body, expected in (
        ({"prompt": PROMPT}, tokenizer.encode(PROMPT)),
        ({"prompt": PROMPT, "add_special_tokens": False}, tokenizer.encode(PROMPT, add_special_tokens=False)),
        ({"messages": MESSAGES, "add_special_tokens": False}, tokenizer.encode_chat(MESSAGES)),
        ({"messages": MESSAGES, "model": server.model}, tokenizer.encode_chat(MESSAGES)),
    ):
        told = server.http.post("/tokenize", json=body).json()
        assert told == {"tokens": expected, "count": len(expected), "max_model_len": server.engine.max_seq_len}
        back = server.http.post("/detokenize", json={"tokens": expected}).json()
        assert back == {"prompt": tokenizer.decode(expected), "text": tokenizer.decode(expected)}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x" * 1_050_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 700_000}] * 2}, "messages"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 0}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["1"]}, "tokens[0]"),
    ],
)
def test_mistakes_of_the_other_two(server: RunningServer, path: str, fields: dict[str, Any], param: str) -> None:
    reply = server.http.post(path, json=fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    assert server.http.post(path, json={**fields, "model": "gpt-5"}).status_code in (400, 404)
