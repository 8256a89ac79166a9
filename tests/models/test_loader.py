"""The loader: files in every shape, and one error that names everything that is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from minisgl.errors import ModelLoadError
from minisgl.layers.rotary import Rotary
from minisgl.models import loader
from minisgl.models.config import ModelConfig
from minisgl.models.loader import load_model, read_headers
from tests.model_zoo import run_dense, tiny_checkpoint

CPU = torch.device("cpu")
PROMPT = torch.arange(9, dtype=torch.int32).numpy()


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> torch.nn.Module:
    return load_model(path, ModelConfig.from_dir(path), dtype, CPU, **options)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path, "LlamaForCausalLM")[0]


def edit(path: Path, **changes: torch.Tensor | None) -> None:
    """Set tensors of a single-file checkpoint; None removes one. Dots are written as double underscores."""
    tensors = load_file(path / "model.safetensors")
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors")


def shard(path: Path) -> list[Path]:
    """Split a single-file checkpoint so that neighbouring projections lie in different files."""
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    (path / "model.safetensors").unlink()
    files = [f"model-0000{i + 1}-of-00003.safetensors" for i in range(3)]
    for i, file in enumerate(files):
        save_file({name: tensors[name] for name in names[i::3]}, path / file)
    weight_map = {name: files[i % 3] for i, name in enumerate(names)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return [path / file for file in files]


def test_headers_of_every_shard_are_read(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    files = shard(llama)
    headers = read_headers(llama)
    assert headers.keys() == tensors.keys()
    assert {header.file for header in headers.values()} == set(files)
    for name, tensor in tensors.items():
        assert headers[name].shape == tuple(tensor.shape)
        assert headers[name].dtype == "F32"
        with safe_open(headers[name].file, framework="pt") as file:
            assert name in file.keys(), f"{name} is in another file than {headers[name].file.name}"  # noqa: SIM118


def test_a_damaged_file_is_named_by_its_headers(llama: Path) -> None:
    file = shard(llama)[1]
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ModelLoadError, match=rf"^{file}: truncated or corrupt.*download it again"):
        read_headers(llama)


def test_shards_equal_the_single_file(llama: Path) -> None:
    (expected,) = run_dense(load(llama), PROMPT)
    shard(llama)
    torch.testing.assert_close(run_dense(load(llama), PROMPT)[0], expected, rtol=0, atol=0)


def test_parameters_have_the_wanted_dtype_and_no_gradient(llama: Path) -> None:
    model = load(llama, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert not model.training


def test_tensors_that_exports_add_are_ignored(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True)
    (expected,) = run_dense(load(path), PROMPT)
    edit(path, lm_head__weight=torch.zeros(211, 32), model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    torch.testing.assert_close(run_dense(load(path), PROMPT)[0], expected, rtol=0, atol=0)


def test_one_error_names_every_bad_tensor(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(
        llama,
        model__norm__weight=None,
        model__layers__1__self_attn__v_proj__weight=None,
        model__layers__0__mlp__up_proj__weight=torch.zeros(48, 31),
        model__layers__0__self_attn__q_proj__bias=torch.zeros(32),
        model__layers__0__mlp__gate_proj__weight=torch.zeros(48, 32, dtype=torch.int8),
    )
    monkeypatch.setattr("minisgl.models.loader._materialize", lambda *_: pytest.fail("memory was allocated"))
    with pytest.raises(ModelLoadError) as caught:
        load(llama)
    assert str(caught.value).splitlines()[1:] == [
        "  missing: model.layers.1.self_attn.v_proj.weight (16, 32)",
        "  missing: model.norm.weight (32,)",
        "  unsupported dtype: model.layers.0.mlp.gate_proj.weight is I8 in model.safetensors; "
        "quantised weights cannot be read",
        "  wrong shape: model.layers.0.mlp.up_proj.weight is (48, 31) in model.safetensors, expected (48, 32)",
        "  unexpected: model.layers.0.self_attn.q_proj.bias (32,) in model.safetensors",
    ]


def test_a_missing_head_of_an_untied_model_is_missing(llama: Path) -> None:
    edit(llama, lm_head__weight=None)
    with pytest.raises(ModelLoadError, match=r"missing: lm_head\.weight"):
        load(llama)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "Qwen3MoeForCausalLM")
    edit(path, model__layers__1__mlp__experts__5__up_proj__weight=None)
    with pytest.raises(ModelLoadError, match=r"missing: model\.layers\.1\.mlp\.experts\.5\.up_proj\.weight \(16, 32\)"):
        load(path)


def test_missing_shards_are_named(llama: Path) -> None:
    files = shard(llama)
    files[0].unlink()
    files[2].unlink()
    with pytest.raises(ModelLoadError, match=rf"missing shards.*{files[0].name}, {files[2].name}; download"):
        load(llama)


def test_a_tensor_that_only_the_index_knows_is_missing(llama: Path) -> None:
    files = shard(llama)
    tensors = load_file(files[1])
    name = min(tensors)
    del tensors[name]
    save_file(tensors, files[1])
    with pytest.raises(ModelLoadError, match=rf"missing: {name}"):
        load(llama)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty"])
def test_damaged_files_are_named(llama: Path, damage: str) -> None:
    file = shard(llama)[1]
    content = {"truncated": file.read_bytes()[:-10], "garbage": b"\x07" * 500, "empty": b""}[damage]
    file.write_bytes(content)
    with pytest.raises(ModelLoadError, match=rf"{file.name}: truncated or corrupt.*download it again"):
        load(llama)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_is_named(llama: Path, content: str) -> None:
    (llama / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"index\.json: not a valid index"):
        load(llama)


def test_no_weights_at_all(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"no weights: neither model\.safetensors nor .*load_format='dummy'"):
        load(llama)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_the_model_is_built_without_memory(llama: Path, monkeypatch: pytest.MonkeyPatch, load_format: str) -> None:
    """But for the tables of rotary positions, which no checkpoint would fill."""
    built: list[tuple[set[bool], set[bool]]] = []
    materialize = loader._materialize

    def watched(model: torch.nn.Module, *where: Any) -> None:
        tables = [module.table for module in model.modules() if isinstance(module, Rotary)]
        built.append(({each.is_meta for each in model.parameters()}, {each.is_meta for each in tables}))
        materialize(model, *where)

    monkeypatch.setattr(loader, "_materialize", watched)
    load(llama, load_format=load_format)
    assert built == [({True}, {False})]


def test_dummy_weights_need_no_files_and_follow_the_seed(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "Qwen3MoeForCausalLM")
    (path / "model.safetensors").unlink()
    one, same, other = (dict(load(path, load_format="dummy", seed=seed).named_parameters()) for seed in (1, 1, 2))
    for name, parameter in one.items():
        if "norm" in name:
            assert (parameter == 1).all()
            continue
        torch.testing.assert_close(parameter, same[name], rtol=0, atol=0)
        assert not torch.equal(parameter, other[name])
    assert float(one["model.embed_tokens.weight"].std()) == pytest.approx(0.02, rel=0.05)


_MEASURE = """
import sys
from pathlib import Path
import torch
from minisgl.models.config import ModelConfig
from minisgl.models.loader import load_model, read_headers

def status(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024

path = sys.argv[1]
config = ModelConfig.from_dir(path)
before = status("VmRSS")
model = load_model(path, config, torch.float32, torch.device("cpu"))
weights = sum(parameter.nbytes for parameter in model.parameters())
print(weights, status("VmHWM") - before)
"""


def test_peak_memory_is_the_weights_and_one_shard(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
    path, hf = tiny_checkpoint(tmp_path, "LlamaForCausalLM", **sizes, num_key_value_heads=8, head_dim=64)
    (path / "model.safetensors").unlink()
    hf.save_pretrained(path, max_shard_size="20MB")
    largest = max(file.stat().st_size for file in path.glob("*.safetensors"))
    measured = subprocess.run([sys.executable, "-c", _MEASURE, str(path)], capture_output=True, text=True, check=True)
    weights, peak = map(int, measured.stdout.split())
    assert weights > 100e6
    assert largest < 25e6
    assert weights < peak < weights + largest + 0.1 * weights
