"""What the table of overheads aims at."""

from __future__ import annotations

from minisgl.bench.serve.overhead import _targets


def test_a_millisecond_at_256_streams_and_growth_no_faster_than_theirs() -> None:
    targets = _targets({256: 2.0, 1024: 7.0}, {256: 0.5, 512: 1.5})
    assert [(target.value, target.limit, target.met) for target in targets] == [
        (2.0, 1.0, False),
        (3.5, 4.0, True),
        (0.5, 1.0, True),
        (3.0, 2.0, False),
    ]
    assert _targets({512: 2.0}, {512: 1.0}) == []
