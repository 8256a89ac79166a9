from __future__ import annotations

from xml.etree import ElementTree

import torch

from minisgl.viz import Picture, distribution

SVG = "{http://www.w3.org/2000/svg}"


def found(picture: Picture, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(picture.svg).iter(f"{SVG}{tag}"))


def texts(picture: Picture) -> list[str]:
    return [element.text or "" for element in found(picture, "text")]


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
