"""``/metrics``, ``/health`` and the log: what an operator sees of what happened."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from minisgl.logs import FIELDS, JsonFormatter, TextFormatter
from minisgl.server.config import ServerConfig
from tests.drafting import DraftsAreFree
from tests.server.harness import MESSAGES, RunningServer, in_background, wait_until

Values = dict[tuple[str, ...], float]


@pytest.fixture
def watched(checkpoint: Path) -> Iterator[RunningServer]:
    with RunningServer(checkpoint, ServerConfig(health_timeout=1.0), max_running_requests=1) as running:
        yield running


def scrape(server: RunningServer) -> Values:
    """Values by name and the values of the labels."""
    text = server.http.get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name.removeprefix("minisgl_"), *sample.labels.values()): sample.value for sample in samples}


def test_requests_tokens_and_times_are_counted(watched: RunningServer) -> None:
    usage = [watched.chat(max_tokens=4).usage for _ in range(2)]
    chunks = list(watched.chat(max_tokens=4, stream=True, logprobs=True))
    pieces = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].logprobs]
    assert sum(len(piece.choices[0].logprobs.content) for piece in pieces) == 4
    assert watched.http.get("/v1/models/nothing").status_code == 404
    # A request is counted when its last byte has left, which may be after it has arrived.
    chats, unknown = (
        ("requests_total", "/v1/chat/completions", "200"),
        ("requests_total", "/v1/models/{model:path}", "404"),
    )
    wait_until(lambda: (counted := scrape(watched)).get(chats) == 3 and counted.get(unknown) == 1)
    values = scrape(watched)
    assert values[chats] == 3
    assert values["generations_total", "length"] == 3
    assert values[("generation_tokens_total",)] == 12
    assert values[("prompt_tokens_total",)] == 3 * usage[0].prompt_tokens
    assert values[("cached_prompt_tokens_total",)] == 2 * usage[1].prompt_tokens_details.cached_tokens > 0
    for name, count in (
        ("time_to_first_token", 1),
        ("inter_token_latency", len(pieces) - 1),  # tokens that a busy machine is late to read come in one piece
        ("request_latency", 3),
        ("queue_time", 3),
    ):
        assert values[(f"{name}_seconds_count",)] == count
        assert values[f"{name}_seconds_bucket", "100.0"] == count
        assert 0 <= values[(f"{name}_seconds_sum",)] < 60


def test_the_engines_inside_is_told_between_two_steps(watched: RunningServer) -> None:
    idle = scrape(watched)
    assert (idle[("engine_up",)], idle[("kv_page_pool_size",)]) == (1, 64)
    assert (idle["kv_pages", "used"], idle[("requests_running",)], idle[("requests_waiting",)]) == (0, 0, 0)
    watched.gate.allowed = 2
    waiting = in_background(lambda: watched.chat(n=2))
    wait_until(lambda: watched.gate.allowed == 0)
    wait_until(lambda: scrape(watched)[("requests_running",)] == 1)
    busy = scrape(watched)
    assert busy[("requests_waiting",)] == 1
    assert busy["kv_pages", "used"] > 0
    assert sum(busy["kv_pages", state] for state in ("used", "cached", "free")) == 64
    watched.gate.allowed = None
    waiting()
    wait_until(lambda: scrape(watched)[("requests_running",)] == 0)
    assert scrape(watched)["kv_pages", "cached"] > 0


def test_the_page_store_is_counted(checkpoint: Path) -> None:
    """Two long prompts take turns in a pool that holds one of them."""
    options: dict[str, Any] = {"page_size": 4, "num_pages": 32, "page_store": "host"}
    with RunningServer(checkpoint, **options) as running:
        assert ("page_store_pages_total", "wanted") in scrape(running)
        for text in "abab":
            running.complete(prompt=text * 100, max_tokens=1)
        wait_until(lambda: scrape(running).get(("page_store_pages_total", "restored"), 0) > 0)
        values = scrape(running)
        evicted, wanted, restored = (
            values["page_store_pages_total", event] for event in ("evicted", "wanted", "restored")
        )
        assert 0 < restored <= evicted
        assert restored < wanted <= 4 * 25


def test_a_dead_engine_is_down_and_the_rest_is_still_shown(
    watched: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def on_tick(server: object, counter: int) -> bool:
        return False

    monkeypatch.setattr(type(watched.server), "on_tick", on_tick)
    watched.gate.error = RuntimeError("struck by lightning")
    assert in_background(watched.chat)() is not None
    wait_until(lambda: scrape(watched)[("engine_up",)] == 0)
    wait_until(lambda: scrape(watched).get(("requests_total", "/v1/chat/completions", "503")) == 1)
    monkeypatch.undo()


def test_whoever_left_is_counted_too(watched: RunningServer) -> None:
    watched.gate.allowed = 2
    stream = watched.chat(stream=True, max_tokens=100)
    next(iter(stream))
    stream.close()
    wait_until(lambda: scrape(watched).get(("generations_total", "abort")) == 1)


def test_health_with_a_token_has_a_time_limit(watched: RunningServer) -> None:
    wait_until(lambda: watched.http.get("/health/generate").status_code == 200)
    watched.gate.allowed = 0
    assert watched.http.get("/health").status_code == 200
    reply = watched.http.get("/health/generate")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_slow")
    watched.gate.allowed = None
    wait_until(watched.idle)


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The log's lines of requests, as a program reads them."""
    formatter = JsonFormatter("api")
    return [json.loads(formatter.format(record)) for record in caplog.records if record.name == "minisgl.request"]


