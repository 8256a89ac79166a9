"""What goes through all processes and comes back, under load and under attack; and that nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import psutil
import pytest

from minisgl.errors import ContextExceeded, EngineDead, InvalidRequest, QueueFull
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from minisgl.server.process_engine import ProcessEngine
from tests.server.harness import MESSAGES, ProcessServer, in_background, wait_until

FLOOD = 2000


@contextmanager
def held(pid: int) -> Iterator[None]:
    """The process ``pid`` stands still."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_sockets_are_reached_by_their_owner_alone(processes: ProcessServer) -> None:
    directory = processes.engine._topology.directory
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert directory.stat().st_uid == os.getuid()
    names = {path.name for path in directory.iterdir()}
    assert names == {"api", "scheduler", "detokenizer", "tokenizer-0", "tokenizer-1"}
    assert len(directory.name) > len("minisgl-") + 6


def test_no_process_but_the_schedulers_has_pytorch(processes: ProcessServer) -> None:
    """It would take seconds to start and 200 MB in each."""
    assert processes.chat().choices[0].finish_reason
    children = processes.engine._topology.children
    resident = {child.name: psutil.Process(child.pid).memory_info().rss for child in children}
    assert resident.keys() == {"scheduler", "detokenizer", "tokenizer-0", "tokenizer-1"}
    assert all(3 * size < resident["scheduler"] for name, size in resident.items() if name != "scheduler"), resident


async def one_request(engine: ProcessEngine, number: int, chance: random.Random) -> str:
    """A tiny request that may be given up at any time; returns how it ended."""
    length, n, stop = chance.randint(1, 4), chance.choice([1, 1, 2]), chance.choice([[], ["e"]])
    params = SamplingParams(max_tokens=length, n=n, stop=stop)
    prompt: Any = chance.choice(["the cat", [5, 6, 7], "the dog, 12 of them"])
    patience = chance.choice([None, None, 0.0, 0.01, 0.2])
    try:
        async with asyncio.timeout(patience):
            answer = await engine.submit([prompt], params, streaming=number % 2 == 0)
    except TimeoutError:
        return "given up early"
    except QueueFull:
        return "refused"
    try:
        async with asyncio.timeout(patience):
            updates = [update async for update in answer.updates()]
    except TimeoutError:
        answer.abort()
        return "given up"
    ends = [update.finish_reason for update in updates if update.finish_reason]
    assert len(ends) == params.n
    assert set(ends) <= {"stop", "length"}
    return "finished"


def test_a_flood_of_requests_is_answered_and_leaves_nothing(processes: ProcessServer) -> None:
    async def flood() -> Counter[str]:
        chance = random.Random(1)
        requests = [one_request(processes.engine, number, chance) for number in range(FLOOD)]
        return Counter(await asyncio.gather(*requests))

    ends = processes.call(flood(), timeout=200)
    assert sum(ends.values()) == FLOOD
    assert ends["finished"] > FLOOD / 8
    assert ends["given up early"] > 50
    wait_until(processes.idle)
    assert set(processes.states()) == {"api", "scheduler", "detokenizer"}
    assert processes.chat().choices[0].finish_reason == "length"


def test_a_client_that_leaves_is_forgotten_everywhere(processes: ProcessServer) -> None:
    engine = processes.engine
    with held(engine._topology.scheduler.pid):
        body = json.dumps({"model": processes.model, "messages": MESSAGES, "max_tokens": 100, "stream": True})
        for _ in range(2):
            connection = socket.create_connection(processes.address)
            headers = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{headers}\r\n\r\n{body}".encode())
            wait_until(lambda: len(engine._answers) == 1)
            connection.close()
            wait_until(lambda: not engine._answers)
    wait_until(processes.idle)


