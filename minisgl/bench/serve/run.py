"""``python -m minisgl.bench serve``: a server under load, once for each load that was asked for."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from minisgl.bench.report import Report
from minisgl.bench.serve.client import Client, Target, address_of
from minisgl.bench.serve.loops import closed_loop, heartbeat, open_loop
from minisgl.bench.serve.models import served_model
from minisgl.bench.serve.processes import ProcessTree
from minisgl.bench.serve.server import allow_many_sockets, model_of, server
from minisgl.bench.serve.summary import Limits, Summary
from minisgl.bench.serve.tables import Run, all_tables, all_targets
from minisgl.bench.serve.watch import watched
from minisgl.bench.serve.workload import Planned, Workload

_TELLING = ("OMP_NUM_THREADS", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables that decide over time and memory on a CPU. PyTorch and oneDNN keep what they have compiled for
each shape, up to a thousand of them: some hundred MiB that come in slowly and are no leak. Capacities of 1 and 0 tell
the two apart."""
_WARM_UP = 8
"""Requests before the first load: connections, kernels and caches are there when it begins."""
_PAUSE = 1.0
"""Seconds after them, in which the server closes their connections."""


@dataclass(frozen=True, slots=True)
class Load:
    """How hard to press: ``rate`` requests a second in an open loop, ``users`` at a time in a closed one, or, with
    neither, the times of a trace."""

    rate: float | None = None
    users: int | None = None

    @property
    def label(self) -> str:
        """In words."""
        if self.users is not None:
            return f"{self.users} users"
        return "as recorded" if self.rate is None else f"{self.rate:g}/s"


@dataclass(frozen=True, slots=True)
class Subject:
    """Which server is measured.

    Args:
        url: of one that runs already; None starts one.
        model: for a server that is started: ``"tiny"``, a shape, or what `minisgl.LLM` takes.
        options: flags of ``python -m minisgl.serve``, by names with underscores.
        vocab_size: ids of prompts for a server that runs already lie below this.
        start_timeout: seconds that a server has to start.
    """

    url: str | None = None
    model: str = "tiny"
    options: Mapping[str, Any] = field(default_factory=dict)
    vocab_size: int = 10_000
    start_timeout: float = 600.0

    @contextmanager
    def running(self) -> Iterator[tuple[Target, ProcessTree | None]]:
        """Where the server is, and its processes if they are ours.

        Raises:
            LoadError: the URL is none.
            ServerFailed: it does not answer, or does not start.
        """
        allow_many_sockets()
        if self.url is not None:
            host, port = address_of(self.url)
            yield Target(host, port, model_of(host, port), self.vocab_size), None
            return
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            model = served_model(self.model, root)
            options = {**model.options, **self.options}
            with server(model.path, model.vocab_size, options, root, self.start_timeout) as running:
                yield running.target, ProcessTree(running.process.pid)


def run_serve(subject: Subject, workload: Workload, loads: Sequence[Load], limits: Limits, timeout: float) -> Report:
    """Latency, throughput and goodput under each load, and what it left behind in the server.

    Args:
        subject: the server.
        workload: what is sent.
        loads: how hard; each is a run of its own, with new prompts.
        limits: of goodput.
        timeout: seconds that a request may take.

    Raises:
        LoadError: the workload cannot be made.
        ServerFailed: there is no server to be measured.
    """
    plans = [workload.plan(load.rate, number) for number, load in enumerate(loads)]
    with subject.running() as (target, tree):
        runs = asyncio.run(_run_all(target, tree, workload.seed, loads, plans, limits, timeout))
    settings: dict[str, Any] = {"url": subject.url, "model": target.model if subject.url else subject.model}
    settings |= {"options": dict(subject.options), **asdict(workload), "trace": str(workload.trace or "")}
    settings |= {"loads": [asdict(load) for load in loads], "limits_seconds": asdict(limits)}
    settings |= {name: os.environ[name] for name in _TELLING if name in os.environ}
    memory = {f"{run.summary.load}: memory, MiB": run.watch.curve for run in runs if run.watch is not None}
    return Report("serve", settings, all_tables(runs), all_targets(runs), memory)


async def _run_all(
    target: Target,
    tree: ProcessTree | None,
    seed: int,
    loads: Sequence[Load],
    plans: Sequence[list[Planned]],
    limits: Limits,
    timeout: float,
) -> list[Run]:
    runs: list[Run] = []
    warm_up = [Planned(index, 16, 8) for index in range(_WARM_UP)]
    await closed_loop(Client(target, seed, timeout), warm_up, _WARM_UP)
    await asyncio.sleep(_PAUSE)
    for number, (load, plan) in enumerate(zip(loads, plans, strict=True), start=1):
        client = Client(target, seed + number, timeout)  # another seed: what the last run left in the cache is no help
        async with nullcontext() if tree is None else watched(tree, target) as watch, heartbeat(client) as beat:
            records = await (open_loop(client, plan) if load.users is None else closed_loop(client, plan, load.users))
        runs.append(Run(Summary(load.label, records, limits), beat, client.pieces, watch))
    return runs
