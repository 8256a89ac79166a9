"""Where each millisecond goes: in whole workloads, and in one token of one request, version by version.

Both go down to kernels: of a workload those that cost most, of a token each launch of a layer.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from minisgl.batch import Batch, DeviceBatch, build_batch
from minisgl.bench.gpu import Launch, copy_bandwidth, launched, milliseconds
from minisgl.bench.report import Report, Table
from minisgl.bench.workloads import ALL_OFF, WORKLOADS, make_engine, run_workload
from minisgl.context import AttentionBackend
from minisgl.engine.cuda_graph import CpuGraph, CudaGraphCapture, CudaGraphRunner, graph_sizes, measure_graph_memory
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.sampler import FusedSampler
from minisgl.engine.sampling import HostSampling
from minisgl.kernels.launch import without_pdl
from minisgl.kernels.persistent_decoder import OPERATIONS, PersistentKernel
from minisgl.llm import LLM
from minisgl.models.decoder import CausalLM
from minisgl.models.fusions import fuse_layers
from minisgl.models.persistent_decoder import PersistentDecoder
from minisgl.models.single_token import SingleTokenDecoder
from minisgl.trace import DEVICE, HOST, Trace

_OPTIONS: dict[str, Any] = {**ALL_OFF, "num_pages": 512, "max_running_requests": 2}
_TIMED_STEPS = 20
_MOST_ROWS = 256
_KERNEL_ROWS = 25
_NAME_LENGTH = 80  # names of C++ templates have hundreds of characters
_FUSIONS = {
    "norm": "residual and norm as one kernel",
    "rope": "QK-norm, rotation and KV store as one kernel",
    "activation": "SiLU·mul as one kernel",
}


class NotCompiled:
    """An attention backend that torch.compile calls without tracing into it, as in vLLM's compiled models."""

    def __init__(self, attention: AttentionBackend) -> None:
        self.capturable, self.captures_prefill, self.plan = attention.capturable, False, attention.plan
        self.forward = torch.compiler.disable(attention.forward)


@torch.inference_mode()
def run_batch_one(
    model: str = "Qwen3-0.6B",
    options: Mapping[str, Any] = {},
    lengths: Sequence[int] = (1, 640, 2000),
    repeat: int = 20,
) -> Report:
    """Time every version at some sequence lengths, and list the kernels of some, at the second length."""
    llm = make_engine(model, {**_OPTIONS, **options})
    runner = llm.engine.runner
    runner.kv_cache.k.normal_()
    runner.kv_cache.v.normal_()
    batches = [_decode_step(runner, length) for length in lengths]
    report = Report("batch-one")
    columns = ("", "launches", *(f"ms, {length} tokens" for length in lengths), "kernels added up, ms")
    table = report.table(f"{model}, one token of one request", *columns)
    for name, version, detailed in _versions(runner):
        steps = [partial(version.run, batch, HostSampling()) for batch in batches]
        # A step among others that are launched one after another, without waiting for any.
        rows = [lambda step=step: [step() for _ in range(_TIMED_STEPS)] for step in steps]
        times = [milliseconds([row] * (repeat + 1), runner.device) / _TIMED_STEPS for row in rows]
        launches = launched(steps[1], runner.device)
        alone = sum(launch.end - launch.start for launch in launches) / 1e3
        table.add(name, len(launches), *times, alone)
        if detailed:
            report.tables += [_kernels(name, launches), _layer(name, launches)]
        decoder = version.model_for(1) if isinstance(version, CudaGraphRunner) else version.model
        if isinstance(decoder, PersistentDecoder) and runner.device.type == "cuda":
            report.tables.append(_instructions(decoder, cast(CudaGraphRunner, version).buffers[1].inputs))
    if runner.device.type == "cuda":
        bandwidth = report.settings["copy_bytes_per_second"] = copy_bandwidth()
        floors = [_bytes_read(runner, length) / bandwidth * 1e3 for length in lengths]
        table.add(f"these bytes copied at {bandwidth / 1e12:.2f} TB/s", 0, *floors, floors[1])
        report.tables.append(_graph_memory(runner))
    return report


