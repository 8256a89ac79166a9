"""Published formats: what is loaded is what their rules say, to the last bit, and what is not understood is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.errors import ConfigError, ModelLoadError
from minisgl.layers.quantization import QuantizedWeight
from minisgl.layers.sharding import SINGLE_RANK, Communicator
from minisgl.models.config import ModelConfig
from minisgl.models.loader import load_model
from tests.distributed.ranks import CPU, on_ranks
from tests.model_zoo import random_tokens, run_dense
from tests.models.published import FORMATS, FP8_CHANNEL, W4A16, edit_config, plain_checkpoint, publish

(PROMPT,) = random_tokens(9)
TOLERANCE = {"int8-channel": 0.05}  # activations are rounded too, by a scale of the rank's part

Published = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """A format → a checkpoint in it, and a plain one with the weights it stands for; made once."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(name: str) -> tuple[Path, Path]:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            plain = plain_checkpoint(directory)
            config, store = FORMATS[name]
            meant = publish(plain, directory / "quantized", config, store)
            save_file(meant, plain / "model.safetensors")
            made[name] = directory / "quantized", plain
        return made[name]

    return make


@pytest.fixture
def copy_of(published: Published, tmp_path: Path) -> Callable[[str], Path]:
    """A checkpoint that a test may spoil."""

    def copy(name: str) -> Path:
        source, target = published(name)[0], tmp_path / name
        target.mkdir()
        for file in source.iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        return target

    return copy


def load(path: Path, ranks: Communicator = SINGLE_RANK, **options: Any) -> Any:
    return load_model(path, ModelConfig.from_dir(path), torch.float32, CPU, communicator=ranks, **options)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def quantized(model: torch.nn.Module) -> dict[str, QuantizedWeight]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedWeight)}


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_that_the_format_means(published: Published, name: str) -> None:
    path, plain = published(name)
    model, expected = load(path), load(plain)
    weights = quantized(model)
    assert len(weights) == 2 * 4  # per layer, qkv, o, gate and up, down
    for at, weight in weights.items():
        meant = expected.get_parameter(at)
        torch.testing.assert_close(weight.quantizer.dequantize(weight.tensors), meant, rtol=1e-6, atol=1e-7)
    assert sum(weight.tensors["weight"].nbytes for weight in weights.values()) <= sum(
        expected.get_parameter(at).numel() for at in weights
    )


@pytest.mark.parametrize("name", FORMATS)
def test_scores_are_those_of_the_weights(published: Published, name: str) -> None:
    path, plain = published(name)
    expected = run_dense(load(plain), PROMPT)[0]
    assert error(run_dense(load(path), PROMPT)[0], expected) < TOLERANCE.get(name, 1e-5)
    assert error(run_dense(load(path, quantization="none"), PROMPT)[0], expected) < 1e-5
    assert not quantized(load(path, quantization="none"))


@pytest.mark.parametrize("name", FORMATS)
def test_ranks_share_numbers_scales_and_groups(published: Published, name: str) -> None:
    path, _ = published(name)
    expected = run_dense(load(path), PROMPT)[0]
    for scores in on_ranks(2, lambda ranks: run_dense(load(path, ranks), PROMPT)[0]):
        assert error(scores, expected) < TOLERANCE.get(name, 1e-5)


@pytest.mark.parametrize("section", ["sparsity_config", "transform_config", "kv_cache_scheme"])
@pytest.mark.parametrize("content", [{}, None])
def test_sections_that_say_nothing(copy_of: Callable[[str], Path], section: str, content: Any) -> None:
    path = copy_of("fp8-channel")
    edit_config(path, **{section: content})
    assert len(quantized(load(path))) == 8


