"""What the endpoints answer, seen through OpenAI's own client."""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from minisgl.errors import QueueFull
from minisgl.llm import LLM
from minisgl.request import Request
from minisgl.sampling_params import SamplingParams
from minisgl.server.async_engine import Answer
from tests.server.harness import MESSAGES, PROMPT, RunningServer, ServerThread, in_background, wait_until


def text_of(chunks: list[Any]) -> str:
    """Text of a stream of chat or completion chunks with one choice."""
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return "".join((choice.delta.content or "") if hasattr(choice, "delta") else choice.text for choice in choices)


def finish_reasons(chunks: list[Any]) -> list[str]:
    return [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]


def test_chat_equals_the_offline_engine_streaming_and_not(either: ServerThread, reference: LLM) -> None:
    expected = reference.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=24))
    whole = either.chat()
    chunks = list(either.chat(stream=True))
    assert whole.choices[0].message.content == text_of(chunks) == expected.text
    assert whole.choices[0].message.role == chunks[0].choices[0].delta.role == "assistant"
    assert [whole.choices[0].finish_reason] == finish_reasons(chunks) == [expected.finish_reason] == ["length"]
    assert (whole.object, chunks[0].object) == ("chat.completion", "chat.completion.chunk")
    assert {chunk.id for chunk in chunks} != {whole.id}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert whole.model == either.model


def test_completion_equals_the_offline_engine_streaming_and_not(server: RunningServer, reference: LLM) -> None:
    expected = reference.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24))[0]
    whole = server.complete()
    chunks = list(server.complete(stream=True))
    assert whole.choices[0].text == text_of(chunks) == expected.text
    assert [whole.choices[0].finish_reason] == finish_reasons(chunks) == ["length"]
    assert whole.object == chunks[0].object == "text_completion"


def test_a_prompt_may_be_text_tokens_or_a_list_of_either(either: ServerThread, reference: LLM) -> None:
    texts = [PROMPT, "the fox"]
    tokens = [reference.tokenizer.encode(text) for text in texts]
    greedy = SamplingParams(temperature=0, max_tokens=24)
    expected = [output.text for output in reference.generate(texts, greedy)]
    assert either.complete(prompt=tokens[0]).choices[0].text == expected[0]
    for prompts in (texts, tokens):
        answer = either.complete(prompt=prompts)
        assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(expected))
        assert answer.usage.prompt_tokens == sum(map(len, tokens))


def test_content_in_parts_is_the_text_of_the_parts(server: RunningServer) -> None:
    parts = [{"type": "text", "text": text} for text in ("the quick brown fox ", "jumps over the lazy dog")]
    answer = server.chat(messages=[{"role": "user", "content": parts}])
    assert answer.choices[0].message.content == server.chat().choices[0].message.content


def test_n_choices_are_those_of_consecutive_seeds(either: ServerThread) -> None:
    sampled: dict[str, Any] = {"temperature": 1.5, "seed": 7}
    singles = [either.complete(**{**sampled, "seed": seed}).choices[0].text for seed in (7, 8)]
    assert singles[0] != singles[1]
    both = either.complete(**sampled, n=2)
    assert [choice.text for choice in both.choices] == singles
    assert both.usage.completion_tokens == 48
    streamed = ["", ""]
    for chunk in either.complete(**sampled, n=2, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == singles
    several = either.complete(prompt=["the fox", PROMPT], **sampled, n=2)
    assert [choice.text for choice in several.choices][2:] == singles


def test_a_stop_string_cuts_the_text_before_it(either: ServerThread) -> None:
    text = either.complete().choices[0].text
    stop = text[9:12]
    for fields in ({"stop": stop}, {"stop": ["never to be seen", stop]}):
        whole = either.complete(**fields).choices[0]
        assert (whole.text, whole.finish_reason) == (text[: text.index(stop)], "stop")
        chunks = list(either.complete(**fields, stream=True))
        assert (text_of(chunks), finish_reasons(chunks)) == (whole.text, ["stop"])


def test_stop_tokens_minimum_and_bias(either: ServerThread, reference: LLM) -> None:
    tokens = reference.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24))[0].token_ids
    stopped = either.complete(extra_body={"stop_token_ids": [tokens[5]]})
    assert stopped.usage.completion_tokens == tokens.index(tokens[5]) + 1
    assert stopped.choices[0].finish_reason == "stop"
    longer = either.complete(extra_body={"stop_token_ids": [tokens[5]], "min_tokens": 20})
    assert longer.usage.completion_tokens >= 20
    eos = reference.tokenizer.eos_ids[0]
    biased = either.complete(logit_bias={str(eos): 100})
    assert (biased.usage.completion_tokens, biased.choices[0].finish_reason) == (1, "stop")
    ignored = either.complete(logit_bias={str(eos): 100}, extra_body={"ignore_eos": True})
    assert ignored.usage.completion_tokens == 24