def _versions(plain: ModelRunner) -> Iterator[tuple[str, ModelRunner, bool]]:
    """From plain to fully optimised: names, runners, and whether kernels are listed. Each fusion stays in the model."""
    with without_pdl():
        yield "plain kernels, launched one by one", plain, False
        yield "plain kernels, in a graph", _graph(plain), True
        compiled = torch.compile(plain.model, dynamic=False)
        opaque = _with(plain, attention=NotCompiled(plain.attention))
        with torch._dynamo.config.patch(recompile_limit=256):
            yield "torch.compile, in a graph", _graph(opaque, decoder=compiled), True
        for fusion, description in _FUSIONS.items():
            fuse_layers(plain.model, {fusion})
            yield f"+ {description}", _graph(plain), False
        fused = _with(plain, sampler=FusedSampler())
        yield "+ sampler and inputs, fused", _graph(fused, fused=True), True
        if not SingleTokenDecoder.supports(plain.model):
            return
        decoder = SingleTokenDecoder(plain.model, plain.kv_cache)
        yield "single-token decoder, kernels in turn", _graph(fused, fused=True, decoder=decoder), True
    yield "single-token decoder, kernels started early", _graph(fused, fused=True, decoder=decoder), True
    if PersistentDecoder.supports(plain.model) and plain.kv_cache.k.dtype == plain.kv_cache.dtype:
        persistent = PersistentDecoder(plain.model, plain.kv_cache)
        yield "persistent decoder, one kernel for all layers", _graph(fused, fused=True, decoder=persistent), False


def _with(runner: ModelRunner, **parts: Any) -> ModelRunner:
    """``runner`` with some of its parts exchanged."""
    return ModelRunner(**{**vars(runner), **parts})


def _graph(
    runner: ModelRunner, fused: bool = False, decoder: Callable[[DeviceBatch], torch.Tensor] | None = None
) -> CudaGraphRunner:
    """A graph of one row; without CUDA one that calls the work again."""
    capture = CudaGraphCapture(runner.device) if runner.device.type == "cuda" else CpuGraph
    return CudaGraphRunner(runner, (1,), capture, fused, decoder)


