"""Large bodies: how much of one is parsed while everything else waits, and what they leave in the server's memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from minisgl.server import json_body
from minisgl.server.config import ServerConfig
from minisgl.server.errors import ApiError
from minisgl.server.json_body import read_json
from tests.server.test_serve import client_of

MIB = 2**20


def test_a_body_with_many_keys_is_parsed_up_to_the_limit_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies are parsed on the event loop, so what counts is how many keys there can be."""
    parsed: list[int] = []
    make_object = json_body._object

    def counting(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        parsed.append(len(pairs))
        return make_object(pairs)

    monkeypatch.setattr(json_body, "_object", counting)
    most = ServerConfig().max_body_fields
    read_json(json.dumps({f"{number}": 0 for number in range(most)}).encode())
    assert parsed == [most] == [50_000]
    parsed.clear()
    wide = json.dumps({f"key {number}": 0 for number in range(500_000)})
    many = json.dumps([{"key": 0} for _ in range(500_000)])
    deep = json.dumps({"a": [{f"{number}": {}} for number in range(most)]})
    for body in (wide, many, deep):
        with pytest.raises(ApiError, match="--max-body-fields"):
            read_json(body.encode())
    assert not parsed, "not even a part of them"


@pytest.fixture
def alone(checkpoint: Path, tmp_path: Path) -> Iterator[tuple[httpx.Client, psutil.Process]]:
    """A server that is the only one in its process."""
    command = [sys.executable, "-m", "minisgl.serve", "--model", str(checkpoint), "--in-process", "--port", "0"]
    options = ["--device", "cpu", "--num-pages", "64", "--page-size", "4", "--live-page", "false"]
    log = tmp_path / "log"
    with log.open("w") as file, subprocess.Popen([*command, *options], stderr=file, text=True) as child:
        try:
            url = str(client_of(log, process=child).base_url).removesuffix("/v1/")
            with httpx.Client(base_url=url, timeout=60) as http:
                yield http, psutil.Process(child.pid)
        finally:
            child.terminate()
            child.wait(60)


def test_a_large_text_leaves_no_memory_behind(alone: tuple[httpx.Client, psutil.Process]) -> None:
    http, process = alone
    allowed = "the quick brown fox " * (MIB // 20)
    for text in ("the dog", allowed):  # the first large one makes the allocator's heap as large as it will be
        assert http.post("/tokenize", json={"prompt": text}).status_code == 200
    before = process.memory_info().rss
    bodies = ({"prompt": allowed}, {"prompt": allowed * 7}, {"messages": [{"role": "user", "content": allowed}] * 7})
    statuses = [http.post("/tokenize", json=body).status_code for body in bodies * 2]
    kept = (process.memory_info().rss - before) / MIB
    assert kept < 100, "150 MiB and more, if texts of seven mebibytes are tokenized"
    assert statuses == [200, 400, 400] * 2
