from __future__ import annotations

from minisgl.book import strips
from minisgl.book.svg import _PALETTE
from tests.book.drawing import assert_sound, boxes, texts


def test_each_text_has_a_box_in_its_colour() -> None:
    picture = strips("On the wire", "orange: a length", [("chunk 1", [("1c", 1), ("\r\n", None)]), ("chunk 2", [])])
    assert_sound(picture)
    assert texts(picture) == ["On the wire", "orange: a length", "chunk 1", "1c", "\\r\\n", "chunk 2"]
    orange, grey = boxes(picture)
    assert (orange.get("fill"), grey.get("class")) == (_PALETTE[1][0], "viz-shared")
    assert float(orange.get("x", "")) + float(orange.get("width", "")) < float(grey.get("x", ""))


def test_the_words_say_what_is_drawn() -> None:
    picture = strips("Held", "", [("+ is", [("The", None), (" is\n", 4)])])
    assert picture.text == "Held\n+ is: 'The |  is\\n'"


def test_what_does_not_fit_is_left_out() -> None:
    picture = strips("Much", "", [("a very long heading", [("word", 0)] * 40), ("one", [("x" * 200, 0)])])
    assert_sound(picture)
    assert texts(picture).count("…") == 2
    assert 10 < len(boxes(picture)) < 40
    assert "a very long he…" in texts(picture)


def test_signs_that_cannot_be_printed() -> None:
    assert_sound(strips("<Odd> & more", "", [("\x00", [("<b>\x00\ud800", 2), ("", None)])]))