def _decode_step(runner: ModelRunner, length: int) -> Batch:
    """A step that feeds the last of ``length`` tokens of slot 0, whose pages are the first of the cache."""
    page_size = runner.kv_cache.page_size
    pages = np.arange(-(-length // page_size), dtype=np.int32)
    runner.state.page_table[0, : len(pages)] = torch.from_numpy(pages)
    zero, one, cached = (np.array([value], dtype=np.int32) for value in (0, 1, length - 1))
    return build_batch(zero, one, cached, pages[None], page_size, zero, zero, num_decode=1)


def _kernels(version: str, launches: Sequence[Launch]) -> Table:
    """Kernels, by the total time of their launches."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for launch in launches:
        times[launch.name].append(launch.end - launch.start)
    total = sum(map(sum, times.values()))
    table = Table(f"kernels of a step: {version}", ["kernel", "launches", "µs each", "µs in all", "% of all"])
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1])):
        table.add(name, len(each), sum(each) / len(each), sum(each), 100 * sum(each) / total)
    return table


def _layer(version: str, launches: Sequence[Launch]) -> Table:
    """The launches of a layer in order: when each begins and ends, in the median of all layers."""
    begin, period = repetition([launch.name for launch in launches])
    pieces = [launches[start : start + period] for start in range(begin, len(launches) - period + 1, period)]
    layers = [piece for piece in pieces if [each.name for each in piece] == [each.name for each in pieces[0]]]
    table = Table(f"one layer in time: {version}", ["kernel", "from µs", "to µs"])
    for index in range(period):
        starts = [layer[index].start - layer[0].start for layer in layers]
        ends = [layer[index].end - layer[0].start for layer in layers]
        table.add(layers[0][index].name, statistics.median(starts), statistics.median(ends))
    return table


def _instructions(decoder: PersistentDecoder, inputs: DeviceBatch) -> Table:
    """One layer in the kernel of all layers: when its programs begin an instruction, have what others wrote and are
    done; in the median of all layers. At first the kernel runs twice to warm up."""
    machine, step = cast(PersistentKernel, decoder.persistent), decoder.token_step(inputs)
    count = machine.shape.layers * len(OPERATIONS)
    times = torch.zeros((count, machine.programs, 3), dtype=torch.int64, device=inputs.slots.device)
    for _ in range(3):
        machine.run(step, times)
    layers = times.cpu().double().view(-1, len(OPERATIONS), machine.programs, 3)
    layers[layers == 0] = torch.nan  # a program without keys waits for nobody
    since = (layers - layers[:, :1, :, :1].amin(dim=2, keepdim=True)) / 1e3
    columns = ["instruction", "first begins, µs", "ready, µs", "last ready, µs", "done, µs", "last done, µs"]
    table = Table("one layer in time: persistent decoder", columns)
    for operation, (began, ready, done) in zip(OPERATIONS, since.permute(1, 3, 0, 2), strict=True):
        last_ready = ready.nan_to_num(-torch.inf).amax(dim=1)
        medians = (began.amin(dim=1), ready.nanmedian(dim=1).values, last_ready, done.median(dim=1).values)
        table.add(operation, *(float(each.median()) for each in (*medians, done.amax(dim=1))))
    return table


def repetition(names: Sequence[str]) -> tuple[int, int]:
    """Where a sequence begins to repeat itself, and its period, judged by its middle half; else all of it."""
    middle = names[len(names) // 4 : 3 * len(names) // 4]
    period = next((p for p in range(1, len(middle) // 2 + 1) if middle[p:] == middle[:-p]), len(names))
    begin = len(names) // 4 if period < len(names) else 0
    while begin > 0 and names[begin - 1] == names[begin - 1 + period]:
        begin -= 1
    return begin, period


def _graph_memory(runner: ModelRunner) -> Table:
    """Memory that is set aside for graphs: that of the largest, and for each other one as much as for the second."""
    runner = _with(runner, sampler=FusedSampler())
    sizes = graph_sizes(_MOST_ROWS)
    largest, second = sizes[-1], sizes[-2]
    first, both, all_of_them = (measure_graph_memory(runner, each) for each in ((largest,), (second, largest), sizes))
    measured = {f"{largest} rows": first, f"{second} rows, behind those": both - first}
    measured[f"all {len(sizes)}, as counted"] = all_of_them
    return Table("memory of graphs", ["", "MB"], [[name, size / 1e6] for name, size in measured.items()])


def _bytes_read(runner: ModelRunner, length: int) -> int:
    """Bytes of the weights that a step multiplies with, and of the keys and values that it attends to."""
    model = cast(CausalLM, runner.model)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if model.lm_head is not None:  # of an embedding that is only an embedding a step reads one row
        weights -= sum(parameter.nbytes for parameter in model.model.embed_tokens.parameters())
    cache = runner.kv_cache
    return weights + 2 * cache.k[:, 0, 0].nbytes * length


def run_profile(
    model: str = "Qwen3-0.6B", work: str = "mixed", options: Mapping[str, Any] = {}, trace: Path | None = None
) -> Report:
    """Run a workload under `minisgl.trace`, and again under PyTorch's profiler."""
    llm = make_engine(model, options)
    with llm.trace() as recording:
        run_workload(llm, WORKLOADS[work], seed=1)
    if trace is not None:
        recording.export(trace)
    report, title = Report("profile", {"workload": work}), f"{model} {work}"
    summary = recording.summary()
    report.target(f"{title}, host time a step, ms", summary.host_median * 1e3, 1.0, at_least=False)
    if summary.gpu_idle is not None:
        idle = summary.gpu_idle * 100
        report.target(f"{title}, GPU idle between decode steps, %", idle, 3.0, at_least=False)
    columns = ("step", "number", "device, ms in all", "device, median ms", "host, median ms")
    _add_steps(report.table(f"{title}: steps", *columns), recording)
    columns = ("kernel", "launches", "ms in all", "µs each", "% of the time")
    _add_kernels(report.table(f"{title}: kernels", *columns), llm, work)
    return report


def _add_steps(table: Table, trace: Trace) -> None:
    """Kinds of steps: how many there were, and how long the device and the host took for one."""
    spans = [event for event in trace.events if "step" in event.args]
    device = {event.args["step"]: event for event in spans if event.track == DEVICE}
    host: defaultdict[int, float] = defaultdict(float)
    for event in spans:
        if event.track == HOST and event.name != "wait":
            host[event.args["step"]] += event.end - event.start
    for kind in sorted({event.name for event in device.values()}):
        steps = [step for step, event in device.items() if event.name == kind]
        on_device = [1e3 * (device[step].end - device[step].start) for step in steps]
        on_host = [1e3 * host[step] for step in steps]
        table.add(kind, len(steps), sum(on_device), statistics.median(on_device), statistics.median(on_host))


def _add_kernels(table: Table, llm: LLM, workload: str) -> None:
    """Kernels of the device (PyTorch's operators on a CPU), the most expensive first."""
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
    for micros, count, name in sorted(times, reverse=True)[:_KERNEL_ROWS]:
        if micros > 0:
            table.add(name[:_NAME_LENGTH], count, micros / 1e3, micros / count, 100 * micros / total)
