from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from minisgl.book import SlicedMatrix, decoder_slices, weight_slices
from minisgl.book.svg import _PALETTE
from minisgl.errors import ConfigError
from minisgl.models.config import ModelConfig
from tests.book.drawing import assert_sound, boxes, texts
from tests.model_zoo import tiny_checkpoint

EMPTY = 4 * 2
"""Outlines of two matrices on four ranks."""


def matrix(axis: int | None, *ranges: tuple[int, int], name: str = "w", joined: str = "") -> SlicedMatrix:
    return SlicedMatrix("layer", name, "divided", (8, 16), axis, ranges, 2, joined)


def held(picture_boxes: list[dict[str, str]]) -> list[tuple[float, ...]]:
    return [tuple(float(box[side]) for side in ("x", "y", "width", "height")) for box in picture_boxes if "fill" in box]


def test_a_slice_lies_where_it_is_in_the_matrix() -> None:
    rows = matrix(0, (0, 2), (2, 4), (4, 6), (6, 8))
    columns = matrix(1, (0, 4), (4, 8), (8, 12), (12, 16), joined="all-reduce: T × 8")
    picture = weight_slices([rows, columns])
    assert_sound(picture)
    drawn = [dict(box.attrib) for box in boxes(picture)]
    slices = held(drawn)
    outlines = [tuple(float(box[side]) for side in ("x", "y", "width", "height")) for box in drawn if "fill" not in box]
    assert len(slices) == EMPTY
    for rank in range(4):
        x, y, width, height = outlines[rank]
        assert slices[rank] == pytest.approx((x, y + rank * height / 4, width, height / 4), rel=1e-4)
        x, y, width, height = outlines[4 + rank]
        assert slices[4 + rank] == pytest.approx((x + rank * width / 4, y, width / 4, height), rel=1e-4)
    fills = [box["fill"] for box in drawn if "fill" in box]
    assert fills == [fill for fill, _ in _PALETTE[:4]] * 2
    bar = outlines[-1]
    assert bar[0] <= outlines[0][0], "the bar of a collective goes across all lanes"
    assert bar[0] + bar[2] >= outlines[3][0] + outlines[3][2]


def test_shapes_and_bytes_are_written_for_a_rank_and_for_the_whole() -> None:
    picture = weight_slices([matrix(0, (0, 4), (4, 8), joined="all-reduce: T × 8"), matrix(None, (0, 8), (0, 8))])
    found = texts(picture)
    assert {"4 × 16, 128 bytes", "of 8 × 16, 256 bytes", "8 × 16, 256 bytes", "rank 0", "rank 1"} <= set(found)
    assert "384 bytes of 512 bytes" in found, "of the group"
    assert found.count("all-reduce: T × 8") == 1
    assert picture.text.splitlines() == [
        "Who holds which slice: 2 ranks.",
        "layer: 384 bytes of 512 bytes on a rank.",
        "w, divided: 4 × 16, 128 bytes of 8 × 16, 256 bytes on a rank; outputs 0 to 3 on rank 0, 4 to 7 on rank 1.",
        "Then all-reduce: T × 8.",
        "w, divided: 8 × 16, 256 bytes of 8 × 16, 256 bytes on a rank; all of it on every rank.",
    ]


