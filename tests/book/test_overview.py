from __future__ import annotations

import pytest

from minisgl.book import architecture, you_are_here
from minisgl.book.overview import PARTS
from minisgl.errors import ConfigError
from tests.book.drawing import assert_sound, boxes, texts


def test_every_part_is_drawn_with_the_chapters_that_build_it() -> None:
    picture = architecture()
    assert_sound(picture)
    assert {part.label for part in PARTS.values()} <= set(texts(picture))
    assert texts(picture).count("chapters 6, 7") == 1
    assert not [box for box in boxes(picture) if box.get("fill")]


def test_the_parts_of_a_chapter_are_filled_and_named() -> None:
    picture = you_are_here(9)
    assert_sound(picture)
    assert [float(box.get("x", "")) for box in boxes(picture) if box.get("fill")] == [
        PARTS["scheduler"].x,
        PARTS["kvcache"].x,
    ]
    assert "you are here: Scheduler, KV pages" in texts(picture)
    assert picture.text.endswith("You are here: Scheduler, KV pages.")


def test_every_chapter_but_the_first_has_a_part() -> None:
    assert you_are_here(0) == architecture()
    assert [chapter for chapter in range(1, 21) if you_are_here(chapter) == architecture()] == []


def test_an_unknown_part_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no part 'cash'; choose from request, tokenizer"):
        architecture("cash")
