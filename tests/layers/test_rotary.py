"""Frequencies and tables equal those of transformers; rotation is a rotation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from minisgl.errors import ConfigError
from minisgl.layers.rotary import RopeSettings, Rotary, rotate, yarn_frequencies
from minisgl.models.config import ModelConfig
from tests.model_zoo import ROPE_VARIANTS, Variant


@pytest.mark.parametrize(
    "variant", [Variant("default", "LlamaForCausalLM"), *ROPE_VARIANTS], ids=lambda variant: variant.name
)
def test_tables_equal_transformers(variant: Variant, tmp_path: Path) -> None:
    path, hf = variant.checkpoint(tmp_path)
    config = ModelConfig.from_dir(path)
    positions = torch.arange(512, dtype=torch.int32)
    ours = Rotary(config.head_dim, 512, config.rope)(positions, torch.float32)
    cos, sin = hf.model.rotary_emb(torch.zeros(1), positions[None].long())
    half = config.head_dim // 2
    torch.testing.assert_close(ours.cos[:, 0], cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.sin[:, 0, half:], sin[0, :, half:], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.sin[:, 0, :half], -sin[0, :, :half], rtol=0, atol=1e-6)

    q, k = torch.randn(2, 512, 3, config.head_dim)
    for mine, theirs in zip(
        (rotate(q, ours), rotate(k, ours)),
        apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs[0], rtol=0, atol=1e-5)


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    rotary = Rotary(16, 64, RopeSettings())
    q, k = torch.randn(2, 1, 1, 16)

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(x, rotary(torch.tensor([position], dtype=torch.int32), torch.float32))

    torch.testing.assert_close(at(q, 40).norm(), q.norm())
    torch.testing.assert_close((at(q, 40) * at(k, 37)).sum(), (at(q, 13) * at(k, 10)).sum())
    assert not torch.allclose((at(q, 40) * at(k, 37)).sum(), (at(q, 40) * at(k, 30)).sum())


def test_the_table_is_real_on_the_meta_device() -> None:
    with torch.device("meta"):
        rotary = Rotary(8, 16, RopeSettings())
    assert rotary.table.device.type == "cpu"
    torch.testing.assert_close(rotary.table, Rotary(8, 16, RopeSettings()).table)
    assert not rotary.state_dict()


def test_yarn_sharpens_attention_by_its_factor() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 128}
    assert yarn_frequencies(RopeSettings("yarn", 10000.0, scaling), 64)[1] == pytest.approx(1.1386294)
    given = RopeSettings("yarn", 10000.0, {**scaling, "attention_factor": 0.7})
    assert yarn_frequencies(given, 64)[1] == 0.7


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(ConfigError, match=r"rope_type: unknown name 'spiral'.*llama3.*yarn"):
        Rotary(8, 16, RopeSettings("spiral"))
