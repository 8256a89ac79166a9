from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl.errors import ModelLoadError
from minisgl.models.hub import resolve_model
from tests.models.hub_server import HubServer, serving

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"pickled weights",
    "original/params.json": b"{}",
    "consolidated.safetensors": b"weights again",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A hub with two repositories, and an empty cache."""
    server = HubServer({"owner/model": FILES, "owner/gated": FILES}, gated=frozenset({"owner/gated"}))
    with serving(server) as address:
        point_to(address, monkeypatch, tmp_path)
        yield server


def point_to(address: str, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """What HF_ENDPOINT and HF_HUB_CACHE do when they are set before the client is imported."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))


def names(path: Path) -> set[str]:
    return {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_only_the_needed_files_are_downloaded_and_once(hub: HubServer) -> None:
    path = resolve_model("owner/model")
    assert names(path) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (path / "model.safetensors").read_bytes() == b"weights"
    assert resolve_model("owner/model") == path
    assert sorted(hub.downloads) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_what_is_cached_needs_no_hub(hub: HubServer) -> None:
    path = resolve_model("owner/model")
    hub.failing = True
    assert resolve_model("owner/model") == path


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("owner/nothing", "no such model on the hub: check the spelling"),
        ("owner/gated", "accept its terms"),
        ("./missing/dir", "no directory"),
        ("/missing/dir", "no directory"),
        ("a/b/c", "no directory"),
        ("", "name is empty"),
        ("owner/..", "owner/.."),
    ],
)
def test_names_that_lead_nowhere(hub: HubServer, name: str, says: str) -> None:
    with pytest.raises(ModelLoadError, match=says):
        resolve_model(name)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ModelLoadError, match="give the directory"):
        resolve_model(str(file))


def test_a_failing_hub_is_a_load_error(hub: HubServer) -> None:
    hub.failing = True
    with pytest.raises(ModelLoadError, match="check the network and HF_ENDPOINT"):
        resolve_model("owner/model")


@pytest.mark.parametrize("silent", [False, True], ids=["refused", "silent"])
def test_a_hub_that_does_not_answer_is_a_load_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, silent: bool
) -> None:
    monkeypatch.setattr("minisgl.models.hub._SECONDS_TO_ANSWER", 0.2)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        if silent:
            nobody.listen()
        point_to(f"http://127.0.0.1:{nobody.getsockname()[1]}", monkeypatch, tmp_path)
        with pytest.raises(ModelLoadError, match="check the network and HF_ENDPOINT"):
            resolve_model("owner/model")


def test_the_hub_is_where_hf_endpoint_says(hub: HubServer, tmp_path: Path) -> None:
    """The same in a process of its own, as a user does it."""
    import huggingface_hub

    command = "from minisgl.models.hub import resolve_model; print(resolve_model('owner/model'))"
    environment = {"HF_ENDPOINT": huggingface_hub.constants.ENDPOINT, "HF_HOME": str(tmp_path / "home")}
    result = subprocess.run(
        [sys.executable, "-c", command], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    path = Path(result.stdout.strip())
    assert path.is_relative_to(tmp_path / "home")
    assert names(path) == {"config.json", "model.safetensors", "tokenizer.json"}


def test_the_default_model_comes_from_the_hub_where_that_answers(
    monkeypatch: pytest.MonkeyPatch, hub: HubServer, tmp_path: Path
) -> None:
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "minisgl"))
    hub.repos["HuggingFaceTB/SmolLM2-135M-Instruct"] = FILES
    assert names(resolve_model("default")) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert not (tmp_path / "minisgl").exists()
