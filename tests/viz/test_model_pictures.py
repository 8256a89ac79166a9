"""Pictures of what chapter 2 builds: a layer, the rotary embedding, attention weights."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from minisgl.layers import RopeSettings, Rotary
from minisgl.models import DecoderLayer, ModelConfig
from minisgl.viz import attention_map, layer_flow, rotation_dials
from minisgl.viz.attention_map import _LARGEST
from minisgl.viz.svg import _PALETTE, WIDTH, Picture
from tests.model_zoo import tiny_checkpoint

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: Picture) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture.svg).iter(f"{SVG}text")]


def boxes(picture: Picture) -> list[ElementTree.Element]:
    """All rectangles but the card."""
    return list(ElementTree.fromstring(picture.svg).iter(f"{SVG}rect"))[1:]


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("LlamaForCausalLM", {"32 → 64", "4 + 2 + 2", "q, k: 6 heads", "T × 4 × 8", "32 → 96", "48 → 32", "rotate"}),
        ("Qwen3MoeForCausalLM", {"norm, rotate", "32 → 6", "2 of 6", "32 → 16 → 32"}),
    ],
)
def test_layer_flow_reads_the_widths_off_the_weights(tmp_path: Path, architecture: str, expected: set[str]) -> None:
    path, _ = tiny_checkpoint(tmp_path, architecture)
    with torch.device("meta"):
        picture = layer_flow(DecoderLayer(ModelConfig.from_dir(path), 0))
    assert expected <= set(texts(picture))
    right = max(float(box.get("x", "")) + float(box.get("width", "")) for box in boxes(picture))
    assert right <= WIDTH


def test_a_layer_of_many_heads_stays_on_its_card(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    config = dataclasses.replace(
        ModelConfig.from_dir(path), hidden_size=8192, num_heads=64, num_kv_heads=8, head_dim=128
    )
    with torch.device("meta"):
        picture = layer_flow(DecoderLayer(config, 0))
    assert "64 + 8 + 8" in texts(picture)
    assert "attention block" in picture.text


def test_rotation_dials_put_each_position_at_its_angle() -> None:
    rotary = Rotary(8, 16, RopeSettings())
    picture = rotation_dials(rotary, pairs=[0, 2], positions=range(4))
    starts = [tuple(map(float, d)) for d in re.findall(r'<path d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', picture.svg)]
    assert len(starts) == 2 * 4
    for number, (x, y, to_x, to_y) in enumerate(starts[:4]):
        position = [0, 3, 1, 2][number]  # the first and the last come first
        assert math.atan2(y - to_y, to_x - x) % (2 * math.pi) == pytest.approx(position % (2 * math.pi), abs=0.02)
    assert "pair 2: dimensions 2 and 6" in texts(picture)
    assert "57.3° a position" in texts(picture)
    assert "turns by 0.573 degrees a position" in picture.text


def test_rotation_dials_label_only_what_has_room() -> None:
    slow = texts(rotation_dials(Rotary(8, 16, RopeSettings()), pairs=[3], positions=range(8)))
    assert "0" in slow
    assert not {"1", "2", "3"} & set(slow)


def test_attention_map_draws_weights_as_areas() -> None:
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.001, 0.639, 0.36]])
    picture = attention_map({"a head": weights}, ["a<b", " is", "\n"])
    squares = [box for box in boxes(picture) if box.get("fill") == _PALETTE[0][0]]
    areas = [float(square.get("width", "")) ** 2 / (_LARGEST - 2) ** 2 for square in squares]
    assert areas == pytest.approx([1.0, 0.25, 0.75, 0.639, 0.36], abs=1e-3)  # 0.001 is too small to draw
    assert len(boxes(picture)) == 6 + 5
    assert "a head. What each token reads most: 0 reads 0, 1 reads 1, 2 reads 1." in picture.text
    assert {"a<b", "·is", "↵"} <= set(texts(picture))


def test_two_attention_maps_stand_side_by_side_on_the_card() -> None:
    weights = torch.eye(20)
    picture = attention_map({"one": weights, "other": weights}, ["token"] * 20)
    assert max(float(box.get("x", "")) + float(box.get("width", "")) for box in boxes(picture)) <= WIDTH
    assert len(boxes(picture)) == 2 * (210 + 20)
