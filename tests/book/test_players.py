from __future__ import annotations

import base64
import re
from html.parser import HTMLParser

import pytest

from minisgl.book import Picture, Snapshots, live, memory_budget, player


def frames(count: int, parts: int = 2) -> list[Picture]:
    return [memory_budget(dict.fromkeys(map(str, range(parts)), 1), 100 + number) for number in range(count)]


class _Html(HTMLParser):
    """What of a player's HTML survives a notebook's cleaning: no script, no drawing, but what is folded, and images."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.summaries: list[str] = []
        self.images: list[tuple[str, str]] = []  # alternative text, drawing
        self.open: list[bool] = []
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self._inside = tag
        if tag == "details":
            self.open.append("open" in given)
        if tag == "img":
            data = (given["src"] or "").removeprefix("data:image/svg+xml;base64,")
            self.images.append((given["alt"] or "", base64.b64decode(data).decode()))

    def handle_data(self, data: str) -> None:
        if self._inside == "summary":
            self.summaries.append(data)
        self._inside = ""


def test_a_notebook_gets_every_frame_under_its_escaped_caption() -> None:
    shown = frames(3)
    html = player(shown, ["one", "<b>two</b>", ""])._repr_html_()
    read = _Html(html)
    assert read.summaries == ["1 of 3: one", "2 of 3: <b>two</b>", "3 of 3"]
    assert read.images == [(frame.text.replace("\n", " "), frame.svg) for frame in shown]
    assert "" not in html.split("\n"), "a blank line would end it inside Markdown"
    assert not re.search(r'(src|href)="(?!data:)', html), "it needs no other file"


def test_where_no_script_runs_no_frame_is_lost_and_many_are_folded() -> None:
    assert _Html(player(frames(3))._repr_html_()).open == [True] * 3
    assert _Html(player(frames(50))._repr_html_()).open == [True] + [False] * 49
    assert len(_Html(player(frames(50))._repr_html_()).images) == 50


def test_in_words() -> None:
    shown = frames(2)
    assert repr(player(shown, ["a", "b"])) == f"1 of 2: a\n{shown[0].text}\n2 of 2: b\n{shown[1].text}"


@pytest.mark.parametrize(("count", "captions"), [(0, None), (0, []), (2, ["one"]), (1, ["one", "two"])])
def test_as_many_captions_as_frames(count: int, captions: list[str] | None) -> None:
    with pytest.raises(ValueError, match="give one each"):
        player(frames(count), captions)


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


@pytest.mark.needs("ipywidgets")
def test_controls_change_the_live_object_and_draw_it_again() -> None:
    parts = {"weights": 10}

    def load(text: str) -> str:
        parts[text] = 10
        return f"loaded {text}"

    made = live(
        lambda: memory_budget(parts, 100), {"add": ("KV", load), "clear": parts.clear, "pick": (["a", "b"], load)}
    )
    shown, controls, said = made.widget.children
    (field, add), clear, (menu, pick) = (getattr(each, "children", each) for each in controls.children)
    add.click()
    assert "KV" in shown.value
    assert said.value == "loaded KV"
    field.value = "graphs"
    add.click()
    menu.value = "b"
    pick.click()
    assert list(parts) == ["weights", "KV", "graphs", "b"]
    clear.click()
    assert shown.value == memory_budget({}, 100).svg
    assert made._repr_mimebundle_()["image/svg+xml"] == shown.value, "what is kept is the object as it is"


@pytest.mark.needs("ipywidgets")
def test_what_an_action_refuses_is_said() -> None:
    def refuse() -> None:
        raise ValueError("the queue is full")

    shown, controls, said = live(lambda: memory_budget({}, 1), {"submit": refuse}).widget.children
    controls.children[0].click()
    assert said.value == "ValueError: the queue is full"
    assert shown.value == memory_budget({}, 1).svg