def test_a_slow_process_slows_the_others_down_and_loses_nothing(
    processes: ProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More steps than the sockets hold: the scheduler has to wait for the detokenizer."""
    monkeypatch.setattr("minisgl.server.async_engine.ANSWER_TIMEOUT", 2.0)
    long: dict[str, Any] = {"stream": True, "max_tokens": 180, "logprobs": 20, "extra_body": {"ignore_eos": True}}
    with held(processes.engine._topology.detokenizer.pid):
        streams = [in_background(lambda: list(processes.complete(**long))) for _ in range(8)]
        wait_until(lambda: len(processes.engine._answers) == 8)
        with pytest.raises(EngineDead, match="has not answered"):
            processes.call(processes.engine.ask())
    for stream in streams:
        chunks: Any = stream()
        assert chunks[-1].choices[0].finish_reason == "length"
        assert sum(len(chunk.choices[0].logprobs.tokens) for chunk in chunks if chunk.choices[0].logprobs) == 180
    wait_until(processes.idle)


def test_a_tokenizer_that_has_too_much_to_do_refuses(processes: ProcessServer) -> None:
    """The event loop never waits: what the sockets cannot hold is refused, and what they hold is answered."""

    async def fill() -> tuple[int, list[Any]]:
        tiny = SamplingParams(max_tokens=1)
        jobs = [asyncio.ensure_future(processes.engine.submit(["x" * 5000], tiny, False)) for _ in range(6000)]
        await asyncio.sleep(0)
        refused = sum(job.done() for job in jobs)
        for link in processes.engine._topology.tokenizers:
            os.kill(link.child.pid, signal.SIGCONT)
        return refused, await asyncio.gather(*jobs, return_exceptions=True)

    first, second = (link.child.pid for link in processes.engine._topology.tokenizers)
    with held(first), held(second):
        refused, answers = processes.call(fill(), timeout=100)
    kinds = Counter(type(answer) for answer in answers)
    assert kinds == {QueueFull: refused, ContextExceeded: len(answers) - refused}, "5,000 characters do not fit"
    assert 0 < refused < len(answers)
    wait_until(processes.idle)


# -- what goes wrong in mini-sglang: numbers as in tests/regressions/test_mini_sglang.py ------------------------------


def test_mini_sglang_4_no_token_follows_the_end(processes: ProcessServer, reference: LLM) -> None:
    eos = reference.tokenizer.eos_ids[0]
    for stream in (False, True):
        answer = processes.complete(logit_bias={str(eos): 100}, logprobs=0, stream=stream)
        chunks = list(answer) if stream else [answer]
        assert sum(len(chunk.choices[0].logprobs.tokens) for chunk in chunks) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": -5},
        {"messages": []},
        {"messages": [{"role": "tool", "content": "the template refuses this"}]},
        {"messages": [{"role": "user", "content": "half a \ud800"}]},
        {"messages": [{"role": "user", "content": "dog " * 1000}]},
        {"messages": [{"role": "user", "content": "x" * 100_000}]},
        {"max_tokens": 100_000},
        {"stop": "\ud800"},
        {"user": "\ud800"},
        {"logit_bias": {str(10**30): 1}},
    ],
    ids=range(10),
)
def test_mini_sglang_5_and_6_bad_requests_get_a_reply_and_kill_nobody(
    processes: ProcessServer, fields: dict[str, Any]
) -> None:
    before = [child.pid for child in processes.engine._topology.children]
    body = json.dumps({"model": processes.model, "messages": MESSAGES, "max_tokens": 4, **fields})
    reply = processes.http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"]
    assert processes.chat(max_tokens=1).choices[0].finish_reason == "length"
    assert [child.pid for child in processes.engine._topology.children] == before
    assert all(psutil.pid_exists(pid) for pid in before)


def test_mini_sglang_5_an_empty_prompt_gets_a_reply(processes: ProcessServer) -> None:
    with pytest.raises(InvalidRequest, match="at least one token"):
        processes.call(processes.engine.submit([[]], SamplingParams(), False))


def test_mini_sglang_7_the_prompt_has_one_bos_and_the_reason_is_true(processes: ProcessServer, reference: LLM) -> None:
    answer = processes.chat()
    assert answer.usage.prompt_tokens == len(reference.tokenizer.encode_chat(MESSAGES))
    assert answer.choices[0].finish_reason == "length"
    text = answer.choices[0].message.content
    assert processes.chat(stop=text[5:8]).choices[0].finish_reason == "stop"


def test_mini_sglang_8_the_queue_has_a_bound(processes: ProcessServer) -> None:
    with pytest.raises(openai.BadRequestError, match="max_queued_requests is 2000"):
        processes.complete(prompt=["the cat"] * 16, n=128, max_tokens=1)
    first = in_background(lambda: processes.complete(prompt=["the cat"] * 15, n=128, max_tokens=6))
    # Until they are in the queue, and not with one of the tokenizers: the other may be faster.
    wait_until(lambda: processes.states()["scheduler"] > 0)
    with pytest.raises(openai.InternalServerError, match="max_queued_requests") as caught:
        processes.complete(prompt=["the cat"] * 15, n=128, max_tokens=1)
    assert (caught.value.status_code, caught.value.code) == (503, "queue_full")
    first()
    wait_until(processes.idle)
