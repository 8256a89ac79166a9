"""This engine beside transformers: same weights, prompts, process and threads, taking turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from minisgl.bench.report import Cell, Report, Table, Target
from minisgl.core import SamplingParams
from minisgl.llm import LLM
from minisgl.models.hub import resolve_model

_SUFFIX_LEN = 24
"""Tokens of a question that follows the cached prefix."""

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[list[int]]]
"""Takes prompts of one length and the number of tokens to generate; returns these."""


@dataclass(frozen=True, slots=True)
class CpuWorkload:
    """What is run.

    Args:
        requests: requests that are handed over together.
        input_len: prompt tokens of each; random ids, new ones for every run.
        output_len: tokens that each generates, greedily, past any end of sequence.
        prefix_len: tokens of the cached prefix.
    """

    requests: int = 16
    input_len: int = 128
    output_len: int = 64
    prefix_len: int = 1000


@dataclass(slots=True)
class _Race:
    """Seconds that each engine took, run by run, and how many requests got the same tokens from both."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    agreeing: int = 0

    @property
    def ratio(self) -> float:
        return statistics.median(self.theirs) / statistics.median(self.ours)


def run_cpu(model: str, workload: CpuWorkload, repeat: int) -> Report:
    """Throughput of a batch and of one request against transformers, and what a cached prefix saves.

    Args:
        model: as `minisgl.LLM` takes it.
        workload: sizes.
        repeat: runs of each engine.
    """
    # Chunks whose activations stay in the processor's cache are prefilled a little faster than one large step.
    llm = LLM(model, device="cpu", dtype="float32", max_prefill_tokens=512)
    generate, reference = _minisgl(llm), _transformers(model)
    rng = np.random.default_rng(0)

    def prompts(count: int, length: int) -> Prompts:
        ids: Prompts = rng.integers(llm.model_config.vocab_size, size=(count, length)).tolist()
        return ids

    def race(requests: int) -> _Race:
        return _race(generate, reference, lambda: prompts(requests, workload.input_len), workload.output_len, repeat)

    batch, single = race(workload.requests), race(1)
    cold, warm = _time_to_first_token(llm, prompts, workload.prefix_len, repeat)
    saved = statistics.median(warm) / statistics.median(cold)
    return Report(
        "cpu",
        {"model": model, "repeat": repeat, "dtype": "float32", **asdict(workload)},
        [_throughput(batch, single, workload, repeat), _first_token(cold, warm, workload.prefix_len)],
        [
            Target(f"{workload.requests} requests, × transformers", batch.ratio, 1.5, at_least=True),
            Target("1 request, × transformers", single.ratio, 1.0, at_least=True),
            Target("first token, cached / uncached", saved, 0.2, at_least=False),
        ],
        {
            "batch_seconds": batch.ours,
            "batch_seconds_transformers": batch.theirs,
            "single_seconds": single.ours,
            "single_seconds_transformers": single.theirs,
            "first_token_seconds_uncached": cold,
            "first_token_seconds_cached": warm,
        },
    )


def _throughput(batch: _Race, single: _Race, workload: CpuWorkload, repeat: int) -> Table:
    rows: list[list[Cell]] = []
    for race, requests in ((batch, workload.requests), (single, 1)):
        tokens = requests * workload.output_len
        ours, theirs = (tokens / statistics.median(seconds) for seconds in (race.ours, race.theirs))
        rows.append([requests, ours, theirs, race.ratio, f"{race.agreeing} of {requests * repeat}"])
    title = f"generated tokens/s, {workload.input_len} tokens in, {workload.output_len} out"
    return Table(title, ["requests", "minisgl", "transformers", "ratio", "same output"], rows)


def _first_token(cold: list[float], warm: list[float], prefix_len: int) -> Table:
    uncached, cached = statistics.median(cold), statistics.median(warm)
    title = f"time to first token, {prefix_len} tokens of prefix and {_SUFFIX_LEN} more"
    columns = ["", "prefix uncached, ms", "prefix cached, ms", "cached / uncached"]
    return Table(title, columns, [["minisgl", uncached * 1e3, cached * 1e3, cached / uncached]])


def _race(ours: Generate, theirs: Generate, make_prompts: Callable[[], Prompts], output_len: int, repeat: int) -> _Race:
    """Warm both up, then let them take turns; who begins alternates, so that neither always finds a warmer machine."""
    warm_up = make_prompts()
    for generate in (ours, theirs):
        generate(warm_up, min(4, output_len))
    race = _Race()
    for run in range(repeat):
        prompts = make_prompts()
        outputs = {}
        for generate, seconds in ((ours, race.ours), (theirs, race.theirs))[:: 1 if run % 2 == 0 else -1]:
            start = time.perf_counter()
            outputs[generate] = generate(prompts, output_len)
            seconds.append(time.perf_counter() - start)
            if any(len(tokens) != output_len for tokens in outputs[generate]):
                raise AssertionError("an engine did not generate as many tokens as it was asked for")
        race.agreeing += sum(a == b for a, b in zip(outputs[ours], outputs[theirs], strict=True))
    return race


def _minisgl(llm: LLM) -> Generate:
    def generate(prompts: Prompts, output_len: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=output_len, min_tokens=output_len, temperature=0.0)
        return [output.token_ids for output in llm.generate(prompts, params)]

    return generate


def _transformers(model: str) -> Generate:
    """`generate` with its defaults: contiguous KV cache, scaled dot-product attention, no padding needed."""
    from transformers import AutoModelForCausalLM

    hf: Any = AutoModelForCausalLM.from_pretrained(resolve_model(model), dtype=torch.float32).eval()

    @torch.inference_mode()
    def generate(prompts: Prompts, output_len: int) -> list[list[int]]:
        input_ids = torch.tensor(prompts)
        tokens = hf.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            min_new_tokens=output_len,
            max_new_tokens=output_len,
            pad_token_id=0,
        )
        generated: list[list[int]] = tokens[:, input_ids.shape[1] :].tolist()
        return generated

    return generate


def _time_to_first_token(
    llm: LLM, make_prompts: Callable[[int, int], Prompts], prefix_len: int, repeat: int
) -> tuple[list[float], list[float]]:
    """Seconds to the first token of a prompt that nobody has seen, and of one that shares its prefix."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    uncached: list[float] = []
    cached: list[float] = []
    for _ in range(repeat):
        [prefix] = make_prompts(1, prefix_len)
        for seconds, least_cached in ((uncached, 0), (cached, prefix_len - llm.config.page_size)):
            [question] = make_prompts(1, _SUFFIX_LEN)
            [output] = llm.generate([prefix + question], params)
            if (output.cached_tokens > 0) != (seconds is cached) or output.cached_tokens < least_cached:
                raise AssertionError(f"{output.cached_tokens} prompt tokens came from the prefix cache")
            seconds.append(output.metrics.ttft)
    return uncached, cached