def test_weights_of_format_dense_are_not_sparse(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("fp8-channel")
    edit_config(path, sparsity_config={"format": "dense", "targets": []})
    assert len(quantized(load(path))) == 8


def test_one_scale_of_a_weight_may_have_no_dimension(published: Published, copy_of: Callable[[str], Path]) -> None:
    path = copy_of("fp8-tensor")
    tensors = load_file(path / "model.safetensors")
    scalars = {name: each.reshape(()) for name, each in tensors.items() if name.endswith("weight_scale")}
    save_file(tensors | scalars, path / "model.safetensors")
    expected = run_dense(load(published("fp8-tensor")[0]), PROMPT)[0]
    assert torch.equal(run_dense(load(path), PROMPT)[0], expected)


def test_modules_that_a_checkpoint_keeps_stay_plain(published: Published, copy_of: Callable[[str], Path]) -> None:
    path, plain = copy_of("fp8-block"), published("fp8-block")[1]
    tensors, floats = load_file(path / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [each for each in tensors if "layers.1.mlp.down_proj" in each]:
        del tensors[name]
    tensors["model.layers.1.mlp.down_proj.weight"] = floats["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, path / "model.safetensors")
    edit_config(path, modules_to_not_convert=["lm_head", "model.layers.1.mlp.down_proj"])
    model = load(path)
    assert "model.layers.1.mlp.down_proj.weight" not in quantized(model)
    assert len(quantized(model)) == 7
    torch.testing.assert_close(run_dense(model, PROMPT)[0], run_dense(load(plain), PROMPT)[0], rtol=0, atol=1e-3)


def test_one_part_of_a_merged_projection_cannot_be_kept(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("w4a16")
    edit_config(path, ignore=["lm_head", "re:.*up_proj"])
    with pytest.raises(ModelLoadError, match=r"layers\.0\.mlp\.up_proj\.weight is not quantised, but projections"):
        load(path)


def test_an_implied_tensor_may_be_missing(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("w4a16")
    tensors = load_file(path / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if not name.endswith("weight_shape")}
    save_file(kept, path / "model.safetensors")
    assert len(quantized(load(path))) == 8


def test_biases_of_zeros_are_no_biases(published: Published, copy_of: Callable[[str], Path]) -> None:
    path = copy_of("gptq")
    tensors = load_file(path / "model.safetensors")
    zeros = {"model.layers.0.self_attn.o_proj.bias": torch.zeros(64, dtype=torch.float16)}
    save_file(tensors | zeros, path / "model.safetensors")
    assert torch.equal(run_dense(load(path), PROMPT)[0], run_dense(load(published("gptq")[0]), PROMPT)[0])


# -- what is refused ---------------------------------------------------------------------------------------------------


def group(config: dict[str, Any] = FP8_CHANNEL, **changes: Any) -> dict[str, Any]:
    """What to change for other fields in a group of compressed-tensors, or in sections of it."""
    fields = config["config_groups"]["group_0"]
    merged = {name: {**fields[name], **each} if isinstance(each, dict) else each for name, each in changes.items()}
    return {"config_groups": {"group_0": {**fields, **merged}}}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("fp8-block", {"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported; choose a "),
        ("fp8-block", {"activation_scheme": "static"}, "activation_scheme 'static' is not supported, only 'dynamic'"),
        ("fp8-block", {"weight_block_size": [128]}, "weight_block_size must be two numbers"),
        ("fp8-channel", {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' is not supported"),
        ("fp8-channel", {"config_groups": {"a": {}, "b": {}}}, "config_groups must be one scheme for all layers"),
        ("fp8-channel", {"ignore": "lm_head"}, "ignore must be a list of names"),
        ("fp8-channel", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is not supported, only"),
        ("fp8-channel", {"sparsity_config": []}, r"sparsity_config must be an object, got \[\]"),
        (
            "fp8-channel",
            {"transform_config": {"config_groups": {"R1": {}}}},
            "transform_config is not supported; choose",
        ),
        (
            "fp8-channel",
            group(format="pack-quantized"),
            "format 'pack-quantized' of a group contradicts 'float-quantiz",
        ),
        ("fp8-channel", group(weights={"dynamic": True}), "dynamic True is not supported, only False"),
        ("fp8-channel", group(input_activations={"symmetric": False}), "symmetric False is not supported, only True"),
        ("w4a16", group(W4A16, weights={"dynamic": True}), "dynamic True is not supported, only False"),
        ("fp8-channel", {"quant_method": ["fp8"]}, r"quant_method \['fp8'\] is not supported; choose a checkpoint"),
        ("fp8-channel", {"quant_method": {}}, "quant_method {} is not supported; choose a checkpoint"),
        (
            "fp8-channel",
            {"ignore": ["re:*lm_head"]},
            r"ignore: 're:\*lm_head' is no regular expression \(nothing to repe",
        ),
        ("awq", {"bits": 8}, "bits 8 is not supported, only 4"),
        ("awq", {"version": "gemv"}, "version 'gemv' is not supported"),
        ("awq", {"group_size": "large"}, "group_size must be an even number, or -1 for whole rows, got 'large'"),
        ("awq", {"group_size": 48}, "group_size 48 does not divide the 64 inputs of a layer"),
        ("gptq", {"desc_act": True}, r"desc_act \(act-order\) is not supported.*choose a checkpoint with desc_act fa"),
        ("gptq", {"dynamic": {"-:.*q_proj": {}}}, "dynamic .*q_proj.* is not supported; choose a checkpoint without"),
        ("gptq", {"modules_in_block_to_quantize": [["mlp.up_proj"]]}, "modules_in_block_to_quantize .* is not support"),
        ("gptq", {"lm_head": True}, "lm_head True is not supported"),
    ],
)
def test_what_is_declared_and_not_supported_is_refused(
    copy_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str, changes: dict[str, Any], message: str
) -> None:
    path = copy_of(name)
    edit_config(path, **changes)
    with forbidden_memory(monkeypatch), pytest.raises(ModelLoadError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("name", "tensor", "replacement", "message"),
    [
        ("fp8-block", "weight_scale_inv", None, r"missing: .*q_proj\.weight_scale_inv \(4, 2\)"),
        ("fp8-block", "weight_scale_inv", torch.ones(4, 1), r"wrong shape: .*scale_inv is \(4, 1\).*expected \(4, 2\)"),
        ("fp8-block", "weight", torch.ones(128, 64), r"unsupported dtype: .*q_proj\.weight is F32.*expected F8_E4M3"),
        ("awq", "qzeros", torch.zeros(1, 16, dtype=torch.int32), r"wrong shape: .*qzeros is \(1, 16\)"),
        ("gptq", "scales", None, r"missing: .*q_proj\.scales \(2, 128\)"),
        ("w4a16", "weight_packed", torch.zeros(128, 8), r"unsupported dtype: .*weight_packed is F32.*expected I32"),
    ],
)
def test_tensors_are_compared_before_memory_is_taken(
    copy_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    tensor: str,
    replacement: torch.Tensor | None,
    message: str,
) -> None:
    path = copy_of(name)
    tensors = load_file(path / "model.safetensors")
    at = f"model.layers.0.self_attn.q_proj.{tensor}"
    del tensors[at]
    save_file(tensors if replacement is None else {**tensors, at: replacement}, path / "model.safetensors")
    with forbidden_memory(monkeypatch), pytest.raises(ModelLoadError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("name", "tensor", "found", "message"),
    [
        (
            "gptq",
            "g_idx",
            torch.arange(64).flip(0) // 32,
            r"q_proj\.g_idx: the groups of a row are scattered \(act-order",
        ),
        ("gptq", "bias", torch.full((128,), 5.0), r"q_proj\.bias: the model has no such bias"),
        ("w4a16", "weight_shape", torch.tensor([7, 7]), r"q_proj\.weight_shape: the weight has another shape"),
    ],
)
def test_tensors_that_differ_from_what_is_implied_are_refused(
    copy_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    tensor: str,
    found: torch.Tensor,
    message: str,
) -> None:
    path = copy_of(name)
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, f"model.layers.0.self_attn.q_proj.{tensor}": found}, path / "model.safetensors")
    with forbidden_memory(monkeypatch), pytest.raises(ModelLoadError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("name", "tensor", "factor", "message"),
    [
        ("fp8-channel", "weight_scale", float("nan"), r"q_proj\.weight_scale has numbers that are not finite"),
        ("fp8-block", "weight_scale_inv", float("inf"), r"q_proj\.weight_scale_inv has numbers that are not finite"),
        ("awq", "scales", 1e7, r"q_proj\.weight: its weight_scale has numbers that are not finite in float16"),
    ],
)
@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_scales_that_are_not_finite_are_refused(
    copy_of: Callable[[str], Path], name: str, tensor: str, factor: float, message: str, quantization: str
) -> None:
    path, at = copy_of(name), f"model.layers.0.self_attn.q_proj.{tensor}"
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, at: (tensors[at].float() * factor).bfloat16()}, path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        load(path, quantization=quantization)


def test_an_option_that_contradicts_the_checkpoint_is_refused(published: Published) -> None:
    path, _ = published("awq")
    with pytest.raises(
        ConfigError, match="quantization: 'fp8' contradicts the checkpoint, which is quantised by 'awq'"
    ):
        load(path, quantization="fp8")
    assert quantized(load(path, quantization="int4-zero-point"))


def forbidden_memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A context in which the loader must not allocate."""

    def fail(*_: Any) -> None:
        raise AssertionError("memory was taken before the check")

    monkeypatch.setattr("minisgl.models.loader._materialize", fail)
    return monkeypatch.context()
