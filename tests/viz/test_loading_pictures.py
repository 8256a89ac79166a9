"""Pictures of what chapter 3 does: who fills a packed weight, and how much memory loading takes."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch

from minisgl.layers import MergedColumnParallelLinear
from minisgl.viz import memory_curve, packed_rows
from minisgl.viz.svg import WIDTH, Picture

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: Picture) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture.svg).iter(f"{SVG}text")]


def boxes(picture: Picture) -> list[tuple[float, float, float, float]]:
    """Left, top, width and height of all rectangles but the card."""
    rectangles = list(ElementTree.fromstring(picture.svg).iter(f"{SVG}rect"))[1:]
    x, y, width, height = ([float(box.get(name, "")) for box in rectangles] for name in ("x", "y", "width", "height"))
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
    bands = boxes(picture)[1::2]
    assert [height for *_, height in bands] == pytest.approx([105, 52.5, 52.5])
    for above, below in pairwise(bands):
        assert above[1] + above[3] == pytest.approx(below[1], abs=0.01)


def test_columns_of_packed_rows_stay_on_the_card_and_apart() -> None:
    with torch.device("meta"):
        module = MergedColumnParallelLinear(4096, {"gate_proj": 14336, "up_proj": 14336, "tiny": 8})
    drawn = boxes(packed_rows({"one": module, "other": module}))
    assert max(x + width for x, _, width, _ in drawn) <= WIDTH
    assert max(x + width for x, _, width, _ in drawn[:6]) < min(x for x, *_ in drawn[6:])
    assert min(height for *_, height in drawn) >= 20  # a band has room for its label


def test_memory_curve_marks_the_highest_point_of_each_line() -> None:
    curves = {"a": [(0.0, 0.0), (0.5, 900.0), (1.0, 400.0)], "b": [(0.0, 0.0), (0.5, 100.0)]}
    picture = memory_curve(curves, "Memory")
    assert {"900 MB", "100 MB", "0", "400 MB", "Memory", "a", "b"} <= set(texts(picture))
    assert "1. a: at most 900 MB, in 1.0 seconds." in picture.text
    first = next(
        element
        for element in ElementTree.fromstring(picture.svg).iter(f"{SVG}path")
        if "line" in element.get("class", "").split("viz-")
    )
    heights = [float(point.split()[1]) for point in first.get("d", "").removeprefix("M").split("L")]
    assert heights[1] < heights[2] < heights[0]


@pytest.mark.parametrize(("seconds", "label"), [(0.03, "0.02 s"), (0.7, "0.2 s"), (7.0, "2 s"), (300.0, "100 s")])
def test_memory_curve_has_round_seconds(seconds: float, label: str) -> None:
    assert label in texts(memory_curve({"a": [(0.0, 1.0), (seconds, 2.0)]}, "Memory"))
