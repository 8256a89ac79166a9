"""Fewer bits: tokens a second and bytes for each scheme of weights, and what rounding costs in precision on a text."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from minisgl.batch import batch_arrays, build_batch, device_batch, to_device
from minisgl.bench import gpu
from minisgl.bench.report import Report, spread
from minisgl.bench.workloads import NAMES, WORKLOADS, make_engine, workload_values
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
_TEXT = Path("chapters", "04-paged-kv.md")
_PAGE_SIZE = 16
Roundings = Mapping[str, Mapping[str, Any]]
"""Options of engines that differ only in how they round, by name; the first is the reference of the others."""
_OF_WEIGHTS: Roundings = {
    "float32": {"quantization": "none"},
    "bfloat16": {"quantization": "none", "dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "fp8": {"quantization": "fp8"},
    "int4-zero-point": {"quantization": "int4-zero-point"},
    "int4": {"quantization": "int4"},
    "float32, KV in fp8": {"quantization": "none", "kv_dtype": "fp8"},
    "int8, KV in fp8": {"quantization": "int8", "kv_dtype": "fp8"},
}
_OF_KEYS: Roundings = {
    "float32": {},
    "float32, KV in fp8": {"kv_dtype": "fp8"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, KV in fp8": {"dtype": "bfloat16", "kv_dtype": "fp8"},
}
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
                workload, unit = WORKLOADS[name], f"{name}, {WORKLOADS[name].unit}"
                values = report.samples[f"{scheme} {unit}"] = workload_values(llm, workload, repeat)
                table.add(scheme, size / 1e9, size / bandwidth * 1e3, unit, *spread(values))
                goal = _TARGETS.get((model, scheme, name))
                if name == "mixed" and scheme == "int4" and (plain := report.samples.get(f"none {unit}")):
                    goal = statistics.median(plain)  # not below bfloat16
                if goal is not None:
                    median = statistics.median(values)
                    report.target(f"{model} {scheme} {unit}", median, goal, workload.more_is_better)


def _on_cpu(report: Report, model: str, schemes: Sequence[str], repeat: int, input_len: int, output_len: int) -> None:
    """Schemes take turns, because other work on the machine slows all of them."""
    sizes: dict[str, Any] = {"num_pages": 64, "max_seq_len": input_len + output_len, "max_running_requests": 1}
    how: dict[str, Any] = {"device": "cpu", "dtype": "float32", "prefix_cache": "none", **sizes}
    engines = {name: LLM(model, quantization=name, **how) for name in schemes}
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
        size, speed = llm.engine.model_bytes, spread(speeds[name])
        if reference is None:
            table.add(name, *speed, "–", size / 1e6, "–")
            continue
        # Of turns that follow one another, so that what slows both cancels.
        ratio = statistics.median(ours / plain for ours, plain in zip(speeds[name], speeds["none"], strict=True))
        memory = size / reference.engine.model_bytes
        table.add(name, *speed, ratio, size / 1e6, memory)
        if name == "int8":
            report.target("int8, tokens/s × float32", ratio, _CPU_TARGETS["speed"], at_least=True)
            report.target("int8, weights × float32", memory, _CPU_TARGETS["memory"], at_least=False)
    for llm in engines.values():
        llm.close()


def _prompt(count: int) -> list[list[int]]:
    return [list(range(1000, 1000 + count))]


class TextScores(NamedTuple):
    """What a model predicts along a text."""

    logprobs: torch.Tensor  # float32[tokens] of each next token of the text
    argmax: torch.Tensor  # int64[tokens] the token that the model would have chosen in its place
    divergence: torch.Tensor  # float32[tokens] Kullback-Leibler divergence from the reference's distribution, in nats
    largest: torch.Tensor  # float32[1, 2] absolute value among the keys, and among the values

    @property
    def perplexity(self) -> float:
        return float((-self.logprobs.mean()).exp())

    def same_choice(self, reference: TextScores) -> str:
        """The share of tokens for which both would have chosen the same, in percent."""
        return f"{float((self.argmax == reference.argmax).float().mean()):.1%}"


def run_quantization_error(
    model: str = "default", text: Path = _TEXT, tokens: int = 2048, window: int = 1024
) -> Report:
    """Perplexity, and divergence from the unquantised model, of each scheme along the same text."""
    scores, sizes, count = _score_all(model, _OF_WEIGHTS, text, tokens, window)
    report, reference = Report("quantization-error", {"tokens": count}), scores["float32"]
    columns = ("weights", "MB", "perplexity", "mean KL, nats", "KL, 99 %", "largest KL", "same choice")
    table = report.table(f"{model}, {count} tokens of text, against float32", *columns)
    for name, each in scores.items():
        far = each.divergence
        divergence = (float(far.mean()), float(far.quantile(0.99)), float(far.max()))
        table.add(name, sizes[name] / 1e6, each.perplexity, *divergence, each.same_choice(reference))
    return report


def run_fp8_error(model: str = "default", text: Path = _TEXT, tokens: int = 2048, window: int = 1024) -> Report:
    """Compare the predictions of engines whose keys and values are rounded differently, along the same text."""
    scores, _, count = _score_all(model, _OF_KEYS, text, tokens, window)
    report, reference = Report("fp8-error", {"tokens": count}), scores["float32"]
    title = f"{model}, {len(reference.logprobs)} tokens of text: logprob of each, against the first line"
    columns = ("computed in", "perplexity", "mean difference", "largest difference", "same choice")
    table = report.table(title, *columns, "largest k", "and v")
    for name, each in scores.items():
        far = (each.logprobs - reference.logprobs).abs()
        largest = each.largest.amax(0).tolist()
        table.add(name, each.perplexity, float(far.mean()), float(far.max()), each.same_choice(reference), *largest)
    return report


def _score_all(
    model: str, roundings: Roundings, text: Path, tokens: int, window: int
) -> tuple[dict[str, TextScores], dict[str, int], int]:
    """Scores and bytes of the weights of each engine, and how many tokens of the text they read, a window at a time.

    All attention reads what is stored, so one pass over a text shows the error that decoding it would have.

    Raises `ConfigError` if there is no text, or no token with another before it, or a window is too long for the model.
    """
    for option, value in (("tokens", tokens), ("window", window)):
        if value < 2:
            raise ConfigError(f"{option}: must be at least 2, as a token is predicted from one before it, got {value}")
    try:
        words = text.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"text: {text} cannot be read ({error}); give a file in UTF-8") from error
    scores, sizes, exact = dict[str, TextScores](), dict[str, int](), list[torch.Tensor]()
    how: dict[str, Any] = {"dtype": "float32", "page_size": _PAGE_SIZE, "num_pages": -(-window // _PAGE_SIZE)}
    how |= {"enforce_eager": True, "max_running_requests": 1}
    for name, options in roundings.items():
        with LLM(model, **{**how, **options}) as llm:
            ids = llm.tokenizer.encode(words)[:tokens]
            if len(ids) < 2:
                raise ConfigError(f"text: {text} is too short: {len(ids)} of at least 2 tokens")
            if (longest := min(window, len(ids))) > llm.max_seq_len:
                raise ConfigError(f"window: {longest} tokens, and {model} reads at most {llm.max_seq_len}; lower it")
            parts = [ids[start : start + window] for start in range(0, len(ids) - 1, window)]
            exact = exact or [text_logits(llm.engine, part).log_softmax(-1) for part in parts]
            found = [score_text(llm.engine, part, of_part) for part, of_part in zip(parts, exact, strict=True)]
            scores[name] = TextScores(*map(torch.cat, zip(*found, strict=True)))
            sizes[name] = llm.engine.model_bytes
    return scores, sizes, len(ids)


@torch.inference_mode()
def score_text(engine: Engine, ids: Sequence[int], reference: torch.Tensor) -> TextScores:
    """Feed all of ``ids`` but the last as one prompt, over the first pages of an idle engine.

    ``reference`` has the log probabilities to compare with, float32[len(ids) - 1, vocab_size].
    """
    logprobs, count, kv_cache = text_logits(engine, ids).log_softmax(-1), len(ids) - 1, engine.kv_cache
    of_text = logprobs.gather(1, torch.tensor(ids[1:], device=logprobs.device)[:, None]).squeeze(1)
    divergence = (reference.exp() * (reference - logprobs)).sum(-1).clamp_(min=0.0)
    pages = -(-count // kv_cache.page_size)
    written = [memory[:, :pages].flatten(1, 2)[:, :count] for memory in (kv_cache.k, kv_cache.v)]
    largest = torch.stack([memory.float().abs().max() for memory in written])
    return TextScores(of_text, logprobs.argmax(-1), divergence, largest[None])


@torch.inference_mode()
def text_logits(engine: Engine, ids: Sequence[int]) -> torch.Tensor:
    """What follows each of ``ids`` but the last, fed as one prompt over the first pages of an idle engine: float32."""
    runner, count = engine.runner, len(ids) - 1
    page_size = runner.kv_cache.page_size
    pages = np.arange(-(-count // page_size), dtype=np.int32)[None]
    zero = np.zeros(1, dtype=np.int32)
    batch = build_batch(zero, np.array([count], dtype=np.int32), zero, pages, page_size, zero, zero, num_decode=0)
    tokens = torch.tensor(ids, dtype=torch.int32, device=runner.device)
    staged = to_device(batch_arrays(batch), runner.device)
    inputs = device_batch(staged, tokens[:-1], torch.from_numpy(pages).to(runner.device))
    inputs = replace(inputs, logit_rows=torch.arange(count, dtype=torch.int32, device=runner.device))
    runner.attention.plan(batch, inputs)
    return runner.forward(inputs).float()
