"""A measured number in the prose of a chapter comes from a result or an output of the page, never from a keyboard."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CHAPTERS = Path(__file__).parents[2] / "chapters"
_CODE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
_TIME, _SPEED = r"ns|µs|ms|s|(?:micro|milli)?seconds?|minutes?", r"[KMGT]i?B/s|[GTP]FLOP/s|tokens/s|tokens a second"
_UNIT = rf"(?:{_TIME}|{_SPEED}|%|percent|×|times)"
_MEASUREMENT = re.compile(rf"(?<![\w.,$])\d[\d,.]*(?: to \d[\d,.]*)?\s{_UNIT}(?!\w)")

# What is no measurement of ours: chapter → the words it stands in → where it comes from.
TYPED = {
    "04-paged-kv.md": {
        "25 times as many weights": "two parameter counts of the table below it",
        "Only 1.4 times as much": "40 layers by 28",
    },
    "05-sampling-and-the-engine.md": {
        "With 64 rows a step would wait 64 times": "a count",
        "more tokens to collect 90 %": "a threshold of top-p",
    },
    "09-when-memory-runs-out.md": {"say 30 %": "an example"},
    "12-fused-kernels.md": {
        "squares 16 times as much": "a count",
        "reached 78 %": "published, with its link",
        "measured 1.3 µs": "published, with its link",
    },
    "13-overlap-scheduling.md": {
        "The device needs 10 ms": "set in the cell that follows",
        "and the host\n   3 ms": "set in the cell that follows",
        "stays at 10 ms": "set in the cell before",
        "a host of 20 ms": "set in the cell that follows",
        "= 4 ms and": "a question",
        "= 3 ms, with": "a question",
        "3 ms instead of 4": "the answer to it",
    },
    "14-tensor-parallelism.md": {
        "carries\n450 GB/s": "a data sheet",
        "would be 100 %": "a definition",
    },
    "15-processes-and-messages.md": {
        "takes 3 ms for a step": "set in the cell that follows",
        "needs its 3 ms": "set in the cell before",
        "5 ms by default": "Python's documentation",
        "a sleep of 3 ms": "set in the cell that follows",
    },
    "17-measuring.md": {
        "790 TFLOP/s": "given by the question",
        "every\n10 ms": "set in the cell before",
        "200 ms for the first token": "set in the cell before",
        "20 ms for each other": "set in the cell before",
        "latency 4 s": "a question",
        "50 × 4": "the answer to it",
        "4 % better": "a question",
        "what 4 %": "the answer to it",
    },
    "19-quantised-weights.md": {"take 90 % of its bytes": "a question"},
    "20-more-than-one-engine.md": {
        "within 50 milliseconds": "an objective, set in the cell before",
        "more than 15 percent": "an aim",
    },
}


def typed_measurements(text: str, excused: dict[str, str]) -> list[str]:
    """Numbers with a unit of time, speed or share in prose that no excuse covers, and excuses that cover none."""
    prose = _CODE.sub(lambda code: "\n" * code.group().count("\n"), text)
    covered, unused = set(), []
    for words in excused:
        pattern = re.compile(r"\s+".join(map(re.escape, words.split())))
        places = [place for found in pattern.finditer(prose) for place in range(*found.span())]
        covered.update(places)
        if not any(match.start() in places for match in _MEASUREMENT.finditer(prose)):
            unused.append(f"{' '.join(words.split())!r} covers no number")
    return [
        f"line {prose.count(chr(10), 0, match.start()) + 1}: {match.group()!r}"
        for match in _MEASUREMENT.finditer(prose)
        if match.start() not in covered
    ] + unused


@pytest.mark.parametrize("chapter", sorted(path.name for path in CHAPTERS.glob("[0-9]*.md")))
def test_no_measurement_is_typed(chapter: str) -> None:
    assert typed_measurements((CHAPTERS / chapter).read_text(encoding="utf-8"), TYPED.get(chapter, {})) == []


def test_the_chapters_with_excuses_exist() -> None:
    assert [name for name in TYPED if not (CHAPTERS / name).is_file()] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A step takes 7.1 ms here.", ["line 1: '7.1 ms'"]),
        (
            "It copies\n4,300 to 4,400 GB/s and\nreaches 63 % of it.",
            ["line 2: '4,300 to 4,400 GB/s'", "line 3: '63 %'"],
        ),
        ("It is 1.8 × as fast, or 12 times.", ["line 1: '1.8 ×'", "line 1: '12 times'"]),
        ("With 16 tokens on 3 pages, `max_tokens=5`.", []),
        ("```python\nlimit = 30  # 30 ms\n```\nNo number.", []),
    ],
)
def test_a_measurement_in_prose_is_found(text: str, found: list[str]) -> None:
    assert typed_measurements(text, {}) == found


def test_an_excuse_covers_its_words_alone_and_is_missed_when_it_is_not_needed() -> None:
    assert typed_measurements("The device needs 10 ms, and took 11 ms.", {"needs\n10 ms": "set"}) == ["line 1: '11 ms'"]
    assert typed_measurements("It is fast.", {"needs 10 ms": "set"}) == ["'needs 10 ms' covers no number"]
