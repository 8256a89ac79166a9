"""The tables of ``python -m minisgl.bench serve``: a row for each load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.bench.report import Cell, Table, Target
from minisgl.bench.serve.loops import Heartbeat
from minisgl.bench.serve.records import Outcome
from minisgl.bench.serve.summary import Summary, percentiles
from minisgl.bench.serve.watch import Watch

_NONE = "–"
_MIB = 2**20
_FLAT = 1.02
"""Growth of memory over the second half, as a factor, up to which it counts as flat: allocators breathe."""
_BUSY = 0.8
"""Share of a core from which on the client may be what is measured."""


@dataclass(frozen=True, slots=True)
class Run:
    """One load, as it was.

    Args:
        summary: of the answers.
        beat: of the client.
        pieces: of answers that the client has read.
        watch: of the server, if its processes can be seen from here.
    """

    summary: Summary
    beat: Heartbeat
    pieces: int
    watch: Watch | None


def all_tables(runs: Sequence[Run]) -> list[Table]:
    """Everything that was seen."""
    tables = [_throughput(runs), _first_token(runs), _tokens(runs), _answers(runs), _client(runs)]
    return tables + [_server(run) for run in runs if run.watch is not None]


def all_targets(runs: Sequence[Run]) -> list[Target]:
    """What has to hold under any load, and what has to hold for the numbers to mean something."""
    targets: list[Target] = []
    for run in runs:
        load, busy = run.summary.load, run.beat.cpu / run.beat.seconds
        targets.append(Target(f"{load}: requests answered, share", run.summary.answered, 1.0, at_least=True))
        targets.append(Target(f"{load}: client's share of a core", busy, _BUSY, at_least=False))
        if run.watch is not None:
            targets += _nothing_leaked(load, run.watch)
    return targets


def _nothing_leaked(load: str, watch: Watch) -> list[Target]:
    files = sum(watch.after.values()) / sum(watch.before.values())
    targets = [Target(f"{load}: open files, after / before", files, 1.0, at_least=False)]
    growth = watch.growth(watch.total)
    if growth is not None:
        factor = 1.0 + growth / (watch.total[-1] - growth)
        targets.append(Target(f"{load}: memory, end / half-time", factor, _FLAT, at_least=False))
    if watch.gauges is not None:
        back = 1.0 - watch.gauges.used_pages / watch.gauges.pages
        targets.append(Target(f"{load}: pages given back, share", back, 1.0, at_least=True))
    return targets


def _throughput(runs: Sequence[Run]) -> Table:
    rows: list[list[Cell]] = []
    for summary in (run.summary for run in runs):
        share = summary.goodput / summary.throughput if summary.finished else 0.0
        rows.append(
            [summary.load, summary.throughput, summary.output_throughput, summary.goodput, f"{share:.0%}"],
        )
    limits = runs[0].summary.limits
    title = f"throughput; good is a first token in {limits.ttft:g} s and then {1e3 * limits.tpot:g} ms a token"
    return Table(title, ["load", "requests/s", "output tokens/s", "good requests/s", "good"], rows)


def _first_token(runs: Sequence[Run]) -> Table:
    rows: list[list[Cell]] = []
    for summary in (run.summary for run in runs):
        rows.append([summary.load, *_millis(summary.ttft, 50, 90, 99), *_millis(summary.latency, 50, 90, 99)])
    percents = ["p50", "p90", "p99"]
    return Table(
        "percentiles, ms: time to first token (TTFT), and to the end (E2E), from when the request was due",
        ["load", *(f"TTFT {each}" for each in percents), *(f"E2E {each}" for each in percents)],
        rows,
    )


def _tokens(runs: Sequence[Run]) -> Table:
    rows: list[list[Cell]] = []
    for summary in (run.summary for run in runs):
        rows.append([summary.load, *_millis(summary.tpot, 50, 90, 99), *_millis(summary.gaps, 50, 99, 99.9)])
    columns = ["TPOT p50", "TPOT p90", "TPOT p99", "ITL p50", "ITL p99", "ITL p99.9"]
    title = "percentiles, ms: time per output token after the first (TPOT), between two pieces of an answer (ITL)"
    return Table(title, ["load", *columns], rows)


def _answers(runs: Sequence[Run]) -> Table:
    """A column for each outcome that there was."""
    seen = [outcome for outcome in Outcome if any(run.summary.outcomes[outcome] for run in runs)]
    rows: list[list[Cell]] = []
    for summary in (run.summary for run in runs):
        wrong = sum(record.planned.malformed is not None for record in summary.records)
        counts = [summary.outcomes[outcome] for outcome in seen]
        rows.append([summary.load, len(summary.records), wrong, *counts])
    return Table("what became of the requests", ["load", "sent", "of them malformed", *seen], rows)


def _client(runs: Sequence[Run]) -> Table:
    rows: list[list[Cell]] = []
    for run in runs:
        beat = run.beat
        rows.append(
            [
                run.summary.load,
                beat.cpu / beat.seconds,
                1e6 * beat.cpu / run.pieces if run.pieces else _NONE,
                *_millis(beat.delays, 99, 100),
                *_millis(run.summary.lateness, 99),
                beat.in_flight / beat.seconds,
                run.summary.little,
            ]
        )
    columns = ["share of a core", "µs a piece", "delay p99", "delay max", "late p99", "in flight", "Little"]
    title = (
        "the client itself: CPU; ms that its clock and its sending were late; in flight, counted and by Little's law"
    )
    return Table(title, ["load", *columns], rows)


def _server(run: Run) -> Table:
    watch = run.watch
    assert watch is not None
    rows: list[list[Cell]] = []
    for kind in dict.fromkeys(watch.tree.kinds.values()):
        files = [watch.before.get(kind, 0), watch.after.get(kind, 0)]
        rows.append([kind, *_memory(watch, watch.memory(kind)), *files])
    rows.append(["all", *_memory(watch, watch.total), sum(watch.before.values()), sum(watch.after.values())])
    gauges = watch.gauges
    left = f"{gauges.running + gauges.waiting} requests, {gauges.used_pages} pages" if gauges else "not told by it"
    title = f"server's processes, {run.summary.load}; in use at the end: {left}"
    columns = ["process", "MiB before", "at half", "at the end", "growth in 2nd half", "files before", "after"]
    return Table(title, columns, rows)


def _memory(watch: Watch, values: Sequence[int]) -> list[Cell]:
    if not values:
        return [_NONE] * 4
    growth = watch.growth(values)
    half = next(value for value, now in zip(values, watch.times, strict=True) if now >= watch.times[-1] / 2)
    return [values[0] / _MIB, half / _MIB, values[-1] / _MIB, _NONE if growth is None else growth / _MIB]


def _millis(values: Sequence[float], *percents: float) -> list[Cell]:
    found = percentiles(values, *percents)
    return [_NONE] * len(percents) if found is None else [1e3 * value for value in found]