def test_what_lies_beyond_the_matrix_is_padding_that_takes_memory_but_no_place() -> None:
    padded = matrix(0, (0, 5), (5, 10))
    assert padded.slice_shape(1) == (5, 16)
    assert padded.slice_bytes(1) == 160
    picture = weight_slices([padded])
    assert_sound(picture)
    outline, (_, y, _, height) = boxes(picture)[2], held([dict(box.attrib) for box in boxes(picture)])[1]
    assert y + height == pytest.approx(float(outline.get("y", "")) + float(outline.get("height", "")))


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [("LlamaForCausalLM", {}), ("Qwen2ForCausalLM", {"tie_word_embeddings": True}), ("Qwen3MoeForCausalLM", {})],
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_slices_of_a_decoder_have_the_shapes_of_its_checkpoint_and_cover_it(
    tmp_path: Path, architecture: str, overrides: dict[str, bool], ranks: int
) -> None:
    path, model = tiny_checkpoint(tmp_path, architecture, **overrides)
    shapes = {
        name.removesuffix(".weight"): tuple(each.shape) for name, each in model.named_parameters() if each.ndim > 1
    }
    matrices = decoder_slices(ModelConfig.from_dir(path), ranks)
    layer = [name.rpartition(".")[2] for name in shapes if name.startswith("model.layers.0.") and "norm" not in name]
    assert len(matrices) == 2 + (8 if "Moe" in architecture else len(layer)), "an expert's matrices are packed there"
    for each in matrices:
        found = [shape for name, shape in shapes.items() if name.endswith(f".{each.name}") or name == each.name]
        if found:
            assert each.shape == found[0], each.name
        copies: Counter[int] = Counter()
        for start, stop in each.ranges:
            copies.update(range(start, stop))
        if each.axis is not None:
            expected = 2 if each.name in ("k_proj", "v_proj") and ranks == 4 else 1
            assert {copies[index] for index in range(each.shape[each.axis])} == {expected}, each.name
    assert_sound(weight_slices(matrices))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_has_what_goes_with_its_own_outputs(tmp_path: Path, architecture: str, ranks: int) -> None:
    path, _ = tiny_checkpoint(tmp_path, architecture)
    config = ModelConfig.from_dir(path)
    named = {each.name.removeprefix("experts."): each for each in decoder_slices(config, ranks)}
    for before, after in (("q_proj", "o_proj"), ("gate_proj", "down_proj"), ("up_proj", "down_proj")):
        first, second = named[before], named[after]
        assert first.ranges == second.ranges, "the inputs of the second are the outputs of the first"
        assert first.axis == len(first.shape) - 2
        assert second.axis == len(second.shape) - 1
    for rank in range(ranks):
        (q, q_end), (kv, kv_end) = named["q_proj"].ranges[rank], named["k_proj"].ranges[rank]
        group = config.num_heads // config.num_kv_heads
        read = {row // config.head_dim // group for row in range(q, q_end)}
        assert read == {row // config.head_dim for row in range(kv, kv_end)}, "its query heads read its KV heads"


def test_where_the_ranks_of_a_decoder_meet(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    joined = {each.name: each.joined for each in decoder_slices(ModelConfig.from_dir(path), 2) if each.joined}
    all_reduce = "all-reduce: T × 32, 128 bytes a token"
    assert joined == dict.fromkeys(("embed_tokens", "o_proj", "down_proj"), all_reduce) | {
        "lm_head": "all-gather: S × 211, 844 bytes a sequence"
    }


def test_eight_ranks_of_large_matrices_stay_on_the_card(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "Qwen3MoeForCausalLM")
    config = ModelConfig.from_dir(path)
    assert config.moe is not None
    large = replace(
        config,
        hidden_size=16384,
        num_heads=128,
        num_kv_heads=2,
        head_dim=128,
        vocab_size=262144,
        moe=replace(config.moe, num_experts=512, intermediate_size=2048),
    )
    picture = weight_slices(decoder_slices(large, 8))
    assert_sound(picture)
    assert "each head on 4 ranks" in texts(picture)


@pytest.mark.parametrize(
    ("changes", "ranks", "named"),
    [
        ({}, 3, "num_attention_heads of 4"),
        ({"num_heads": 6, "num_kv_heads": 2}, 3, "num_key_value_heads of 2"),
        ({"intermediate_size": 49}, 2, "intermediate_size of 49"),
    ],
)
def test_what_cannot_be_shared_is_named(tmp_path: Path, changes: dict[str, int], ranks: int, named: str) -> None:
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    with pytest.raises(ConfigError, match=named):
        decoder_slices(replace(ModelConfig.from_dir(path), **changes), ranks)


def test_bad_matrices() -> None:
    with pytest.raises(ConfigError, match=r"\[1, 2\] ranks"):
        weight_slices([matrix(0, (0, 8)), matrix(0, (0, 4), (4, 8))])
    with pytest.raises(ConfigError, match=r"\[\] ranks"):
        weight_slices([])


def test_names_are_text() -> None:
    picture = weight_slices([matrix(0, (0, 8), name="<b>&\x00")])
    assert_sound(picture)
    assert "<b>&\ufffd" in texts(picture)
