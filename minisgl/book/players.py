"""Pictures to step through, and pictures of a live object with controls that change it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from minisgl.book.svg import Picture, attribute, counted

_SCRIPT = Path(__file__).with_name("stepper.js")
_UNFOLDED = 2400.0
"""Height in CSS pixels up to which all frames are open where no script runs; of taller ones, the first is."""

Action = Callable[[], object] | tuple[str | Sequence[str], Callable[[str], object]]


class Snapshots:
    """Pictures of a live object at moments of its life; ``draw`` makes one of the object as it is now."""

    def __init__(self, draw: Callable[[], Picture]) -> None:
        self._draw, self._frames, self._captions = draw, list[Picture](), list[str]()

    def take(self, caption: str) -> Picture:
        """Draw the object once more; ``caption`` says what has happened to it."""
        self._frames.append(self._draw())
        self._captions.append(caption)
        return self._frames[-1]

    def player(self) -> Player:
        """Step through the pictures taken so far, at least one."""
        return Player(self._frames, self._captions)


class Player:
    """Step through pictures of one thing at several times.

    The HTML with all of them and a script needs no kernel and no other file, so it still steps in a saved notebook and
    on the site. Where no script may run, the frames are below each other, folded if they are many. Of the ``frames``
    there is at least one; ``captions`` say what has happened before each, and None numbers them only.
    """

    def __init__(self, frames: Sequence[Picture], captions: Sequence[str] | None = None) -> None:
        captions = [""] * len(frames) if captions is None else captions
        if not frames or len(captions) != len(frames):
            raise ValueError(f"player: {len(captions)} captions for {counted(len(frames), 'frame')}; give one each")
        self.frames = list(frames)
        numbered = enumerate(captions, start=1)
        self.headings = [f"{number} of {len(frames)}" + (f": {said}" if said else "") for number, said in numbered]

    def __repr__(self) -> str:
        return "\n".join(f"{heading}\n{frame.text}" for heading, frame in zip(self.headings, self.frames, strict=True))

    def _repr_html_(self) -> str:
        all_open = sum(frame.height for frame in self.frames) <= _UNFOLDED
        parts = ['<div class="minisgl-stepper">']
        for place, (heading, frame) in enumerate(zip(self.headings, self.frames, strict=True)):
            # An image outlives the cleaning of a notebook's HTML, a drawing does not.
            data = base64.b64encode(frame.svg.encode()).decode()
            image = f'<img alt="{attribute(frame.text)}" src="data:image/svg+xml;base64,{data}">'
            is_open = " open" if all_open or place == 0 else ""
            parts.append(f"<details{is_open}><summary>{escape(heading)}</summary>{image}</details>")
        return "\n".join([*parts, "</div>", f"<script>\n{_SCRIPT.read_text(encoding='utf-8')}</script>"])


class Live:
    """Show a live object above controls that change it; each use of a control draws it again.

    It is a widget while the kernel runs, and elsewhere the picture as it was when the cell ran.

    Args:
        draw: makes a picture of the object as it is now.
        actions: by its label what a control does: a function is a button; ``("Once upon", submit)`` a text field that
            begins with these words, and ``(["fcfs", "lpm"], choose)`` a menu, whose text the function gets.
    """

    def __init__(self, draw: Callable[[], Picture], actions: Mapping[str, Action]) -> None:
        self._draw, self._actions = draw, actions

    @cached_property
    def widget(self) -> Any:
        """The picture and its controls, an `ipywidgets.VBox`."""
        import ipywidgets

        shown, said = ipywidgets.HTML(self._draw().svg), ipywidgets.Label()

        def act(function: Callable[..., object], *given: str) -> None:
            try:
                result = function(*given)
                said.value = "" if result is None else str(result)
            except Exception as error:  # what the engine refuses is part of what there is to see
                said.value = f"{type(error).__name__}: {error}"
            shown.value = self._draw().svg

        rows: list[Any] = []
        for label, action in self._actions.items():
            button = ipywidgets.Button(description=label, layout={"width": "auto"})
            if not isinstance(action, tuple):
                button.on_click(lambda _, function=action: act(function))
                rows.append(button)
                continue
            start, function = action
            field = ipywidgets.Text(start) if isinstance(start, str) else ipywidgets.Dropdown(options=list(start))
            button.on_click(lambda _, function=function, field=field: act(function, field.value))
            rows.append(ipywidgets.HBox([field, button]))
        controls = ipywidgets.Box(rows, layout={"flex_flow": "row wrap"})
        return ipywidgets.VBox([shown, controls, said])

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        picture = self._draw()
        static = {"image/svg+xml": picture.svg, "text/plain": picture.text}
        try:
            return {**self.widget._repr_mimebundle_(), **static}
        except ImportError:  # no ipywidgets: the picture remains
            return static


player, live = Player, Live