def test_other_sampling_fields_reach_the_engine(either: ServerThread, reference: LLM) -> None:
    params: dict[str, Any] = {
        "temperature": 1.3,
        "top_p": 0.9,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
        "seed": 3,
    }
    extra: dict[str, Any] = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2}
    expected = reference.generate(PROMPT, SamplingParams(**params, **extra, max_tokens=24))[0].text
    assert either.complete(**params, extra_body=extra, user="somebody").choices[0].text == expected


def test_the_user_reaches_the_scheduler(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    users: list[str] = []
    add = server.core.scheduler.add

    def noting(request: Request) -> None:
        users.append(request.user)
        add(request)

    monkeypatch.setattr(server.core.scheduler, "add", noting)
    server.complete(user="somebody", max_tokens=1)
    server.chat(user="somebody else", max_tokens=1)
    server.chat(max_tokens=1)
    assert users == ["somebody", "somebody else", ""]


def test_logprobs_of_a_chat(either: ServerThread, reference: LLM) -> None:
    expected = reference.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=8, logprobs=2)).logprobs
    whole = either.chat(max_tokens=8, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    chunks = list(either.chat(max_tokens=8, logprobs=True, top_logprobs=2, stream=True))
    streamed = [entry for chunk in chunks[1:] for entry in chunk.choices[0].logprobs.content]
    assert streamed == whole
    assert [entry.logprob for entry in whole] == pytest.approx([entry.logprob for entry in expected], abs=1e-4)
    for entry, tokens in zip(whole, expected, strict=True):
        assert entry.token == reference.tokenizer.token_text(tokens.token_id)
        assert [top.token for top in entry.top_logprobs] == [reference.tokenizer.token_text(i) for i, _ in tokens.top]
        assert entry.bytes == (None if "\ufffd" in entry.token else list(entry.token.encode()))
        assert entry.top_logprobs[0].logprob == entry.logprob
    assert either.chat(max_tokens=2, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert either.chat(max_tokens=2).choices[0].logprobs is None


def test_logprobs_of_a_completion(server: RunningServer) -> None:
    whole = server.complete(max_tokens=8, logprobs=3).choices[0].logprobs
    assert max(len(top) for top in whole.top_logprobs) == 3, "tokens of equal text share an entry"
    for token, logprob, top in zip(whole.tokens, whole.token_logprobs, whole.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values())
        assert sum(map(math.exp, top.values())) <= 1.0 + 1e-6
    ends = [offset + len(token) for offset, token in zip(whole.text_offset, whole.tokens, strict=True)]
    assert whole.text_offset == [0, *ends[:-1]]
    chunks = [chunk.choices[0].logprobs for chunk in server.complete(max_tokens=8, logprobs=3, stream=True)]
    assert [offset for chunk in chunks for offset in chunk.text_offset] == whole.text_offset
    assert [logprob for chunk in chunks for logprob in chunk.token_logprobs] == whole.token_logprobs
    sampled_only = server.complete(max_tokens=2, logprobs=0).choices[0].logprobs
    assert [len(top) for top in sampled_only.top_logprobs] == [1, 1]


def test_usage_counts_cached_tokens(either: ServerThread) -> None:
    messages = [{"role": "user", "content": "12 of them, of the cat, of the dog, of the fox and of the lazy dog"}]
    first, second = (either.chat(messages=messages).usage for _ in range(2))
    assert first.completion_tokens == 24
    assert first.total_tokens == first.prompt_tokens + 24
    assert first.prompt_tokens_details.cached_tokens < 8
    whole_pages = (second.prompt_tokens - 1) // 4 * 4
    assert second.prompt_tokens_details.cached_tokens == whole_pages
    twice = either.chat(messages=messages, n=2).usage
    assert twice.prompt_tokens_details.cached_tokens == whole_pages
    chunks = list(either.chat(messages=messages, stream=True, stream_options={"include_usage": True}))
    assert (chunks[-1].choices, chunks[-1].usage) == ([], second)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert list(either.chat(stream=True))[-1].usage is None


def test_default_lengths(server: RunningServer) -> None:
    unlimited: dict[str, Any] = {"max_tokens": None, "extra_body": {"ignore_eos": True}}
    assert server.complete(**unlimited).usage.completion_tokens == 16
    capacity = 64 * 4
    chat = server.chat(**unlimited)
    assert chat.choices[0].finish_reason == "length"
    assert chat.usage.total_tokens == capacity + 1, "the KV cache is smaller than the model's context"
    assert server.chat(max_tokens=None, max_completion_tokens=5).usage.completion_tokens == 5


def test_models_and_health(server: RunningServer) -> None:
    (model,) = server.client.models.list().data
    assert (model.id, model.object) == (server.model, "model")
    assert server.http.get("/health").status_code == 200


def test_the_stream_as_it_is_on_the_wire(server: RunningServer) -> None:
    body = {
        "model": server.model,
        "messages": MESSAGES,
        "max_tokens": 3,
        "temperature": 0,
        "stream": True,
        "top_p": None,
    }
    reply = server.http.post("/v1/chat/completions", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.text.split("\n\n")
    assert all(event.startswith('data: {"object":') for event in events[:-2])
    assert events[-2:] == ["data: [DONE]", ""]


def test_sixteen_concurrent_streams_get_what_the_offline_engine_gives(either: ServerThread, reference: LLM) -> None:
    prompts = [f"{PROMPT}, {number} of the {'dog' * (number % 3)}" for number in range(16)]
    params = [{"temperature": float(number % 4 == 0), "seed": 100 + number, "max_tokens": 40} for number in range(16)]
    expected = reference.generate(prompts, [SamplingParams(**each) for each in params])

    async def read(client: openai.AsyncOpenAI, prompt: str, fields: dict[str, Any]) -> list[Any]:
        stream = await client.completions.create(model=either.model, prompt=prompt, stream=True, **fields)
        return [chunk async for chunk in stream]

    async def read_all() -> list[list[Any]]:
        async with openai.AsyncOpenAI(base_url=f"{either.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(read(client, *each) for each in zip(prompts, params, strict=True)))

    answers = asyncio.run(read_all())
    assert [text_of(chunks) for chunks in answers] == [output.text for output in expected]
    assert [finish_reasons(chunks) for chunks in answers] == [[output.finish_reason] for output in expected]
    wait_until(either.idle)


def test_a_prompt_comes_back_before_its_continuation(server: RunningServer, reference: LLM) -> None:
    continued = server.complete(max_tokens=4).choices[0].text
    ids = reference.tokenizer.encode(PROMPT)
    for prompt in (PROMPT, ids):
        assert server.complete(prompt=prompt, max_tokens=4, echo=True).choices[0].text == PROMPT + continued
        chunks = list(server.complete(prompt=prompt, max_tokens=4, echo=True, stream=True))
        assert chunks[0].choices[0].text == PROMPT
        assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + continued
    several = server.complete(prompt=[PROMPT, "the fox"], max_tokens=1, echo=True, n=2)
    assert [choice.text.startswith(PROMPT) for choice in several.choices] == [True, True, False, False]


def test_log_probabilities_of_a_prompt_are_those_of_transformers(server: RunningServer, reference: LLM) -> None:
    prompt = PROMPT * 6  # more tokens than are asked for at once
    ids = reference.tokenizer.encode(prompt)
    assert len(ids) > 65
    oracle = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32)
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
    answer = server.complete(prompt=prompt, max_tokens=3, echo=True, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(ids) + 3
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    wanted = [expected[place, token].item() for place, token in enumerate(ids[1:])]
    assert logprobs.token_logprobs[1 : len(ids)] == pytest.approx(wanted, abs=1e-4)
    for place, top in enumerate(logprobs.top_logprobs[1 : len(ids)]):
        assert max(top.values()) == pytest.approx(expected[place].max().item(), abs=1e-4)
    ends = [offset + len(token) for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)]
    assert logprobs.text_offset == [0, *ends[:-1]]
    assert answer.usage.completion_tokens == 3
    chunks = list(server.complete(prompt=prompt, max_tokens=3, echo=True, logprobs=2, stream=True))
    streamed = [value for chunk in chunks for value in chunk.choices[0].logprobs.token_logprobs]
    assert streamed == pytest.approx([None, *logprobs.token_logprobs[1:]], abs=1e-4)
    assert server.idle()


def test_a_small_queue_scores_a_long_prompt(own_server: RunningServer, server: RunningServer) -> None:
    """In smaller groups; and where the queue is full of the request's own choices, the scores wait for room."""
    body: dict[str, Any] = {"max_tokens": 4, "echo": True, "logprobs": 0}
    expected = server.complete(**body).choices[0].logprobs.token_logprobs
    assert own_server.complete(**body).choices[0].logprobs.token_logprobs[1:] == pytest.approx(expected[1:], abs=1e-4)
    refused = count_refusals(own_server)
    own_server.gate.allowed = 0  # both choices fill the queue
    answer = in_background(lambda: own_server.complete(**body, n=2))
    wait_until(lambda: len(refused) > 1)
    own_server.gate.allowed = None
    for choice in cast(Any, answer()).choices:
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected[1:], abs=1e-4)
    assert own_server.idle()


def count_refusals(server: RunningServer) -> list[QueueFull]:
    """A list to which every job is added that the server's engine refuses from now on."""
    refused: list[QueueFull] = []
    submit = server.engine.submit

    async def counting(*job: Any, **options: Any) -> Answer:
        try:
            return await submit(*job, **options)
        except QueueFull as error:
            refused.append(error)
            raise

    cast(Any, server.engine).submit = counting
    return refused


def test_a_prompt_without_room_is_told_that_a_token_is_generated(server: RunningServer) -> None:
    longest = server.engine.max_seq_len
    with pytest.raises(
        openai.BadRequestError, match=f"shorten it to {longest - 1}, as at least one token is generated"
    ):
        server.complete(prompt=[5] * longest, max_tokens=0, echo=True)
