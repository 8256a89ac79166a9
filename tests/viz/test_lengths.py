from __future__ import annotations

from xml.etree import ElementTree

import numpy as np

from minisgl.core import Request, RunningTable, SamplingParams
from minisgl.viz import Lengths, Picture, length_strip
from minisgl.viz.svg import WIDTH

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: Picture) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture.svg).iter(f"{SVG}text")]


def test_a_moment_is_read_off_the_table() -> None:
    table = RunningTable(2, 16)
    prompt = np.arange(6, dtype=np.int32)
    slot = table.admit(Request(uid=0, prompt=prompt, params=SamplingParams(), max_len=9), cached_len=4)
    assert Lengths.of(table, slot, "now") == Lengths("now", kv_len=4, token_len=6, known_len=6, max_len=9)
    table.kv_len[slot] = 6
    table.token_len[slot] = 7
    assert Lengths.of(table, slot, "then") == Lengths("then", kv_len=6, token_len=7, known_len=6, max_len=9)


def test_every_position_says_what_it_is() -> None:
    moments = [Lengths("admitted", 1, 3, 3, 5), Lengths("launched", 3, 4, 3, 5), Lengths("two ahead", 4, 5, 3, 5)]
    found = texts(length_strip(moments))
    lines = [found[found.index(moment.label) + 1 :][:8] for moment in moments]
    assert lines == [
        ["kv", "id", "id", "", "", "1", "3", "3"],
        ["kv", "kv", "kv", "?", "", "3", "4", "3"],
        ["kv", "kv", "kv", "kv", "?", "4", "5", "3"],
    ]
    assert "launched: kv_len 3, token_len 4, known_len 3." in repr(length_strip(moments))


def test_a_long_request_stays_on_its_card() -> None:
    picture = length_strip([Lengths("long", 100, 200, 199, 400)])
    boxes = list(ElementTree.fromstring(picture.svg).iter(f"{SVG}rect"))[1:]
    assert len(boxes) == 400
    assert max(float(box.get("x", "")) + float(box.get("width", "")) for box in boxes) < WIDTH - 120
    assert "kv" not in texts(picture)[4:]
