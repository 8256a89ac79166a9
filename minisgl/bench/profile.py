"""Where the time of a workload goes: step by step, and kernel by kernel."""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from minisgl.bench.offline import make_engine
from minisgl.bench.report import Cell, Report, Table, Target
from minisgl.bench.shapes import model_dir
from minisgl.bench.workloads import WORKLOADS, run_workload
from minisgl.llm import LLM
from minisgl.trace import DEVICE, HOST, Trace

_KERNELS = 25
"""Lines of the table of kernels."""
_NAME = 80
"""Characters of a kernel's name that are shown; those of C++ templates have hundreds."""


def run_profile(model: str, workload: str, options: Mapping[str, Any], trace_file: Path | None) -> Report:
    """Run a workload twice: under `minisgl.trace`, and under PyTorch's profiler.

    Args:
        model: a name from `SHAPES`, or what `minisgl.LLM` takes.
        workload: a name from `WORKLOADS`.
        options: of `minisgl.LLM`.
        trace_file: where to write the trace in Chrome's format; None writes none.
    """
    with tempfile.TemporaryDirectory() as root:
        llm = make_engine(model_dir(model, Path(root)), model, options)
    with llm.trace() as trace:
        run_workload(llm, WORKLOADS[workload], seed=1)
    if trace_file is not None:
        trace.export(trace_file)
    title = f"{model} {workload}"
    tables = [_steps(title, trace), _kernels(title, llm, workload)]
    summary = trace.summary()
    targets = [Target(f"{title}, host time a step, ms", summary.host_median * 1e3, 1.0, at_least=False)]
    if summary.gpu_idle is not None:
        targets.append(
            Target(f"{title}, GPU idle between decode steps, %", summary.gpu_idle * 100, 3.0, at_least=False)
        )
    settings = {"model": model, "workload": workload, "options": dict(options)}
    return Report("profile", settings, tables, targets)


def _steps(title: str, trace: Trace) -> Table:
    """Kinds of steps: how many there were, and how long the device and the host took for one."""
    device: dict[int, tuple[str, float]] = {}
    host: defaultdict[int, float] = defaultdict(float)
    for event in trace.events:
        step = event.args.get("step")
        if step is None or event.duration is None:
            continue
        if event.track == DEVICE:
            device[step] = event.name, event.duration
        elif event.track == HOST and event.name != "wait":
            host[step] += event.duration
    rows: list[list[Cell]] = []
    for kind in sorted({kind for kind, _ in device.values()}):
        steps = [step for step, (name, _) in device.items() if name == kind]
        on_device = [device[step][1] * 1e3 for step in steps]
        on_host = [host[step] * 1e3 for step in steps]
        rows.append([kind, len(steps), sum(on_device), statistics.median(on_device), statistics.median(on_host)])
    columns = ["step", "number", "device, ms in all", "device, median ms", "host, median ms"]
    return Table(f"{title}: steps", columns, rows)


def _kernels(title: str, llm: LLM, workload: str) -> Table:
    """Kernels of the device, or PyTorch's operators on a CPU, by the time that they take themselves."""
    on_cuda = llm.engine.device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiler:
        run_workload(llm, WORKLOADS[workload], seed=2)
        if on_cuda:
            torch.cuda.synchronize()
    times = [
        (entry.self_device_time_total if on_cuda else entry.self_cpu_time_total, entry.count, entry.key)
        for entry in profiler.key_averages()
    ]
    total = sum(micros for micros, _, _ in times)
    rows: list[list[Cell]] = [
        [name[:_NAME], count, micros / 1e3, micros / count, 100 * micros / total]
        for micros, count, name in sorted(times, reverse=True)[:_KERNELS]
        if micros > 0
    ]
    return Table(f"{title}: kernels", ["kernel", "launches", "ms in all", "µs each", "% of the time"], rows)
