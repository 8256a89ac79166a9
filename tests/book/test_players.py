from __future__ import annotations

import builtins
from typing import Any

import pytest

from minisgl.book import Picture, Snapshots, memory_budget, player
from tests.book.drawing import assert_sound, texts

WIDGET = "application/vnd.jupyter.widget-view+json"


def frames(count: int, parts: int = 2) -> list[Picture]:
    return [memory_budget(dict.fromkeys(map(str, range(parts)), 1), 100 + number) for number in range(count)]


@pytest.mark.needs("ipywidgets")
def test_a_notebook_gets_a_widget_a_drawing_and_words() -> None:
    made = player(frames(2), ["before", "after"])
    bundle = made._repr_mimebundle_()
    assert set(bundle) == {WIDGET, "image/svg+xml", "text/plain"}
    assert bundle["image/svg+xml"] == made.strip.svg
    assert bundle["text/plain"] == repr(made)
    assert made._repr_mimebundle_()[WIDGET] == bundle[WIDGET], "shown twice, it is one widget"


@pytest.mark.needs("ipywidgets")
def test_the_widget_has_every_frame_under_its_escaped_caption() -> None:
    shown = frames(3)
    widget = player(shown, ["one", "<b>two</b>", ""]).widget
    controls, stack = widget.children
    first, *pages = stack.children
    assert first.value == ""
    assert stack.selected_index == 1
    assert [page.value for page in pages] == [
        f"<strong>{heading}</strong><br>{frame.svg}"
        for heading, frame in zip(["1 of 3: one", "2 of 3: &lt;b&gt;two&lt;/b&gt;", "3 of 3"], shown, strict=True)
    ]
    assert [(control.min, control.max, control.value) for control in controls.children] == [(1, 3, 1)] * 3


def test_without_ipywidgets_the_strip_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "ipywidgets":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    assert set(player(frames(1))._repr_mimebundle_()) == {"image/svg+xml", "text/plain"}


def test_the_strip_is_all_frames_with_their_captions() -> None:
    shown = frames(3)
    strip = player(shown, ["one", "<two>", "three " * 40]).strip
    found = texts(strip)
    starts = [found.index(heading) for heading in ("1 of 3: one", "2 of 3: <two>")]
    assert found[starts[0] + 1 : starts[1]] == texts(shown[0])
    assert found[-len(texts(shown[2])) :] == texts(shown[2])
    assert " ".join(found).count("three") == 40
    assert strip.height > sum(frame.height for frame in shown)
    for frame in shown:
        assert frame.text in strip.text
    assert strip.svg.count("<style>") == strip.svg.count("<svg") == 1
    assert_sound(strip)


def test_of_many_frames_the_strip_keeps_the_first_the_last_and_some_between() -> None:
    strip = player(frames(50)).strip
    headings = [text for text in texts(strip) if text.endswith(" of 50")]
    numbers = [int(heading.split()[0]) for heading in headings]
    assert numbers[0] == 1
    assert numbers[-1] == 50
    assert 5 < len(numbers) < 20
    assert numbers == sorted(set(numbers))
    assert strip.height < 3000
    very_tall = player(frames(50, parts=99)).strip
    assert [text for text in texts(very_tall) if text.endswith(" of 50")] == ["1 of 50", "50 of 50"]


def test_in_words() -> None:
    shown = frames(2)
    assert repr(player(shown, ["a", "b"])) == f"1 of 2: a\n{shown[0].text}\n2 of 2: b\n{shown[1].text}"


def test_one_frame() -> None:
    assert texts(player(frames(1)).strip)[0] == "1 of 1"
    assert_sound(player(frames(1)).strip)


@pytest.mark.parametrize(("count", "captions"), [(0, None), (0, []), (2, ["one"]), (1, ["one", "two"])])
def test_as_many_captions_as_frames(count: int, captions: list[str] | None) -> None:
    with pytest.raises(ValueError, match="give one each"):
        player(frames(count), captions)


@pytest.mark.needs("ipywidgets")
def test_a_still_stands_for_all_frames_where_nothing_steps() -> None:
    shown = frames(3)
    made = player(shown, ["a", "b", ""], still=shown[2])
    bundle = made._repr_mimebundle_()
    assert bundle["image/svg+xml"] == shown[2].svg
    assert bundle["text/plain"] == f"1 of 3: a\n2 of 3: b\n3 of 3\n{shown[2].text}"
    assert len(made.widget.children[1].children) == 1 + len(shown)


def test_snapshots_keep_what_a_live_object_was() -> None:
    parts = {"weights": 10}
    snapshots = Snapshots(lambda: memory_budget(parts, 100))
    loaded = snapshots.take("loaded")
    parts["KV"] = 60
    assert snapshots.take("KV allocated") == memory_budget(parts, 100) != loaded
    made = snapshots.player()
    assert made.headings == ["1 of 2: loaded", "2 of 2: KV allocated"]
    assert made.frames == [loaded, memory_budget(parts, 100)]
    snapshots.take("later")
    assert len(snapshots.player().frames) == 3
    assert len(made.frames) == 2, "what has been shown does not change"


def test_no_snapshots() -> None:
    with pytest.raises(ValueError, match="0 frames"):
        Snapshots(lambda: memory_budget({}, 1)).player()
