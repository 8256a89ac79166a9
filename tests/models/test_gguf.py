"""GGUF files: quantised weights stay quantised, rows come in the right order, and other types become floats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from minisgl import LLM, SamplingParams
from minisgl.errors import ModelLoadError
from minisgl.layers.quantization import QuantizedWeight
from minisgl.layers.rotary import RopeSettings, Rotary
from minisgl.models.config import ModelConfig
from minisgl.models.gguf import convert_gguf
from minisgl.models.hub import resolve_model
from minisgl.models.loader import load_model
from tests.models.tiny_wheel import HEADS, HIDDEN, tiny_weights, write_gguf, write_qwen3

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


# -- the rotary embedding ----------------------------------------------------------------------------------------------


def table(tmp_path: Path, more: Callable[[gguf.GGUFWriter], None]) -> torch.Tensor:
    """cos and sin of the model in a file with more fields."""
    write_gguf(tmp_path / "tiny.gguf", more=more)
    path = resolve_model(str(tmp_path / "tiny.gguf"))
    config = ModelConfig.from_dir(path).for_sequences(32)
    return Rotary(config.head_dim, 64, config.rope).table


def expected_table(rope_type: str, **scaling: Any) -> torch.Tensor:
    return Rotary(HIDDEN // HEADS, 64, RopeSettings(rope_type, 100_000.0, scaling)).table


def scaled(*fields: tuple[str, Any]) -> Callable[[gguf.GGUFWriter], None]:
    """``llama.rope.scaling.*``"""

    def add(writer: gguf.GGUFWriter) -> None:
        for name, value in fields:
            method = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
            method(f"llama.rope.scaling.{name}", value)

    return add


def test_every_frequency_is_divided_by_its_factor_in_the_file(tmp_path: Path) -> None:
    factors = np.array([1.0, 1.0, 3.5, 8.0], dtype=np.float32)
    rotations = table(tmp_path, lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    angles = torch.arange(64.0)[:, None] / (torch.from_numpy(factors) * 100_000.0 ** (torch.arange(4) / 4))
    torch.testing.assert_close(rotations, torch.cat([angles.cos(), angles.sin()], dim=1), rtol=0, atol=1e-5)


def test_positions_are_interpolated_as_the_file_says(tmp_path: Path) -> None:
    found = table(tmp_path, scaled(("type", "linear"), ("factor", 4.0)))
    assert torch.equal(found, expected_table("linear", factor=4.0))


@pytest.mark.parametrize("original", [16, None])
def test_yarn_is_that_of_the_file(tmp_path: Path, original: int | None) -> None:
    fields: list[tuple[str, Any]] = [("type", "yarn"), ("factor", 4.0), ("yarn_beta_fast", 16.0)]
    fields += [("original_context_length", original)] if original else []
    expected = expected_table("yarn", factor=4.0, original_max_position_embeddings=original or 64, beta_fast=16.0)
    assert torch.equal(table(tmp_path, scaled(*fields)), expected)


@pytest.mark.parametrize("fields", [[("type", "none"), ("factor", 4.0)], [("type", "linear")], [("finetuned", 1)]])
def test_fields_that_scale_nothing(tmp_path: Path, fields: list[tuple[str, Any]]) -> None:
    assert torch.equal(table(tmp_path, scaled(*fields)), expected_table("default"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([("type", "longrope"), ("factor", 4.0)], r"tiny\.gguf: rope\.scaling\.type 'longrope' is not supported, only"),
        ([("type", "yarn"), ("factor", 4.0), ("yarn_log_multiplier", 0.1)], r"rope\.scaling\.yarn_log_multiplier 0\.1"),
        (
            [("type", "linear"), ("factor", 4.0), ("attn_factor", 2.0)],
            r"rope\.scaling\.attn_factor 2\.0 is not support",
        ),
    ],
)
def test_scaling_that_is_not_supported_is_refused(tmp_path: Path, fields: list[tuple[str, Any]], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        table(tmp_path, scaled(*fields))


def test_factors_and_scaling_in_one_file_are_refused(tmp_path: Path) -> None:
    def both(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.ones(4, dtype=np.float32))
        scaled(("type", "yarn"), ("factor", 4.0))(writer)

    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight and rope\.scaling\.type 'yarn' in one file"):
        table(tmp_path, both)


def test_factors_of_another_width_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight has 3 factors, expected 4"):
        table(tmp_path, lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(3, dtype=np.float32)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([("attention.value_length", 16)], r"tiny\.gguf: attention\.value_length 16 is not supported, only 8"),
        ([("attention.key_length", 16)], r"rope\.dimension_count 8 is not supported, only 16, the width of a head"),
    ],
)
def test_heads_of_two_widths_are_refused(tmp_path: Path, fields: list[tuple[str, int]], message: str) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        for name, value in fields:
            writer.add_uint32(f"llama.{name}", value)

    with pytest.raises(ModelLoadError, match=message):
        table(tmp_path, add)


def test_heads_are_as_wide_as_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "qwen3.gguf"
    write_qwen3(file, head_dim=16)
    path = resolve_model(str(file))
    config = ModelConfig.from_dir(path)
    assert (config.head_dim, config.hidden_size, config.num_heads) == (16, HIDDEN, HEADS)
    weight = load_model(path, config, torch.float32, CPU).model.layers[0].self_attn.o_proj.weight
    assert weight.shape == (HIDDEN, HEADS * 16)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("least", "most"), [(0.05, 0.050002), (-0.3, -0.299999), (0.5, 0.5005), (0.01, 0.0101)])
def test_groups_that_are_narrow_and_far_from_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: float, most: float
) -> None:
    """Their zero points are far away, or beyond float16."""
    narrow = {
        name: torch.linspace(least, most, weight.numel()).view(weight.shape) for name, weight in tiny_weights().items()
    }
    monkeypatch.setattr("tests.models.tiny_wheel.tiny_weights", lambda: narrow)
    file, model = converted(tmp_path, **dict.fromkeys(ALL, Type.Q4_1))
    weight = model.model.layers[0].mlp.down_proj.weight
    back = weight.quantizer.dequantize(weight.tensors)
    # bfloat16, in which these weights are multiplied, rounds by four times as much.
    torch.testing.assert_close(back, meant(file, "blk.0.ffn_down"), rtol=2**-11, atol=0)


def test_a_file_is_converted_once_and_answers(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, dict.fromkeys(ALL, Type.Q4_0))
    path = resolve_model(str(file))
    assert resolve_model(str(file)) == path
    assert [each.name for each in cache.iterdir() if each.is_dir()] == [path.name]
    with LLM(str(file), num_pages=64, max_seq_len=64) as llm:
        (output,) = llm.generate(["hello"], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    assert len(output.token_ids) == 4


def test_a_file_is_converted_again_by_a_newer_converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    path = resolve_model(str(file))
    monkeypatch.setattr("minisgl.models.gguf.VERSION", -1)
    assert resolve_model(str(file)) != path


def test_a_tokenizer_without_optional_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for field in ("bos_token_id", "unk_token_id", "pad_token_id", "chat_template"):
        monkeypatch.setattr(f"gguf.GGUFWriter.add_{field}", lambda self, value: None)
    write_gguf(tmp_path / "tiny.gguf")
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(str(tmp_path / "tiny.gguf")))
    assert (tokenizer.bos_token, tokenizer.unk_token, tokenizer.pad_token, tokenizer.chat_template) == (None,) * 4
    assert tokenizer.eos_token_id == 3
    assert tokenizer.model_max_length == 64


def test_a_tokenizer_without_merges_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gguf.GGUFWriter.add_token_merges", lambda self, value: None)
    write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf: there is no tokenizer\.ggml\.merges; choose a file"):
        resolve_model(str(tmp_path / "tiny.gguf"))


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
