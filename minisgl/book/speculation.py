"""Speculative decoding: what became of drafts, step by step, a suffix automaton, and rejection sampling by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from minisgl.batch import Batch, StepPhase
from minisgl.book.players import Player, player
from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture, counted, shorten, visible
from minisgl.drafters.suffix import SuffixAutomaton
from minisgl.request import Request
from minisgl.table import RunningTable

Floats = npt.NDArray[np.float64]
Decode = Callable[[list[int]], str]


def accept_or_resample(drafts: Sequence[int], q: Floats, p: Floats, rng: np.random.Generator) -> list[int]:
    """Tokens that come of drafts drawn from ``q``, distributed as if all were drawn from ``p`` (Leviathan et al. 2023).

    Args:
        q: [k, vocab] the drafter's distribution at each draft.
        p: [k + 1, vocab] the model's at each draft, and behind the last one.
    """
    for place, token in enumerate(drafts):
        if rng.random() * q[place, token] >= p[place, token]:
            rest = np.maximum(p[place] - q[place], 0.0)
            return [*drafts[:place], int(rng.choice(len(rest), p=rest / rest.sum()))]
    return [*drafts, int(rng.choice(p.shape[1], p=p[len(drafts)]))]


@dataclass(frozen=True, slots=True)
class DraftStep:
    """What a step verified of one request, and the tokens that became output: accepted drafts and one more."""

    drafts: list[int]
    kept: list[int]


@dataclass(slots=True)
class DraftLog:
    """A `StepObserver` that notes the drafts of each request, by ``uid``, in every step that samples for it."""

    table: RunningTable
    steps: dict[int, list[DraftStep]] = field(default_factory=dict)
    _before: list[int] = field(default_factory=list)

    def begin(self, phase: StepPhase, batch: Batch | None) -> None:
        """Before a step is processed, note how many tokens its rows have."""
        if phase == "process" and batch is not None:
            self._before = self.table.known_len[batch.slots].tolist()

    def end(self, phase: StepPhase, batch: Batch | None) -> None:
        """Take the tokens that were appended since."""
        if phase != "process" or batch is None:
            return
        counts = np.maximum(np.bincount(batch.sample_rows, minlength=batch.num_rows) - 1, 0)
        drafts, uids = np.split(batch.drafts, np.cumsum(counts)), self.table.arrival[batch.slots].tolist()
        for slot, uid, before, of_row in zip(batch.slots.tolist(), uids, self._before, drafts, strict=False):
            kept = self.table.tokens[slot, before : self.table.known_len[slot]].tolist()
            if kept:
                self.steps.setdefault(uid, []).append(DraftStep(of_row.tolist(), kept))

    def finish(self, requests: Sequence[Request]) -> None:
        """Keep what was noted."""


def draft_steps(steps: Sequence[DraftStep], decode: Decode, first: int = 0) -> Picture:
    """Draw a line for each step: drafts that were accepted, those that were not, and the token behind them."""
    line, left = 32, MARGIN + 64.0
    most = max(len(step.drafts) for step in steps) + 1
    width = min((WIDTH - MARGIN - 90 - left) / most, 110.0)
    legend = "✓: draft, accepted  ·  ✗: draft, wrong or behind a wrong one  ·  +: what the model itself says next"
    canvas = Canvas(f"Drafts of {counted(len(steps), 'step')}", legend=legend)
    for number, step in enumerate(steps):
        y, accepted = 62.0 + number * line, len(step.kept) - 1
        canvas.text(MARGIN, y + 19, f"step {first + number}", "text small", "start")
        boxes: list[tuple[str, int, int | None]] = [("✓", token, 2) for token in step.drafts[:accepted]]
        boxes += [("+", step.kept[-1], 1), *(("✗", token, None) for token in step.drafts[accepted:])]
        for place, (sign, token, color) in enumerate(boxes):
            text = shorten(f"{sign} {visible(decode([token]))}", int(width / 8.6))
            canvas.cell(left + place * width, y, width - 3, line - 5, (text, "mono"), color=color, kind="shared")
        canvas.text(WIDTH - MARGIN, y + 19, counted(len(step.kept), "token"), "text small", "end")
        words = ", ".join(f"{sign} {decode([token])!r}" for sign, token, _ in boxes)
        canvas.says.append(f"Step {first + number}: {words}.")
    return canvas.picture(62 + len(steps) * line + 8)


def draft_player(steps: Sequence[DraftStep], decode: Decode, at_once: int = 6) -> Player:
    """`draft_steps` growing step by step, the last ``at_once`` of them in view, with the text so far."""
    frames, captions, text = [], [], list[int]()
    for number, step in enumerate(steps):
        text += step.kept
        begin = max(number + 1 - at_once, 0)
        frames.append(draft_steps(steps[begin : number + 1], decode, begin))
        captions.append(f"{counted(len(text), 'token')}: …{visible(decode(text))[-50:]}")
    return player(frames, captions)


_COLUMN, _BOX_WIDTH, _BOX_HEIGHT = 104.0, 70.0, 56.0


def suffix_automaton(automaton: SuffixAutomaton, decode: Decode) -> Picture:
    """Draw the automaton of a text of up to six tokens: the states of its beginnings above, those split off below."""
    nexts, lengths, links, ends = automaton._next, automaton._length, automaton._link, automaton._end
    beginnings = [0]
    for token in automaton.text:
        beginnings.append(nexts[beginnings[-1]][token])
    place = {s: (MARGIN + lengths[s] * _COLUMN, 96.0 if s in beginnings else 230.0) for s in range(len(nexts))}
    canvas = Canvas("Suffix automaton", f"{counted(len(nexts), 'state')}, {counted(len(automaton.text), 'token')}")
    for state, (x, y) in place.items():
        for token, target in nexts[state].items():
            (to_x, to_y), word = place[target], visible(decode([token]))
            start, end = (x + _BOX_WIDTH, y + _BOX_HEIGHT / 2), (to_x, to_y + _BOX_HEIGHT / 2)
            if y == to_y and lengths[target] > lengths[state] + 1:  # over the states between them
                middle, high = (x + to_x + _BOX_WIDTH) / 2, y - 30 - 4 * (lengths[target] - lengths[state])
                canvas.path(f"M{x + _BOX_WIDTH - 8:g} {y:g}Q{middle:g} {high:g} {to_x + 8:g} {y:g}")
                canvas.text(middle, (y + high) / 2 - 4, word, "mono text")
            else:
                canvas.arrow(start, end)
                across, down = end[0] - start[0], end[1] - start[1]
                aside = 10 / math.hypot(across, down)  # the word stands beside the arrow, however steep that is
                x_of_word, y_of_word = start[0] + across / 3 + down * aside, start[1] + down / 3 - across * aside + 4
                canvas.text(x_of_word, y_of_word, word, "mono text")
        longest = decode(automaton.text[ends[state] - lengths[state] : ends[state]])
        lines = (f"{state}: {visible(longest) or '–'}", "text small strong"), (f"ends at {ends[state]}", "text small")
        link = f"link {links[state]}" if state else "no link"
        canvas.cell(x, y, _BOX_WIDTH, _BOX_HEIGHT, *lines, (link, "text small"), kind="shared")
        moves = ", ".join(f"{decode([token])!r} leads to {target}" for token, target in nexts[state].items())
        canvas.says.append(f"State {state}: {longest!r}, first ends at {ends[state]}, {link}; {moves or 'no way on'}.")
    return canvas.picture(300.0)
