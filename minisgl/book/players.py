"""Pictures to step through: a slider and a play button in JupyterLab, a strip of the pictures elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from html import escape
from typing import Any

from minisgl.book.svg import Picture, counted, stack

_TALLEST = 2400.0
"""Height of a strip in CSS pixels; of more pictures, some are left out."""
_INTERVAL = 800
"""Milliseconds that a picture stays when they play."""


def player(frames: Sequence[Picture], captions: Sequence[str] | None = None, still: Picture | None = None) -> Player:
    """Step through pictures of one thing at several times.

    Args:
        frames: pictures, at least one.
        captions: what has happened before each; None numbers them only.
        still: one picture for where there are no widgets; None is a strip of the frames.
    """
    return Player(frames, captions or [""] * len(frames), still)


class Snapshots:
    """Pictures of a live object at moments of its life; ``draw`` makes one of the object as it is now."""

    def __init__(self, draw: Callable[[], Picture]) -> None:
        self._draw = draw
        self._frames: list[Picture] = []
        self._captions: list[str] = []

    def take(self, caption: str) -> Picture:
        """Draw the object once more; ``caption`` says what has happened to it."""
        self._frames.append(self._draw())
        self._captions.append(caption)
        return self._frames[-1]

    def player(self) -> Player:
        """Step through the pictures taken so far, at least one."""
        return player(self._frames, self._captions)


class Player:
    """What `player` makes: a widget where there are widgets, and else its `static` picture.

    The widget steps in the browser alone, so it also works while Python is busy.
    """

    def __init__(self, frames: Sequence[Picture], captions: Sequence[str], still: Picture | None = None) -> None:
        if not frames or len(captions) != len(frames):
            raise ValueError(f"player: {len(captions)} captions for {counted(len(frames), 'frame')}; give one each")
        self.frames = list(frames)
        self.still = still
        of = f" of {len(frames)}"
        self.headings = [
            f"{number}{of}{': ' * bool(caption)}{caption}" for number, caption in enumerate(captions, start=1)
        ]

    def __repr__(self) -> str:
        if self.still is not None:
            return "\n".join([*self.headings, self.still.text])
        return "\n".join(f"{heading}\n{frame.text}" for heading, frame in zip(self.headings, self.frames, strict=True))

    @cached_property
    def strip(self) -> Picture:
        """All frames below each other; the first, the last and some between if all would be too tall."""
        tallest = max(frame.height for frame in self.frames)
        count = min(len(self.frames), max(2, int(_TALLEST / tallest)))
        chosen = sorted({round(index * (len(self.frames) - 1) / max(count - 1, 1)) for index in range(count)})
        return stack([self.frames[index] for index in chosen], [self.headings[index] for index in chosen])

    @property
    def static(self) -> Picture:
        """For pages without widgets: ``still``, or else the strip."""
        return self.still or self.strip

    @cached_property
    def widget(self) -> Any:
        """The stepper, an `ipywidgets.VBox`."""
        import ipywidgets

        pages = [
            ipywidgets.HTML(f"<strong>{escape(heading)}</strong><br>{frame.svg}")
            for heading, frame in zip(self.headings, self.frames, strict=True)
        ]
        bounds = {"min": 1, "max": len(pages), "value": 1}
        play = ipywidgets.Play(**bounds, interval=_INTERVAL)
        slider = ipywidgets.IntSlider(**bounds, readout=False, layout={"width": "420px"})
        number = ipywidgets.BoundedIntText(**bounds, layout={"width": "70px"})
        shown = ipywidgets.Stack([ipywidgets.HTML(), *pages], selected_index=1)  # frames are counted from 1
        for control, name in ((play, "value"), (number, "value"), (shown, "selected_index")):
            ipywidgets.jslink((slider, "value"), (control, name))
        return ipywidgets.VBox([ipywidgets.HBox([play, slider, number]), shown])

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        static = {"image/svg+xml": self.static.svg, "text/plain": repr(self)}
        try:
            return {**self.widget._repr_mimebundle_(), **static}
        except ImportError:  # no ipywidgets: the static picture says the same
            return static
