"""Tokens a second after each chapter of the book, from a naive loop to the whole engine, over the same chats."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minisgl.bench.report import Report
from minisgl.bench.workloads import ALL_OFF, Prompts, free_memory, make_engine
from minisgl.book import toy
from minisgl.sampling_params import SamplingParams

STAGES: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (1, "a loop that computes the whole text anew for each token", {}),
    (1, "the loop with a KV cache", {}),
    (5, "the engine, one request at a time", {"max_running_requests": 1, "prefix_cache": "none"}),
    (6, "+ prefix cache", {"prefix_cache": "radix"}),
    (8, "+ continuous batching", {"max_running_requests": 16}),
    (10, "+ attention backend for the device", {"prefill_attention": "auto", "decode_attention": "auto"}),
    (11, "+ CUDA graphs", {"enforce_eager": False}),
    (12, "+ fused kernels", {"fusions": None, "sampler": "auto"}),
    (13, "+ overlap", {"overlap": True}),
    (19, "+ weights in 8 bits: int8 on a CPU, fp8 on a GPU", {"quantization": "int8"}),
)
"""Chapter, what it adds, and the options that switch it on; the first two are the reader's own loops, on a CPU."""
_ON_CUDA_ALONE = (10, 11, 12)
_SYSTEM = (
    "You are the assistant of a small library. Answer in one short paragraph, in plain words, and name a book that the "
    "reader could borrow next. If you do not know an answer, say so and name the desk that does. Be kind, be brief, "
    "and do not repeat the question. The library is open from nine to six, and closed on Mondays."
)
_TOPICS = "rivers bread stars bees maps glass trains salt music ice paper whales clocks tea bridges volcanoes"
CHATS = [
    [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": f"What should I read about {topic}?"}]
    for topic in _TOPICS.split(" ")
]
_COUNT = 32
_LOOP_CHATS = 1  # a loop takes one chat after the other, so of one it makes as many tokens a second as of all


def run_scoreboard(models: Sequence[str] = ("default",), repeat: int = 3) -> Report:
    """Output tokens a second of 16 chats with one system prompt, 32 tokens each, with one chapter after another."""
    on_cuda = torch.cuda.is_available()
    _, tokenizer = toy.load_default()
    prompts = [tokenizer.encode_chat(chat) for chat in CHATS]
    settings = {"chats": len(CHATS), "output_len": _COUNT, "input_len": sum(map(len, prompts)) / len(prompts)}
    report = Report("scoreboard", settings)
    for model in models:
        table = report.table(f"{model}, output tokens/s", "chapter", "", "median", "least", "most")
        options = {**ALL_OFF, "prefill_attention": "torch", "decode_attention": "torch"}
        for place, (chapter, label, added) in enumerate(STAGES):
            options |= {"quantization": "fp8"} if on_cuda and chapter == 19 else added
            if (not added and (on_cuda or model != "default")) or (chapter in _ON_CUDA_ALONE and not on_cuda):
                continue
            speeds = _engine(model, options, prompts, repeat) if added else _loop(place, prompts, repeat)
            free_memory()
            report.samples[f"{model}: {label}"] = speeds
            table.add(chapter, label, statistics.median(speeds), min(speeds), max(speeds))
    return report


def _loop(place: int, prompts: Prompts, repeat: int) -> list[float]:
    model, _ = toy.load_default()
    generate = (toy.generate_naively, toy.generate)[place]
    return _speeds(lambda some: sum(len(generate(model, each, _COUNT)) for each in some), prompts[:_LOOP_CHATS], repeat)


def _engine(model: str, options: dict[str, Any], prompts: Prompts, repeat: int) -> list[float]:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=_COUNT)
    with make_engine(model, {**options, "max_seq_len": 2048}) as llm:
        return _speeds(lambda some: sum(len(each.token_ids) for each in llm.generate(some, params)), prompts, repeat)


def _speeds(generate: Callable[[Prompts], int], prompts: Prompts, repeat: int) -> list[float]:
    """Tokens a second of each run. A prefix cache keeps nothing from one to the next: the prompts begin differently."""
    speeds = []
    for run in range(repeat):
        some = [[prompt[0], 1000 + run, *prompt[1:]] for prompt in prompts]
        start = time.perf_counter()
        speeds.append(generate(some) / (time.perf_counter() - start))
    return speeds
