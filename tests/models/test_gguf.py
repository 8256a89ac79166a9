"""GGUF files: quantised weights stay quantised, rows come in the right order, and other types become floats."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.errors import ModelLoadError
from minisgl.layers.quantization import QuantizedWeight
from minisgl.models.config import ModelConfig
from minisgl.models.gguf import convert_gguf
from minisgl.models.hub import resolve_model
from minisgl.models.loader import load_model
from tests.models.tiny_wheel import HIDDEN, tiny_weights, write_gguf

Type = gguf.GGMLQuantizationType
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def converted(tmp_path: Path, **types: Type) -> tuple[Path, torch.nn.Module]:
    """The file, and the model that is loaded from it."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file, types)
    path = resolve_model(str(file))
    return file, load_model(path, ModelConfig.from_dir(path), torch.float32, CPU)


def meant(file: Path, name: str) -> torch.Tensor:
    """A tensor of the file by the GGUF package's own arithmetic."""
    tensor = next(each for each in gguf.GGUFReader(file).tensors if each.name == f"{name}.weight")
    return torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0])
def test_numbers_and_scales_are_those_of_the_file(tmp_path: Path, kind: Type) -> None:
    file, model = converted(tmp_path, **dict.fromkeys(ALL, kind))
    weight = model.model.layers[1].mlp.down_proj.weight
    assert isinstance(weight, QuantizedWeight)
    assert weight.tensors["weight"].nbytes == weight.rows * weight.columns // (1 if kind == Type.Q8_0 else 2)
    step = weight.tensors["weight_scale"].float().repeat_interleave(32, 1).abs()
    off = (weight.quantizer.dequantize(weight.tensors) - meant(file, "blk.1.ffn_down")).abs()
    assert float((off / step).max()) < (0.02 if kind == Type.Q4_1 else 1e-6), "a zero point is rounded to float16"


def test_rows_of_queries_and_keys_are_sorted_as_the_rotation_wants(tmp_path: Path) -> None:
    _, model = converted(tmp_path, **dict.fromkeys(ALL, Type.Q8_0))
    weight = model.model.layers[0].self_attn.qkv_proj.weight
    q, k, v = (tiny_weights()[f"model.layers.0.self_attn.{name}_proj.weight"].float() for name in "qkv")
    back = weight.quantizer.dequantize(weight.tensors)
    assert float((back - torch.cat([q, k, v])).abs().max()) < 0.02


def test_other_types_and_what_is_merged_with_them_become_floats(tmp_path: Path) -> None:
    types = dict.fromkeys(ALL, Type.Q4_0) | {"v_proj": Type.Q8_0, "down_proj": Type.Q4_1}
    file, model = converted(tmp_path, **types)
    layer = model.model.layers[0]
    assert not isinstance(layer.self_attn.qkv_proj.weight, QuantizedWeight)
    torch.testing.assert_close(
        layer.self_attn.qkv_proj.weight[-HIDDEN // 2 :], meant(file, "blk.0.attn_v"), rtol=0.01, atol=1e-3
    )
    for weight in (layer.self_attn.o_proj.weight, layer.mlp.gate_up_proj.weight, layer.mlp.down_proj.weight):
        assert isinstance(weight, QuantizedWeight)
        assert "weight_zero" in weight.tensors


def test_a_group_of_equal_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = {name: torch.full_like(weight, 0.25) for name, weight in tiny_weights().items()}
    monkeypatch.setattr("tests.models.tiny_wheel.tiny_weights", lambda: flat)
    _, model = converted(tmp_path, **dict.fromkeys(ALL, Type.Q4_1))
    weight = model.model.layers[0].mlp.down_proj.weight
    assert torch.equal(weight.quantizer.dequantize(weight.tensors), torch.full((HIDDEN, 64), 0.25))


def test_a_file_is_converted_once_and_answers(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, dict.fromkeys(ALL, Type.Q4_0))
    path = resolve_model(str(file))
    assert resolve_model(str(file)) == path
    assert [each.name for each in cache.iterdir() if each.is_dir()] == [path.name]
    with LLM(str(file), num_pages=64, max_seq_len=64) as llm:
        (output,) = llm.generate(["hello"], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    assert len(output.token_ids) == 4


def test_a_damaged_file_is_named(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF but no more")
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf: truncated or corrupt"):
        resolve_model(str(file))
    assert not [each for each in cache.iterdir() if each.suffix != ".lock"]


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="architecture 'mamba' is not supported in GGUF; choose from llama"):
        convert_gguf(tmp_path / "other.gguf", tmp_path / "target")
