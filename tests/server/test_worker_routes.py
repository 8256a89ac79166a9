"""What routers ask of a worker, by the names that they use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl.server.config import ServerConfig
from tests.server.harness import MESSAGES, RunningServer, in_background, wait_until
from tests.server.test_metrics import scrape

HELD = {"page_size": 4, "num_pages": 64}


@pytest.fixture(scope="module")
def worker(checkpoint: Path) -> Iterator[RunningServer]:
    config = ServerConfig(served_model_name="tiny")
    with RunningServer(checkpoint, config, max_running_requests=1, **HELD) as running:
        yield running


def test_a_worker_says_what_it_is_and_what_it_holds(worker: RunningServer, checkpoint: Path) -> None:
    info = worker.http.get("/server_info").json()
    assert info == worker.http.get("/get_server_info").json()
    assert (info["served_model_name"], info["model_path"]) == ("tiny", str(checkpoint))
    assert (info["max_total_tokens"], info["page_size"], info["max_running_requests"]) == (256, 4, 1)
    assert (info["tp_size"], info["dp_size"], info["version"]) == (1, 1, worker.http.get("/version").json()["version"])
    model = worker.http.get("/model_info").json()
    assert model == worker.http.get("/get_model_info").json()
    assert (model["model_type"], model["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert Path(model["tokenizer_path"], "tokenizer.json").is_file()
    (listed,) = worker.http.get("/v1/models").json()["data"]
    assert (listed["id"], listed["root"], listed["max_model_len"]) == ("tiny", str(checkpoint), info["context_length"])


def test_its_load_is_that_of_the_engine(worker: RunningServer) -> None:
    worker.http.post("/flush_cache")
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "n": 3}
    worker.gate.allowed = 2
    try:
        waiting = in_background(lambda: worker.http.post("/v1/chat/completions", json=body).status_code)
        wait_until(lambda: worker.gate.allowed == 0)
        wait_until(lambda: worker.http.get("/get_load").json() == {"load": 3})
        loads = worker.http.get("/v1/loads", params={"include": "core,queues"}).json()
        (load,) = loads["loads"]
        assert (loads["dp_rank_count"], load["dp_rank"]) == (1, 0)
        assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_total_reqs"]) == (1, 2, 3)
        assert (load["max_total_num_tokens"], load["max_running_requests"]) == (256, 1)
        pages = len(worker.core.scheduler.memory.row(int(worker.core.scheduler.table.slots[0])))
        assert load["num_used_tokens"] == 4 * pages > 0
        assert load["token_usage"] == pages / 64
        values = scrape(worker)
        assert values["vllm:num_requests_running", "tiny"] == values[("requests_running",)] == 1
        assert values["vllm:num_requests_waiting", "tiny"] == values[("requests_waiting",)] == 2
        assert values["vllm:kv_cache_usage_perc", "tiny"] == load["token_usage"]
    finally:
        worker.gate.allowed = None
    assert waiting() == 200
    wait_until(lambda: worker.http.get("/v1/loads").json()["loads"][0]["token_usage"] == 0)


def test_a_flush_forgets_what_no_request_uses(worker: RunningServer) -> None:
    def cached_tokens() -> int:
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1}
        usage = worker.http.post("/v1/chat/completions", json=body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached_tokens()
    assert cached_tokens() > 0
    wait_until(worker.idle)
    memory = worker.core.scheduler.memory
    held = memory.cache.num_pages
    assert worker.http.post("/flush_cache").json() == {"flushed_pages": held}
    assert memory.cache.num_pages == 0
    assert worker.http.post("/flush_cache").json() == {"flushed_pages": 0}
    assert cached_tokens() == 0
    assert worker.http.get("/flush_cache").status_code == 405
    worker.core.scheduler.check()


def test_a_flush_reaches_the_page_store(checkpoint: Path) -> None:
    with RunningServer(checkpoint, num_pages=12, page_store="host", page_store_gib=0.001) as server:

        def cached_tokens(prompt: str) -> int:
            return server.complete(prompt=prompt, max_tokens=1).usage.prompt_tokens_details.cached_tokens

        cached_tokens("a" * 40)
        cached_tokens("b" * 40)  # evicts the first
        assert cached_tokens("a" * 40) > 0
        cached_tokens("b" * 40)
        assert server.http.post("/flush_cache").status_code == 200
        assert cached_tokens("a" * 40) == 0
        cached_tokens("b" * 40)
        assert cached_tokens("a" * 40) > 0, "what is stored after the flush is found again"
