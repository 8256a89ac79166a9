"""The commands ``serve``, ``faults`` and ``api`` of ``python -m minisgl.bench``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from minisgl.bench.report import Report
from minisgl.bench.serve.errors import LoadError, ServerFailed
from minisgl.bench.serve.faults import FaultLoad, run_faults
from minisgl.bench.serve.overhead import Waves, run_overhead
from minisgl.bench.serve.run import Load, Subject, run_serve
from minisgl.bench.serve.summary import Limits
from minisgl.bench.serve.workload import Range, Workload

_USERS = 16


def add_commands(command: Callable[[str, str], argparse.ArgumentParser]) -> list[argparse.ArgumentParser]:
    """Add them, and return their parsers.

    Args:
        command: makes a parser out of a name and a summary.
    """
    serve = command("serve", "a server under load: latency, throughput, goodput, and what is left behind")
    _add_serve(serve)
    faults = command("faults", "kill each process of a server under load: what happens to each request")
    load = FaultLoad()
    faults.add_argument("--users", type=int, default=load.users, help="requests in flight when a process is killed")
    faults.add_argument("--output-len", type=int, default=load.output_len, help="tokens that each asks for")
    _run_by(faults, lambda given: run_faults(_subject(given), FaultLoad(given.users, given.output_len)))
    api = command("api", "what the server adds to the engine's time for a token batch")
    waves = Waves()
    api.add_argument("--streams", type=int, nargs="+", default=waves.streams, help="numbers of requests at a time")
    api.add_argument("--output-len", type=int, default=waves.output_len, help="tokens that each asks for")
    api.add_argument("--repeat", type=int, default=waves.repeat, help="measurements of each; the median counts")
    _run_by(
        api, lambda given: run_overhead(_subject(given), Waves(tuple(given.streams), given.output_len, given.repeat))
    )
    parsers = [serve, faults, api]
    for each in parsers:
        each.add_argument("--model", default="tiny", help="tiny, a shape (both with random weights), or a real model")
        each.add_argument("--start-timeout", type=float, default=600.0, help="seconds that a server has to start")
    return parsers


def _add_serve(serve: argparse.ArgumentParser) -> None:
    load, limits = Workload(), Limits(ttft=1.0, tpot=0.05)
    serve.add_argument("--url", help="http://HOST:PORT of a server that runs already; without it one is started")
    serve.add_argument("--vocab-size", type=int, default=Subject().vocab_size, help="of the model at --url, at most")
    loop = serve.add_mutually_exclusive_group()
    loop.add_argument("--rate", type=float, nargs="+", help="open loop: requests a second, a run for each number")
    loop.add_argument("--concurrency", type=int, nargs="+", help=f"closed loop: users, by default {_USERS}")
    arrivals = "poisson, constant, or trace FILE (Mooncake's or Qwen's format)"
    serve.add_argument("--arrivals", nargs="+", default=["poisson"], metavar=("KIND", "FILE"), help=arrivals)
    serve.add_argument("--requests", type=int, help="of each run; by default 100, or all of a trace")
    lengths = "one number, or the least and the most"
    serve.add_argument("--input-len", type=int, nargs="+", default=list(load.input_len), help=f"tokens in: {lengths}")
    serve.add_argument("--output-len", type=int, nargs="+", default=list(load.output_len), help=f"out: {lengths}")
    serve.add_argument("--disconnects", type=float, default=0.0, help="share of clients that leave before the end")
    serve.add_argument("--malformed", type=float, default=0.0, help="share of requests with a body that is wrong")
    serve.add_argument("--ttft-limit", type=float, default=limits.ttft, help="s to the first token, for goodput")
    serve.add_argument("--tpot-limit", type=float, default=limits.tpot, help="s a token after that, for goodput")
    serve.add_argument("--timeout", type=float, default=300.0, help="s after which a client gives up")
    serve.add_argument("--seed", type=int, default=load.seed, help="of lengths, arrivals, faults and prompts")
    _run_by(serve, _serve)


def _serve(given: argparse.Namespace) -> Report:
    for name in ("rate", "concurrency", "requests"):
        values = getattr(given, name)
        values = values if isinstance(values, list) else [values]
        if any(value is not None and value <= 0 for value in values):
            raise LoadError(f"{name}: must be positive, got {values}")
    kind, *files = given.arrivals
    if kind not in ("poisson", "constant", "trace") or len(files) != (kind == "trace"):
        raise LoadError(f"arrivals: must be poisson, constant, or trace FILE, got {' '.join(given.arrivals)}")
    shares = (given.disconnects, given.malformed)
    if not (all(share >= 0.0 for share in shares) and sum(shares) <= 1.0):
        raise LoadError(f"disconnects, malformed: must be shares that add up to 1 at most, got {shares}")
    workload = Workload(
        given.requests,
        _range("input_len", given.input_len),
        _range("output_len", given.output_len),
        kind,
        Path(files[0]) if files else None,
        given.disconnects,
        given.malformed,
        given.seed,
    )
    limits = Limits(given.ttft_limit, given.tpot_limit)
    return run_serve(_subject(given), workload, _loads(given, bool(files)), limits, given.timeout)


def _loads(given: argparse.Namespace, recorded: bool) -> list[Load]:
    if given.rate is not None:
        return [Load(rate=rate) for rate in given.rate]
    if given.concurrency is not None:
        return [Load(users=users) for users in given.concurrency]
    return [Load() if recorded else Load(users=_USERS)]


def _subject(given: argparse.Namespace) -> Subject:
    subject = Subject(model=given.model, options=dict(given.set), start_timeout=given.start_timeout)
    if given.benchmark != "serve":
        return subject
    return Subject(given.url, subject.model, subject.options, given.vocab_size, subject.start_timeout)


def _range(name: str, values: list[int]) -> Range:
    if len(values) not in (1, 2) or not 1 <= values[0] <= values[-1]:
        raise LoadError(f"{name}: must be one length or the least and the most, at least 1, got {values}")
    return values[0], values[-1]


def _run_by(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], Report]) -> None:
    """Have ``parser`` explain what cannot be run, in place of a traceback."""

    def explained(given: argparse.Namespace) -> Report:
        try:
            return run(given)
        except (LoadError, ServerFailed) as error:
            parser.error(str(error))

    parser.set_defaults(run=explained)