def test_every_request_leaves_one_line_without_its_text(
    watched: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        answer = watched.chat(max_tokens=4, extra_headers={"x-request-id": "first"})
        list(watched.chat(max_tokens=4, stream=True))
        watched.http.post("/v1/completions", json={"model": "lazy", "prompt": MESSAGES[0]["content"]})
        wait_until(lambda: len(lines(caplog)) == 3)
    whole, streamed, refused = lines(caplog)
    assert (whole["request_id"], whole["endpoint"], whole["status"]) == ("first", "POST /v1/chat/completions", 200)
    assert (whole["prompt_tokens"], whole["completion_tokens"]) == (answer.usage.prompt_tokens, 4)
    assert (whole["finish_reason"], whole["stream"], streamed["stream"]) == (["length"], False, True)
    assert 0 <= streamed["first_token_seconds"] <= streamed["seconds"]
    assert (refused["status"], refused["code"]) == (404, "model_not_found")
    for record in caplog.records:
        assert "quick" not in JsonFormatter("api").format(record)
        assert "quick" not in TextFormatter("api").format(record)


def test_an_unknown_path_is_logged_by_its_beginning_and_counted_without(
    watched: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        watched.http.get("/v2/" + "x%0a" * 1000)
        wait_until(lambda: len(lines(caplog)) == 1)
    (line,) = lines(caplog)
    assert (line["endpoint"], line["status"]) == ("GET /v2/" + "x\n" * 38, 404)
    assert "v2" not in watched.http.get("/metrics").text


def test_an_unexpected_error_is_for_the_log_alone(
    watched: RunningServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def submit(*args: object) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(watched.engine, "submit", submit)
    reply = watched.http.post("/v1/completions", json={"model": watched.model, "prompt": "x"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in reply.text
    assert "a secret" in caplog.text


def test_both_styles_of_the_log() -> None:
    record = logging.LogRecord("minisgl", logging.WARNING, "", 0, "line %d", (1,), None)
    setattr(record, FIELDS, {"id": "a b", "tokens": 3})
    line = json.loads(JsonFormatter("api").format(record))
    assert (line["level"], line["message"], line["id"], line["tokens"]) == ("warning", "line 1", "a b", 3)
    assert TextFormatter("api").format(record).endswith('WARNING api line 1 id="a b" tokens=3')


def test_drafts_are_counted(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias lets the model repeat itself, which prompt lookup guesses."""
    monkeypatch.setattr("minisgl.scheduler.speculation.StepCosts", DraftsAreFree)
    same = {"logit_bias": {"9": 100}, "max_tokens": 24, "temperature": 0}
    with RunningServer(checkpoint, drafter="ngram", num_draft_tokens=3) as running:
        usage = running.chat(**same).usage
        counts = usage.completion_tokens_details
        assert usage.completion_tokens == 24
        assert 12 <= counts.accepted_prediction_tokens <= 23
        chunks = list(running.chat(**same, stream=True, stream_options={"include_usage": True}))
        assert chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens >= 12
        none = running.chat(**same, extra_body={"num_draft_tokens": 0}).usage.completion_tokens_details
        assert (none.accepted_prediction_tokens, none.rejected_prediction_tokens) == (0, 0)
        values = scrape(running)
        assert values[("draft_tokens",)] >= values[("accepted_draft_tokens",)] >= 24
        assert 1 < values[("mean_accepted_length",)] <= 3
        assert values[("requests_drafting_paused",)] == 0
        refused = running.http.post(
            "/generate", json={"text": "a", "sampling_params": {"num_draft_tokens": 65, "max_new_tokens": 1}}
        )
        assert refused.status_code == 400
        assert "num_draft_tokens" in refused.json()["error"]["message"]
