"""A real router, smg, in front of our servers: it finds them, keeps prefixes together, and survives their end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import openai
import pytest

from minisgl.scheduler.policy import PrefillFirst, SchedulerLoad, StepPlan
from minisgl.server.config import ServerConfig
from minisgl.server.launch import bind
from minisgl.server.messages import EngineStats
from tests.server.harness import MESSAGES, RunningServer, chat_checkpoint, in_background, wait_until
from tests.server.templates import QWEN
from tests.server.test_serve import client_of
from tests.server.test_tools import CALL, TOOL, say

pytestmark = pytest.mark.needs("smg")

NAME = "tiny"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_checkpoint(tmp_path_factory.mktemp("workers"), QWEN)


def free_ports(count: int) -> list[int]:
    listeners = [bind("127.0.0.1", 0) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


class Router:
    """``smg`` over servers that run already, ready when it has found all of them."""

    def __init__(self, log: Path, urls: Sequence[str], policy: str, *options: str) -> None:
        port, metrics_port = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        self._urls = set(urls)
        self._log = log
        flags = {
            "host": "127.0.0.1",
            "port": port,
            "prometheus-host": "127.0.0.1",
            "prometheus-port": metrics_port,
            "policy": policy,
            "worker-startup-check-interval": 1,
            "health-check-interval-secs": 1,
            "health-failure-threshold": 1,
            "retry-max-retries": 3,
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        self._command = [sys.executable, "-m", "smg", "launch", *words, *options, "--disable-tokenizer-autoload"]
        self._command += ["--worker-urls", *urls]

    def add(self, url: str) -> None:
        """Name a server that does not run. Call it before the router is started."""
        self._command.append(url)

    def __enter__(self) -> Self:
        with self._log.open("w") as stream:
            self._process = subprocess.Popen(self._command, stdout=stream, stderr=subprocess.STDOUT)
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        try:
            wait_until(lambda: self.healthy() == self._urls and not self.registering(), timeout=60)
        except BaseException as error:
            self.__exit__(None, None, None)
            raise AssertionError(self._log.read_text()[-5000:]) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.http.close()
        self.client.close()
        self._process.kill()
        self._process.wait(30)

    def workers(self) -> list[dict[str, Any]]:
        """What it knows of its workers; none until it answers."""
        assert self._process.poll() is None, self._log.read_text()[-5000:]
        try:
            return list(self.http.get("/workers").json()["workers"])
        except (httpx.TransportError, ValueError):
            return []

    def healthy(self) -> set[str]:
        return {worker["url"] for worker in self.workers() if worker["is_healthy"]}

    def registering(self) -> bool:
        """Whether it still registers a worker, which may be healthy before the routing policy knows of it."""
        return any("job_status" in self.http.get(f"/workers/{worker['id']}").json() for worker in self.workers())

    def chat(self, **fields: Any) -> Any:
        """A chat completion, greedy unless told otherwise."""
        defaults = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
        return self.client.chat.completions.create(**{**defaults, **fields})


@contextmanager
def routed(
    path: Path, log: Path, count: int, policy: str, **options: Any
) -> Iterator[tuple[Router, list[RunningServer]]]:
    with ExitStack() as stack:
        config = ServerConfig(served_model_name=NAME)
        servers = [stack.enter_context(RunningServer(path, config, **options)) for _ in range(count)]
        yield stack.enter_context(Router(log / "smg", [server.url for server in servers], policy)), servers


def total(servers: Sequence[RunningServer], name: str) -> float:
    """The sum of one counter over all servers."""
    lines = [line for server in servers for line in server.http.get("/metrics").text.splitlines()]
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"minisgl_{name}"))


def test_a_router_finds_its_workers_and_passes_everything_through(path: Path, tmp_path: Path) -> None:
    options = {"num_pages": 256, "max_queued_requests": 1, "max_running_requests": 1}
    with routed(path, tmp_path, 2, "cache_aware", **options) as (router, servers):
        for worker in router.workers():
            assert (worker["model_id"], worker["runtime_type"], worker["connection_mode"]) == (NAME, "vllm", "http")
            assert worker["labels"]["max_model_len"] == str(servers[0].engine.max_seq_len)
        assert [model.id for model in router.client.models.list()] == [NAME]
        direct = servers[0].chat(model=NAME, max_tokens=12).choices[0]
        whole = router.chat()
        assert whole.choices[0].message.content == direct.message.content
        assert whole.usage.completion_tokens == 12
        *chunks, last = router.chat(stream=True, stream_options={"include_usage": True})
        assert len(chunks) > 3
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == direct.message.content
        assert last.usage.completion_tokens == 12
        completion = router.client.completions.create(model=NAME, prompt="one two", max_tokens=4, temperature=0)
        again = servers[1].complete(model=NAME, prompt="one two", max_tokens=4)
        assert completion.choices[0].text == again.choices[0].text

        asked = {"text": "one two", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        generated = router.http.post("/generate", json=asked)  # it adds fields of its own, all of which we know
        assert "x-ignored-fields" not in generated.headers
        assert generated.json()["text"] == again.choices[0].text

        for server in servers:
            say(server, CALL)
        (call,) = router.chat(tools=[TOOL], max_tokens=200).choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
        deltas = [chunk.choices[0].delta for chunk in router.chat(tools=[TOOL], max_tokens=200, stream=True)]
        pieces = [piece.function.arguments or "" for delta in deltas for piece in delta.tool_calls or []]
        assert "".join(pieces) == call.function.arguments
        for server in servers:
            server.core.executor.launcher = server.core.engine

        wrong = {"max_tokens": {"max_tokens": 100_000}, "logit_bias": {"logit_bias": {"100000": 1}}}
        for param, fields in wrong.items():  # what only a worker can know
            with pytest.raises(openai.BadRequestError) as of_worker:
                servers[0].chat(model=NAME, **fields)
            with pytest.raises(openai.BadRequestError) as of_router:
                router.chat(**fields)
            assert of_router.value.body == of_worker.value.body
            assert of_router.value.param == param
        full = []
        for server in servers:
            server.gate.allowed = 0
            full.append(in_background(partial(server.chat, model=NAME, max_tokens=2)))
            wait_until(lambda server=server: len(server.core.scheduler.requests) == 1)
        with pytest.raises(openai.InternalServerError, match="queue") as refused:
            router.chat()
        assert refused.value.status_code == 503
        for server in servers:
            server.gate.allowed = None
        assert all(answer().usage.completion_tokens == 2 for answer in full)

        assert router.http.post("/flush_cache").status_code == 200
        assert [server.core.scheduler.memory.cache.num_pages for server in servers] == [0, 0]


def conversations(router: Router, count: int, turns: int) -> None:
    """Users who take turns, each with a long system prompt of their own and a history that grows."""
    system = [f"{number} is the number of this user. " * 5 for number in range(count)]
    histories = [[{"role": "system", "content": text}] for text in system]
    for turn in range(turns):
        for history in histories:
            history.append({"role": "user", "content": f"question {turn}"})
            answer = router.chat(messages=history, max_tokens=4).choices[0].message.content
            history.append({"role": "assistant", "content": answer})


@pytest.mark.parametrize(("workers", "users"), [(2, 13), (4, 9)])
def test_cache_aware_routing_computes_less_than_taking_turns(
    path: Path, tmp_path: Path, workers: int, users: int
) -> None:
    """Each worker holds the conversations of some users, and not of all.

    The router draws lots for a new user as long as it has no report of the workers' load: all 13 of them go to one
    worker once in 4,096 times.
    """
    cached = {}
    for policy in ("round_robin", "cache_aware"):
        with routed(path, tmp_path, workers, policy, num_pages=1000) as (router, servers):
            conversations(router, users, turns=3)
            assert total(servers, "generations_total") == users * 3
            served = [total([server], "generations_total") for server in servers]
            cached[policy] = total(servers, "cached_prompt_tokens_total")
            asked = total(servers, "prompt_tokens_total")
            print(f"{policy}: {served} requests, {cached[policy]:.0f} of {asked:.0f} tokens cached")
            assert max(served) < users * 3, "no worker has all of the work"
            assert all(served) or policy != "round_robin"
    assert cached["cache_aware"] > cached["round_robin"]
    assert cached["cache_aware"] > asked / 2, "a conversation stays with the worker that has its beginning"


class Unhurried(PrefillFirst):
    """A twentieth of a second for each step: what it runs is not over when the test comes to stop it."""

    def plan(self, load: SchedulerLoad) -> StepPlan:
        time.sleep(0.05)
        return super().plan(load)


def test_a_worker_that_is_killed_loses_the_requests_that_it_ran(path: Path, tmp_path: Path) -> None:
    log = tmp_path / "victim"
    options = ["--served-model-name", NAME, "--device", "cpu", "--in-process", "--port", "0", "--num-pages", "200"]
    options += ["--batch-policy", "tests.server.test_routers:Unhurried"]
    command = [sys.executable, "-m", "minisgl.serve", "--model", str(path), *options]
    config = ServerConfig(served_model_name=NAME)
    with ExitStack() as stack:
        with log.open("w") as stream:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            victim = stack.enter_context(subprocess.Popen(command, env=environment, stderr=stream))
        stack.callback(victim.kill)
        survivor = stack.enter_context(RunningServer(path, config, num_pages=1000))
        client = client_of(log, process=victim)
        urls = [survivor.url, str(client.base_url).removesuffix("/v1/")]
        router = stack.enter_context(Router(tmp_path / "smg", urls, "round_robin"))

        survivor.gate.allowed = 3
        streams = [router.chat(stream=True, max_tokens=300, extra_body={"ignore_eos": True}) for _ in range(6)]
        for stream in streams:
            next(iter(stream))
        victim.send_signal(signal.SIGSTOP)  # before it has finished what it runs
        survivor.gate.allowed = None
        wait_until(lambda: total([survivor], "generations_total") == 3, timeout=60)
        victim.kill()
        ended: list[bool] = []
        for stream in streams:
            try:
                ended.append([chunk.choices[0].finish_reason for chunk in stream][-1] == "length")
            except (openai.APIError, httpx.TransportError):
                ended.append(False)
        assert sorted(ended) == [False] * 3 + [True] * 3
        assert all(router.chat().choices[0].finish_reason == "length" for _ in range(6))
        wait_until(lambda: router.healthy() == {survivor.url})


def test_a_worker_that_is_drained_loses_nothing(path: Path, tmp_path: Path) -> None:
    with routed(path, tmp_path, 2, "round_robin", num_pages=1000) as (router, servers):
        drained, other = servers
        for server in servers:
            server.gate.allowed = 3
        fields = {"max_tokens": 40, "extra_body": {"ignore_eos": True}}
        running = [in_background(lambda: list(router.chat(stream=True, **fields))) for _ in range(4)]
        wait_until(lambda: all(len(server.core.scheduler.requests) == 2 for server in servers))
        drained.server.handle_exit(signal.SIGTERM, None)
        assert drained.http.get("/health").status_code == 503
        other.gate.allowed = None
        later = [in_background(lambda: router.chat(**fields)) for _ in range(8)]  # the router may not know yet
        assert all(answer().usage.completion_tokens == 40 for answer in later)
        wait_until(lambda: router.healthy() == {other.url})
        drained.gate.allowed = None
        for stream in running:
            chunks: Any = stream()
            assert chunks[-1].choices[0].finish_reason == "length"
        assert total([other], "generations_total") == 2 + 8
        wait_until(lambda: not drained.server.servers[0].is_serving())
        assert drained.server.exit_code == 0


def test_a_worker_that_lies_and_one_that_is_not_there_cost_no_answer(path: Path, tmp_path: Path) -> None:
    config = ServerConfig(served_model_name=NAME)
    with ExitStack() as stack:
        liar, honest = [stack.enter_context(RunningServer(path, config, num_pages=300)) for _ in range(2)]
        stats = EngineStats(waiting=10**6, running=10**6, pages=300, free_pages=0, cached_pages=0)

        async def lie() -> EngineStats:
            return stats

        liar.engine.stats = lie
        nowhere = f"http://127.0.0.1:{free_ports(1)[0]}"
        options = ["--load-monitor-interval", "1"]
        router = Router(tmp_path / "smg", [liar.url, honest.url], "round_robin", *options)
        router.add(nowhere)
        stack.enter_context(router)
        expected = honest.chat(model=NAME, max_tokens=12).choices[0].message.content
        assert all(router.chat().choices[0].message.content == expected for _ in range(4))

        def leaves_it_alone() -> bool:  # once it has asked for its load, which it does every second
            before = total([liar], "generations_total"), total([honest], "generations_total")
            for _ in range(3):
                router.chat()
            wait_until(lambda: total([liar, honest], "generations_total") == sum(before) + 3)
            return total([liar], "generations_total") == before[0]

        wait_until(leaves_it_alone)
