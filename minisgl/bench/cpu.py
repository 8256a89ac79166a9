"""This engine against transformers: same weights, prompts, process and threads, taking turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from minisgl.bench.report import Cell, Report, Table, Target
from minisgl.llm import LLM
from minisgl.models.hub import resolve_model
from minisgl.sampling_params import SamplingParams

_SUFFIX_LEN = 24  # tokens of a question that follows the cached prefix

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[list[int]]]
"""Prompts of one length and the number of tokens to generate; returns these."""


def run_cpu(
    model: str = "default",
    repeat: int = 3,
    requests: int = 16,
    input_len: int = 128,
    output_len: int = 64,
    prefix_len: int = 1000,
) -> Report:
    """Throughput of a batch and of one request against transformers, and what a cached prefix saves."""
    # Chunks whose activations stay in the processor's cache are prefilled a little faster than one large step.
    llm = LLM(model, device="cpu", dtype="float32", max_prefill_tokens=512)
    ours, theirs = _minisgl(llm), _transformers(model)
    rng = np.random.default_rng(0)

    def prompts(count: int, length: int) -> Prompts:
        ids: Prompts = rng.integers(llm.model_config.vocab_size, size=(count, length)).tolist()
        return ids

    rows: list[list[Cell]] = []
    samples: dict[str, list[float]] = {}
    for name, count in (("batch", requests), ("single", 1)):
        seconds, agreeing = _race(ours, theirs, partial(prompts, count, input_len), output_len, repeat)
        samples |= {f"{name}_seconds": seconds[0], f"{name}_seconds_transformers": seconds[1]}
        speeds = [count * output_len / statistics.median(each) for each in seconds]
        rows.append([count, *speeds, speeds[0] / speeds[1], f"{agreeing} of {count * repeat}"])
    cold, warm = _time_to_first_token(llm, prompts, prefix_len, repeat)
    samples |= {"first_token_seconds_uncached": cold, "first_token_seconds_cached": warm}
    uncached, cached = statistics.median(cold), statistics.median(warm)
    first_token: list[list[Cell]] = [["minisgl", uncached * 1e3, cached * 1e3, cached / uncached]]
    return Report(
        "cpu",
        {"dtype": "float32"},
        [
            Table(
                f"generated tokens/s, {input_len} tokens in, {output_len} out",
                ["requests", "minisgl", "transformers", "ratio", "same output"],
                rows,
            ),
            Table(
                f"time to first token, {prefix_len} tokens of prefix and {_SUFFIX_LEN} more",
                ["", "prefix uncached, ms", "prefix cached, ms", "cached / uncached"],
                first_token,
            ),
        ],
        [
            Target(f"{requests} requests, × transformers", float(rows[0][3]), 1.5, at_least=True),
            Target("1 request, × transformers", float(rows[1][3]), 1.0, at_least=True),
            Target("first token, cached / uncached", cached / uncached, 0.2, at_least=False),
        ],
        samples,
    )


def _race(
    ours: Generate, theirs: Generate, make_prompts: Callable[[], Prompts], output_len: int, repeat: int
) -> tuple[tuple[list[float], list[float]], int]:
    """Seconds of each engine's runs, and how many requests got the same tokens from both.

    Which engine begins alternates, so that neither always finds a warmer machine.
    """
    warm_up = make_prompts()
    for generate in (ours, theirs):
        generate(warm_up, min(4, output_len))
    seconds: tuple[list[float], list[float]] = ([], [])
    agreeing = 0
    for run in range(repeat):
        prompts = make_prompts()
        outputs = {}
        for generate, times in ((ours, seconds[0]), (theirs, seconds[1]))[:: 1 if run % 2 == 0 else -1]:
            start = time.perf_counter()
            outputs[generate] = generate(prompts, output_len)
            times.append(time.perf_counter() - start)
            if any(len(tokens) != output_len for tokens in outputs[generate]):
                raise AssertionError("an engine did not generate as many tokens as it was asked for")
        agreeing += sum(a == b for a, b in zip(outputs[ours], outputs[theirs], strict=True))
    return seconds, agreeing


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
        ids = torch.tensor(prompts)
        lengths = {"min_new_tokens": output_len, "max_new_tokens": output_len}
        tokens = hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **lengths)
        generated: list[list[int]] = tokens[:, ids.shape[1] :].tolist()
        return generated

    return generate


def _time_to_first_token(
    llm: LLM, make_prompts: Callable[[int, int], Prompts], prefix_len: int, repeat: int
) -> tuple[list[float], list[float]]:
    """Seconds to the first token of a new prompt, and of one whose prefix is cached."""
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
