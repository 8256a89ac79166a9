"""How long a decided step takes, over each control plane, until the last rank can launch it: no model is in the way.

A listener stands for each rank. It is a process that waits like `minisgl.distributed.worker.Rank` at rest, and takes
the time where a rank calls `Engine.launch`: when it holds the decoded `Batch`. So what is measured is all of the way
from "step decided" to "last rank launches" but the launching itself, which is the same for every plane, and no GPU is
needed.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec
import numpy as np

from minisgl.bench.report import Cell, Table
from minisgl.core.batch import Batch, NewRequest, build_batch
from minisgl.core.registry import resolve
from minisgl.core.sampling_params import SamplingParams
from minisgl.distributed import CONTROL_PLANES
from minisgl.distributed.messages import Endpoint, Stepped, decode_batch, encode_batch
from minisgl.distributed.reports import ReportReader, send_report

STEPS = {
    "decode": "256 rows in decode, 16 of them with a new page",
    "prefill": "8 prompts of 1,024 tokens that are admitted",
}
_PAUSE = 0.003
"""Seconds between two steps: a rank that waits for the next one is asleep by then, as it is in a server at rest."""
_TIMEOUT = 60.0
_WARM_UP = 20


class Listening(msgspec.Struct, frozen=True):
    """What a listener is started with."""

    plane: str
    endpoint: Endpoint
    reports: int


def measure_planes(ranks: Sequence[int], steps: int) -> Table:
    """Microseconds from a `Batch` in the driver, not encoded yet, to the moment right before the last rank would call
    `Engine.launch` with the same `Batch`, received and decoded.

    Args:
        ranks: numbers of ranks, as many as one likes: none of them has a device.
        steps: that are sent of each kind.
    """
    rows: list[list[Cell]] = []
    for size in ranks:
        for plane in CONTROL_PLANES:
            for kind, batch in (("decode", decode_batch_of(256)), ("prefill", prefill_batch_of(8, 1024))):
                taken = sorted(_times(plane, size, batch, steps))
                cells = (statistics.median(taken), taken[int(0.95 * len(taken))])
                rows.append([plane, kind, len(encode_batch(batch)), size, *cells])
    columns = ["control plane", "step", "bytes", "ranks", "median", "95 %"]
    return Table("from a step decided to the last rank that can launch it, µs", columns, rows)


def _times(plane: str, size: int, batch: Batch, steps: int) -> list[float]:
    """Microseconds of each step, without the first few."""
    with ExitStack() as stack:
        driver = resolve("control_plane", plane, CONTROL_PLANES)(size, lambda: None)
        stack.callback(driver.close)
        readers = [_listen(plane, driver.endpoint(rank), stack) for rank in range(size)]
        driver.connect(_TIMEOUT)
        for reader in readers:
            reader.read(_TIMEOUT)
        taken = []
        for _ in range(_WARM_UP + steps):
            time.sleep(_PAUSE)
            decided = time.monotonic_ns()
            driver.send(encode_batch(batch), _TIMEOUT)
            heard = [reader.read(_TIMEOUT) for reader in readers]
            taken.append((max(each.digest for each in heard if isinstance(each, Stepped)) - decided) / 1e3)
    return taken[_WARM_UP:]


def _listen(plane: str, endpoint: Endpoint, stack: ExitStack) -> ReportReader:
    """Start a listener; it ends with the stack."""
    reports, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "minisgl.bench.control_planes"], stdin=subprocess.PIPE, pass_fds=(writer, *endpoint.fds)
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    os.close(writer)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(Listening(plane, endpoint, writer)) + b"\n")
    process.stdin.flush()

    def check() -> None:
        if process.poll() is not None:
            raise RuntimeError(f"a listener has ended with exit code {process.returncode}")

    reader = ReportReader(reports, reports, check)
    stack.callback(reader.close)
    stack.callback(process.stdin.close)
    return reader


def decode_batch_of(rows: int) -> Batch:
    """A decode step, of which every 16th row has got a new page."""
    changed = np.arange(0, rows, 16, dtype=np.int32)
    return _batch(rows, 1, 1000, page_index=changed, page_value=changed)


def prefill_batch_of(rows: int, length: int) -> Batch:
    """A step that admits ``rows`` prompts and feeds all of each."""
    params = SamplingParams(temperature=0.6, max_tokens=512, ignore_eos=True)
    prompt = np.arange(length, dtype=np.int32)
    new_requests = [NewRequest(slot, prompt, length, params, (), seed=slot) for slot in range(rows)]
    pages = np.arange(rows * length // 16, dtype=np.int32)
    return _batch(rows, length, 0, new_requests=new_requests, page_index=pages, page_value=pages)


def _batch(rows: int, fed: int, cached: int, **changes: object) -> Batch:
    slots = np.arange(rows, dtype=np.int32)
    build: Callable[..., Batch] = build_batch
    return build(
        slots=slots,
        q_lens=np.full(rows, fed, dtype=np.int32),
        kv_lens=np.full(rows, cached, dtype=np.int32),
        page_table=np.zeros((rows, (fed + cached) // 16 + 1), dtype=np.int32),
        page_size=16,
        sample_rows=slots,
        output_index=slots,
        num_decode=rows if cached else 0,
        **changes,
    )


def listen() -> None:
    """A rank without a model: say at what time it could have launched each step."""
    told = msgspec.json.decode(sys.stdin.buffer.readline(), type=Listening)
    steps = resolve("control_plane", told.plane, CONTROL_PLANES).receiver(told.endpoint)
    send_report(told.reports, Stepped(-1, b"", None, 0))
    number = 0
    while (message := steps.receive()) is not None:
        decode_batch(message)
        send_report(told.reports, Stepped(number, b"", None, time.monotonic_ns()))
        number += 1


if __name__ == "__main__":
    listen()
