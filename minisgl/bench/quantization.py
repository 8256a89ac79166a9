"""Quantised weights: tokens a second and bytes for each scheme, and what each costs in precision on a text."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minisgl.bench import gpu
from minisgl.bench.attention import PAGE_SIZE, TEXT, text_logits
from minisgl.bench.report import Cell, Report, Target
from minisgl.bench.workloads import NAMES, WORKLOADS, free_memory, make_engine, run_workload
from minisgl.engine.engine import Engine
from minisgl.errors import ConfigError
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams

_TARGETS: dict[tuple[str, str, str], float] = {
    ("Qwen3-14B", "fp8", "bs1"): 4.2,
    ("Qwen3-14B", "fp8", "mixed"): 8_800,
    ("Qwen3-14B", "fp8", "prefix"): 1.0,
    ("Qwen3-14B", "int4", "bs1"): 2.9,
    ("Qwen3-32B", "int4", "bs1"): 5.6,
}
"""On one H200, in the workload's unit."""
_CPU_TARGETS = {"speed": 1.3, "memory": 0.4}  # of int8, × float32
_ROUNDINGS: Mapping[str, Mapping[str, Any]] = {
    "float32": {"quantization": "none"},
    "bfloat16": {"quantization": "none", "dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "fp8": {"quantization": "fp8"},
    "int4-zero-point": {"quantization": "int4-zero-point"},
    "int4": {"quantization": "int4"},
    "float32, KV in fp8": {"quantization": "none", "kv_dtype": "fp8"},
    "int8, KV in fp8": {"quantization": "int8", "kv_dtype": "fp8"},
}
"""Options of engines; the first is the reference of the others."""
_ON_GPU = ("none", "fp8", "fp8-block", "int4", "int4-zero-point")
_ON_CPU = ("none", "int8")


def run_quantization(
    model: str = "default",
    schemes: Sequence[str] = (),
    workloads: Sequence[str] = NAMES,
    repeat: int = 3,
    input_len: int = 32,
    output_len: int = 128,
) -> Report:
    """On a GPU whole workloads for each of the ``schemes``; on a CPU one request. Without schemes, all that pay there.

    ``"none"`` is measured where it is among them: without it there is nothing to compare with, and less to wait for.
    """
    report = Report("quantization")
    if torch.cuda.is_available():
        _on_gpu(report, model, schemes or _ON_GPU, workloads, repeat)
    else:
        _on_cpu(report, model, schemes or _ON_CPU, repeat, input_len, output_len)
    return report


def _on_gpu(report: Report, model: str, schemes: Sequence[str], workloads: Sequence[str], repeat: int) -> None:
    if refused := [name for name in workloads if WORKLOADS[name].options]:
        raise ConfigError(f"work: {refused[0]!r} needs an engine of its own; choose from {', '.join(NAMES)}")
    bandwidth = gpu.copy_bandwidth()
    table = report.table(model, "quantization", "weights, GB", "read once, ms", "workload", "median", "least", "most")
    for scheme in schemes:
        with make_engine(model, {"quantization": scheme}) as llm:
            size = llm.engine.model_bytes
            for name in workloads:
                workload = WORKLOADS[name]
                values = [run_workload(llm, workload, seed).value(workload) for seed in range(repeat)]
                median = statistics.median(values)
                unit = f"{name}, {workload.unit}"
                report.samples[f"{scheme} {unit}"] = values
                table.add(scheme, size / 1e9, size / bandwidth * 1e3, unit, median, min(values), max(values))
                goal = _TARGETS.get((model, scheme, name))
                if name == "mixed" and scheme == "int4" and (plain := report.samples.get(f"none {unit}")):
                    goal = statistics.median(plain)  # not below bfloat16
                if goal is not None:
                    title = f"{model} {scheme} {unit}"
                    report.targets.append(Target(title, median, goal, workload.more_is_better))
        del llm
        free_memory()


def _on_cpu(report: Report, model: str, schemes: Sequence[str], repeat: int, input_len: int, output_len: int) -> None:
    """Schemes take turns, because other work on the machine slows all of them."""
    pages: dict[str, Any] = {
        "num_pages": 64,
        "max_seq_len": input_len + output_len,
        "max_running_requests": 1,
        "prefix_cache": "none",
    }
    engines = {name: LLM(model, device="cpu", dtype="float32", quantization=name, **pages) for name in schemes}
    prompt = _prompt(input_len)
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for run in range(repeat + 1):
        for name, llm in engines.items():
            (output,) = llm.generate(prompt, params)
            if run:  # the first warms up
                speeds[name].append(1.0 / output.metrics.tpot)
    report.samples = speeds
    columns = ("quantization", "tokens/s", "least", "most", "× none", "weights, MB", "× none")
    table = report.table(f"{model} in float32, one request, {output_len} tokens out", *columns)
    reference = engines.get("none")
    for name, llm in engines.items():
        size, median = llm.engine.model_bytes, statistics.median(speeds[name])
        row: list[Cell] = [name, median, min(speeds[name]), max(speeds[name])]
        if reference is None:
            table.add(*row, "–", size / 1e6, "–")
            continue
        # Of turns that follow one another, so that what slows both cancels.
        ratio = statistics.median(ours / plain for ours, plain in zip(speeds[name], speeds["none"], strict=True))
        memory = size / reference.engine.model_bytes
        table.add(*row, ratio, size / 1e6, memory)
        if name == "int8":
            report.targets.append(Target("int8, tokens/s × float32", ratio, _CPU_TARGETS["speed"], at_least=True))
            report.targets.append(Target("int8, weights × float32", memory, _CPU_TARGETS["memory"], at_least=False))
    for llm in engines.values():
        llm.close()


def _prompt(count: int) -> list[list[int]]:
    return [list(range(1000, 1000 + count))]


class TextError(NamedTuple):
    """How far predictions are from those of the reference, along a text."""

    logprobs: torch.Tensor  # float32[tokens] of the text's tokens
    divergence: torch.Tensor  # float32[tokens] Kullback-Leibler divergence from the reference's distribution, in nats
    agrees: torch.Tensor  # bool[tokens] whether the likeliest token is the same


def run_quantization_error(model: str = "default", text: Path = TEXT, tokens: int = 2048, window: int = 1024) -> Report:
    """Perplexity, and divergence from the unquantised model, of each scheme along the same text."""
    report = Report("quantization-error")
    columns = ("weights", "MB", "perplexity", "mean KL, nats", "KL, 99 %", "largest KL", "same choice")
    ids: list[int] = []
    reference: list[torch.Tensor] = []
    rows: list[list[str | float]] = []
    for name, options in _ROUNDINGS.items():
        sizes: dict[str, Any] = {"page_size": PAGE_SIZE, "num_pages": -(-window // PAGE_SIZE)}
        with LLM(model, enforce_eager=True, max_running_requests=1, **{"dtype": "float32", **sizes, **options}) as llm:
            ids = ids or llm.tokenizer.encode(text.read_text(encoding="utf-8"))[:tokens]
            parts = [ids[start : start + window] for start in range(0, len(ids) - 1, window)]
            if not reference:
                reference = [text_logits(llm.engine, part).log_softmax(-1) for part in parts]
            errors = [text_error(llm.engine, part, exact) for part, exact in zip(parts, reference, strict=True)]
            size = llm.engine.model_bytes
        error = TextError(*map(torch.cat, zip(*errors, strict=True)))
        perplexity, divergence = float((-error.logprobs.mean()).exp()), error.divergence
        largest = float(divergence.max())
        tail = float(divergence.quantile(0.99))
        same = f"{float(error.agrees.float().mean()):.1%}"
        rows.append([name, size / 1e6, perplexity, float(divergence.mean()), tail, largest, same])
        del llm
        free_memory()
    report.settings = {"tokens": len(ids)}
    table = report.table(f"{model}, {len(ids)} tokens of text, against {next(iter(_ROUNDINGS))}", *columns)
    table.rows.extend(rows)
    return report


def text_error(engine: Engine, ids: Sequence[int], reference: torch.Tensor) -> TextError:
    """Compare an engine's predictions along ``ids`` with log probabilities, float32[len(ids) - 1, vocab_size]."""
    logprobs = text_logits(engine, ids).log_softmax(-1)
    of_text = logprobs.gather(1, torch.tensor(ids[1:], device=logprobs.device)[:, None]).squeeze(1)
    divergence = (reference.exp() * (reference - logprobs)).sum(-1).clamp_(min=0.0)
    return TextError(of_text, divergence, logprobs.argmax(-1) == reference.argmax(-1))
