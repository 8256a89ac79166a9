"""Checkpoints whose tensors lie in another way than ours: packed, reordered, with other names, or in MXFP4."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.errors import ConfigError, ModelLoadError
from minisgl.layers.quantization import QuantizedWeight
from minisgl.layers.quantizers import Fp8Block
from minisgl.layers.rotary import NO_POSITIONS, RopeSettings, Rotary, rotate
from minisgl.layers.sharding import SINGLE_RANK, Communicator, Shard, ShardSpec
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import CausalLM
from minisgl.models.loader import load_model
from tests.distributed.ranks import CPU, on_ranks
from tests.model_zoo import ARCHITECTURES, hf_logits, random_tokens, run_dense, tiny_checkpoint

PHI4_MINI = next(variant.overrides for variant in ARCHITECTURES if variant.name == "phi4-mini")
(PROMPT,) = random_tokens(19)


def load(path: Path, scheme: str = "auto", ranks: Communicator = SINGLE_RANK) -> Any:
    return load_model(path, ModelConfig.from_dir(path), torch.float32, CPU, communicator=ranks, quantization=scheme)


def test_a_packed_tensor_is_cut_in_each_of_its_parts() -> None:
    packed = torch.arange(16)
    spec = ShardSpec(0, Shard(4, 8, 8), (Shard(2, 4, 4), Shard(2, 4, 4)))
    assert spec.total == 16
    assert spec.of(packed).tolist() == [4, 5, 6, 7, 10, 11, 14, 15]


def test_reordered_heads_have_the_dot_products_of_neighbours_that_are_rotated_together() -> None:
    rope = RopeSettings(rotated=0.5, interleaved=True)
    order = rope.head_order(16)
    assert order == [0, 2, 4, 6, 8, 9, 10, 11, 1, 3, 5, 7, 12, 13, 14, 15]
    assert RopeSettings().head_order(16) is None
    positions = torch.arange(6, dtype=torch.int32)
    rotation = Rotary(16, 6, rope)(positions, torch.float32)
    q, k = torch.randn(2, 6, 1, 16, generator=torch.Generator().manual_seed(3))

    def by_hand(x: torch.Tensor) -> torch.Tensor:
        """Element 2i and its neighbour turn by position × 10000^(-2i/8), as complex numbers."""
        turned = torch.view_as_complex(x[:, 0, :8].reshape(6, 4, 2).contiguous())
        angles = positions[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
        turned = turned * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([torch.view_as_real(turned).flatten(1), x[:, 0, 8:]], dim=1)

    ours = [rotate(x[..., order], rotation)[:, 0] for x in (q, k)]
    torch.testing.assert_close(ours[0] @ ours[1].T, by_hand(q) @ by_hand(k).T, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("architecture", "overrides"), [("Phi3ForCausalLM", PHI4_MINI), ("Glm4ForCausalLM", {})])
@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_packed_and_reordered_weights_are_quantised(
    tmp_path: Path, architecture: str, overrides: dict[str, Any], scheme: str
) -> None:
    """A row out of its place gives other scores altogether. With ranks, each part has rows of its own."""
    path, hf = tiny_checkpoint(tmp_path, architecture, **overrides)
    expected = hf_logits(hf, PROMPT)
    model = load(path, scheme)
    assert isinstance(model.model.layers[0].self_attn.qkv_proj.weight, QuantizedWeight)
    alone = run_dense(model, PROMPT)[0]
    assert float((alone - expected).norm() / expected.norm()) < 0.4
    first, _ = on_ranks(2, lambda ranks: run_dense(load(path, scheme, ranks), PROMPT)[0])
    assert float((first - expected).norm() / expected.norm()) < 0.4


def test_rows_that_share_a_scale_with_others_are_not_reordered() -> None:
    weight = QuantizedWeight(Fp8Block((12, 16)), 32, Shard.whole(16), torch.float32)
    with pytest.raises(ConfigError, match=r"reordered in groups of 8 rows, and 12 rows share a weight_scale"):
        weight.reorder_rows(torch.arange(32), within=8)


def test_longrope_keeps_the_set_of_factors_that_its_longest_sequence_needs(tmp_path: Path) -> None:
    path, hf = tiny_checkpoint(tmp_path, "Phi3ForCausalLM", **{**PHI4_MINI, "original_max_position_embeddings": 64})
    config = ModelConfig.from_dir(path)
    (short,), (long,) = random_tokens(40), random_tokens(80)
    for longest, prompt in ((64, short), (65, long), (512, long)):
        model = load_model(path, config.for_sequences(longest), torch.float32, CPU)
        assert float((run_dense(model, prompt)[0] - hf_logits(hf, prompt)).abs().max()) < 1e-4
    # transformers has changed to the other set, which an engine cannot do: its keys are in the cache already.
    assert float((run_dense(model, short)[0] - hf_logits(hf, short)).abs().max()) > 1e-2


# -- gpt-oss in MXFP4 ------------------------------------------------------------------------------------------------

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def _in_blocks(tensors: dict[str, torch.Tensor], name: str, generator: torch.Generator) -> torch.Tensor:
    """Put random blocks in the place of a weight, [E, K, N], and return the weight that they stand for, by loops."""
    experts, columns, rows = tensors.pop(name).shape
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(121, 125, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
    tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    weight = torch.empty(experts, columns, rows)
    numbers, exponents = blocks.tolist(), scales.tolist()
    for e in range(experts):
        for n in range(rows):
            for k in range(columns):
                pair = numbers[e][n][k // 32][k % 32 // 2]
                weight[e, k, n] = FP4[pair >> 4 if k % 2 else pair & 15] * 2.0 ** (exponents[e][n][k // 32] - 127)
    return weight


def test_experts_in_mxfp4_are_dequantised(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 1}
    path, hf = tiny_checkpoint(tmp_path, "GptOssForCausalLM", **sizes, layer_types=["full_attention"])
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    for name, parameter in hf.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            with torch.no_grad():
                parameter.copy_(_in_blocks(tensors, name, generator))
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
    expected = hf_logits(hf, PROMPT)
    torch.testing.assert_close(run_dense(load(path), PROMPT)[0], expected, rtol=0, atol=1e-4)
    first, _ = on_ranks(2, lambda ranks: run_dense(load(path, "none", ranks), PROMPT)[0])
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-4)
    with pytest.raises(ConfigError, match="'int8' contradicts the checkpoint, which is quantised by 'mxfp4'"):
        load(path, "int8")
    config = ModelConfig.from_dir(path)
    load_model(path, config, torch.float32, CPU, load_format="dummy")
    tensors["model.layers.0.mlp.experts.down_proj_scales"][1, 2, 0] = 255  # NaN, in E8M0
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"0\.mlp\.experts\.down_proj_scales has numbers that are not finite"):
        load(path)


def test_a_plain_layer_does_not_ignore_a_factor_of_its_blocks(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    with pytest.raises(ModelLoadError, match=r"residual_multiplier: the plain layer has none; use .*ScaledLayer"):
        CausalLM(replace(ModelConfig.from_dir(path), residual_multiplier=0.5))


def test_layers_whose_heads_have_different_orders_are_refused(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    config = ModelConfig.from_dir(path)
    replace(config, layer_ropes=(config.rope, NO_POSITIONS))
    with pytest.raises(ModelLoadError, match="all layers that are rotated must have the same"):
        replace(config, layer_ropes=(config.rope, replace(config.rope, rotated=0.5)))


@pytest.mark.parametrize(
    ("architecture", "overrides", "message"),
    [
        ("GraniteMoeHybridForCausalLM", {"num_local_experts": 2}, "only dense Granite 4"),
        (
            "GraniteMoeHybridForCausalLM",
            {"layer_types": ["linear_attention"] * 2},
            "only dense Granite 4",
        ),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ("GptOssForCausalLM", {"swiglu_limit": 5.0}, "swiglu_limit 5.0 is not supported, only 7.0"),
        ("OlmoForCausalLM", {}, "'OlmoForCausalLM' is not supported"),
    ],
)
def test_what_we_do_not_compute_is_refused_by_name(
    tmp_path: Path, architecture: str, overrides: dict[str, Any], message: str
) -> None:
    path, _ = tiny_checkpoint(tmp_path, architecture, **overrides)
    with pytest.raises(ModelLoadError, match=rf"config\.json: .*{message}"):
        ModelConfig.from_dir(path)
