from __future__ import annotations

import dataclasses
import math
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from minisgl.book import (
    Picture,
    attention_map,
    distribution,
    head_sharing,
    layer_flow,
    packed_rows,
    rotation_dials,
    softmax_panels,
)
from minisgl.book.model import LARGEST_CELL
from minisgl.book.svg import _PALETTE, WIDTH
from minisgl.context import AttentionSpec
from minisgl.layers.linear import MergedColumnParallelLinear
from minisgl.layers.rotary import RopeSettings, Rotary
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import DecoderLayer
from tests.book.drawing import SVG, assert_sound, boxes, texts
from tests.model_zoo import tiny_checkpoint

# -- model pictures --------------------------------------------------------------------------------------------------


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


def test_softmax_panels_hide_the_future() -> None:
    scores = torch.tensor([[0.5, 9.0, 9.0], [1.0, 1.0, 9.0], [-2.0, 3.0, 0.0]])
    picture = softmax_panels(scores, ["The", " cat", " sat"])
    found = texts(picture)
    assert found.count("9.0") == 3, "all scores are in the first grid, and in that one alone if they are hidden"
    assert (found.count("−∞"), found.count("–"), found.count("−2.0")) == (3, 3, 2)
    assert "' cat' reads, in %: 'The' 50, ' cat' 50." in picture.text
    assert_sound(picture)


def test_head_sharing_gives_each_group_the_colour_of_its_keys() -> None:
    picture = head_sharing({"grouped": AttentionSpec(0, 6, 2, 8, 0.3)})
    colours = [box.get("fill") for box in boxes(picture)]
    assert colours == [_PALETTE[0][0]] * 3 + [_PALETTE[1][0]] * 3 + [_PALETTE[0][0], _PALETTE[1][0]]
    assert picture.text == "grouped: 6 query heads, 3 for each of 2 KV heads."
    assert_sound(picture)


def test_attention_map_draws_weights_as_areas() -> None:
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.001, 0.639, 0.36]])
    picture = attention_map({"a head": weights}, ["a<b", " is", "\n"])
    squares = [box for box in boxes(picture) if box.get("fill") == _PALETTE[0][0]]
    areas = [float(square.get("width", "")) ** 2 / (LARGEST_CELL - 2) ** 2 for square in squares]
    assert areas == pytest.approx([1.0, 0.25, 0.75, 0.639, 0.36], abs=1e-3)  # 0.001 is too small to draw
    assert len(boxes(picture)) == 6 + 5
    assert "a head. What each token reads most: 0 reads 0, 1 reads 1, 2 reads 1." in picture.text
    assert {"a<b", "·is", "↵"} <= set(texts(picture))


def test_two_attention_maps_stand_side_by_side_on_the_card() -> None:
    weights = torch.eye(20)
    picture = attention_map({"one": weights, "other": weights}, ["token"] * 20)
    assert max(float(box.get("x", "")) + float(box.get("width", "")) for box in boxes(picture)) <= WIDTH
    assert len(boxes(picture)) == 2 * (210 + 20)


# -- loading pictures ------------------------------------------------------------------------------------------------


def corners(picture: Picture) -> list[tuple[float, float, float, float]]:
    """Left, top, width and height of all rectangles but the card."""
    names = ("x", "y", "width", "height")
    x, y, width, height = ([float(box.get(name, "")) for box in boxes(picture)] for name in names)
    return list(zip(x, y, width, height, strict=True))


def test_packed_rows_stack_the_tensors_in_their_order() -> None:
    with torch.device("meta"):
        qkv = MergedColumnParallelLinear(32, {"q_proj": 400, "k_proj": 200, "v_proj": 200}, bias=True)
    picture = packed_rows({"qkv_proj": qkv})
    assert {"qkv_proj.weight", "800 × 32, filled by", "k_proj", "rows 400–599"} <= set(texts(picture))
    assert picture.text == (
        "qkv_proj.weight, 800 × 32: q_proj fills rows 0 to 399; "
        "k_proj fills rows 400 to 599; v_proj fills rows 600 to 799."
    )
    bands = corners(picture)[1::2]
    assert [height for *_, height in bands] == pytest.approx([105, 52.5, 52.5])
    for above, below in pairwise(bands):
        assert above[1] + above[3] == pytest.approx(below[1], abs=0.01)


def test_columns_of_packed_rows_stay_on_the_card_and_apart() -> None:
    with torch.device("meta"):
        module = MergedColumnParallelLinear(4096, {"gate_proj": 14336, "up_proj": 14336, "tiny": 8})
    drawn = corners(packed_rows({"one": module, "other": module}))
    assert max(x + width for x, _, width, _ in drawn) <= WIDTH
    assert max(x + width for x, _, width, _ in drawn[:6]) < min(x for x, *_ in drawn[6:])
    assert min(height for *_, height in drawn) >= 20  # a band has room for its label


# -- distribution ----------------------------------------------------------------------------------------------------


def found(picture: Picture, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(picture.svg).iter(f"{SVG}{tag}"))


BEFORE = torch.tensor([1.0, 4.0, 0.0, 3.0, 2.0])
AFTER = torch.tensor([0.0, 4.0, 0.0, 0.0, 2.0])


def test_tokens_stand_in_the_order_of_their_probability_and_the_rest_is_added_up() -> None:
    found_texts = texts(distribution({"softmax": BEFORE}, str, columns=2))
    assert found_texts[1:4] == ["1", "3", "all others"]
    assert found_texts[4:9] == ["softmax", "4 tokens left", "40", "30", "30"]


def test_what_a_stage_cuts_is_an_outline_and_what_it_keeps_a_bar() -> None:
    picture = distribution({"softmax": BEFORE, "cut": AFTER, "again": AFTER}, str, columns=4)
    assert texts(picture)[13:20] == ["cut", "2 tokens left", "67", "–", "33", "–", "–"]
    bars = [box for box in found(picture, "rect") if box.get("fill")]
    assert len(bars) == 4 + 2 + 2
    outlines = [path for path in found(picture, "path") if "dashed" in path.get("class", "")]
    assert len(outlines) == 2, "a token that was cut before is not cut again"
    heights = [float(box.get("height", "")) for box in bars]
    assert heights[4] == max(heights)
    assert heights[0] == 4 * heights[3]


def test_a_token_that_a_stage_lifts_gets_a_column() -> None:
    picture = distribution({"model": BEFORE, "bias": BEFORE + torch.tensor([9.0, 0, 0, 0, 0])}, str, columns=2)
    assert texts(picture)[1:3] == ["1", "0"]


def test_the_words_say_the_same() -> None:
    words = repr(distribution({"softmax": BEFORE, "top-k": AFTER}, "t{}".format, columns=2))
    assert words.splitlines()[1] == "top-k: 2 tokens left; in %: 't1' 67, 't4' 33, all others –."
