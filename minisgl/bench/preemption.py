"""What it costs when memory runs out: reservation against optimism, and to compute keys again against copying them.

A conversation that returns finds its pages in host memory, if there is a page store; else it is computed again, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from minisgl.bench.gpu import milliseconds, synchronize
from minisgl.bench.report import Cell, Report
from minisgl.bench.workloads import FOR_ONE_GPU, WORKLOADS, make_engine
from minisgl.kvcache.prefix import select_prefix_cache
from minisgl.llm import LLM
from minisgl.request import FinishReason
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.loop import EngineLoop
from minisgl.scheduler.memory import KVMemory
from minisgl.scheduler.policy import Policies
from minisgl.scheduler.scheduler import Scheduler
from minisgl.table import RunningTable

_REPEATS = 5
_ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)
_FASTER = 4.0  # times that the longest conversation should come back from host memory faster than it is computed

CASES = {
    "reserve": ("reserve", "radix", False),
    "reserve, every length known": ("reserve", "radix", True),
    "optimistic": ("optimistic", "radix", False),
    "optimistic, no prefix cache": ("optimistic", "none", False),
}
"""Admission policy, prefix cache, and whether ``max_tokens`` is the length of the answer, as no real server knows."""


def run_preemption(
    models: Sequence[str] = FOR_ONE_GPU,
    pool_tokens: int = 65536,
    lengths: Sequence[int] = (512, 2048, 8192),
    requests: int = 128,
    options: Mapping[str, Any] = {},
) -> Report:
    """The first model under memory pressure; and for all, what it takes to bring a request's keys and values back."""
    report = Report("preemption", {"workload": WORKLOADS["mixed"].summary})
    columns = ["admission", "output tokens/s", "rows of a decode step, mean", "preemptions", "tokens computed again"]
    columns += ["first token, median s", "longest pause, s"]
    copies = ["copied back piece by piece, ms", "in one copy, ms", "copied out in one copy, ms"]
    pressure = report.table(f"{models[0]}, {requests} requests in memory for {pool_tokens:,} tokens", *columns)
    page_size = options.get("page_size", 16)
    sizes = {"num_pages": pool_tokens // page_size, "max_running_requests": min(requests, 128)}
    with make_engine(models[0], {**sizes, **options}) as llm:
        work = list(zip(*WORKLOADS["mixed"].requests(0, llm.model_config.vocab_size), strict=True))[:requests]
        _compete(llm, work[: requests // 8 + 1], "optimistic", "none", False)  # compiles what is left to compile
        for label, case in CASES.items():
            pressure.add(label, *_compete(llm, work, *case))
    back = report.table("bringing a request back", "model", "tokens", "MB", "computed again, ms", *copies)
    longest = max(lengths) + 64
    sizes = {"num_pages": 2 * longest // page_size, "max_seq_len": longest, "max_running_requests": 4}
    for model in models:
        with make_engine(model, {"prefix_cache": "none", "enforce_eager": True, **sizes, **options}) as llm:
            for length in lengths:
                rng, size = np.random.default_rng(length), length / page_size * llm.engine.page_bytes / 1e6
                prompts = rng.integers(llm.model_config.vocab_size, size=(_REPEATS + 1, length)).tolist()
                prefills = (partial(llm.generate, [prompt], _ONE_TOKEN) for prompt in prompts)
                computed = milliseconds(prefills, llm.engine.device)
                back.add(model, length, size, computed, *_copying(llm, length))
    return report


def _compete(
    llm: LLM, work: Sequence[tuple[list[int], SamplingParams]], admission: str, prefix_cache: str, knows: bool
) -> list[Cell]:
    """Serve all requests, which arrive at once, with an empty memory and this admission policy."""
    table = RunningTable(llm.config.max_running_requests, llm.max_seq_len)
    cache = select_prefix_cache(prefix_cache)(llm.config.page_size)
    memory, policies = KVMemory(llm.engine.num_pages, table, cache), Policies.named(admission_policy=admission)
    llm.scheduler = Scheduler(table, memory, policies, llm.config.max_prefill_tokens)
    llm.loop = EngineLoop(llm.scheduler, llm.engine, llm.loop.depth)
    most = max(params.max_tokens or 0 for _, params in work)
    asked = [(prompt, params if knows else replace(params, max_tokens=most)) for prompt, params in work]
    requests = [llm.prepare(*each, streaming=True)[0].request for each in asked]
    wanted = {request.uid: params.max_tokens or 0 for request, (_, params) in zip(requests, work, strict=True)}
    times: dict[int, list[float]] = {uid: [] for uid in wanted}
    decoded: list[int] = []
    scheduler, fed = llm.scheduler, 0
    start = time.perf_counter()
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        output = llm.loop.step()
        now = time.perf_counter()
        for event in output.events:
            uid = event.request.uid
            times[uid].append(now)
            if len(times[uid]) == wanted[uid]:  # the answer is complete, as if a stop string had come
                scheduler.finish(uid, FinishReason.STOP)
        fed += output.prefill_tokens
        decoded += [output.decode_tokens] * (output.decode_tokens > 0)
    seconds = time.perf_counter() - start
    if {uid: len(stamps) for uid, stamps in times.items()} != wanted:
        raise AssertionError("a request did not get as many tokens as it wanted")
    return [
        sum(wanted.values()) / seconds,
        statistics.mean(decoded),
        sum(request.preemptions for request in requests),
        fed - sum(request.prompt_len for request in requests),
        statistics.median(stamps[0] - start for stamps in times.values()),
        float(max(np.diff(stamps, prepend=stamps[0]).max() for stamps in times.values())),
    ]


def _copying(llm: LLM, length: int) -> list[float]:
    """Milliseconds to copy the pages of so many tokens: in by pieces, in at once, out at once.

    A page is not contiguous: it has a place in the keys and one in the values of every layer. *At once* goes through a
    buffer on the device, from which the pieces are scattered, or into which they are gathered.
    """
    cache, device = llm.engine.kv_cache, llm.engine.device
    count = length // cache.page_size
    order = torch.randperm(cache.num_pages, generator=torch.Generator().manual_seed(0))[:count]
    pages, places = order.tolist(), order.to(device)
    layers, _, *page = cache.k.shape
    host = torch.zeros((2, layers, count, *page), dtype=cache.k.dtype, pin_memory=device.type == "cuda")
    buffer = host.to(device)

    def pieces() -> None:
        for half, tensor in enumerate((cache.k, cache.v)):
            for layer in range(layers):
                for index, place in enumerate(pages):
                    tensor[layer, place].copy_(host[half, layer, index], non_blocking=True)

    def copy_in() -> None:
        buffer.copy_(host, non_blocking=True)
        cache.k.index_copy_(1, places, buffer[0])
        cache.v.index_copy_(1, places, buffer[1])

    def copy_out() -> None:
        torch.index_select(cache.k, 1, places, out=buffer[0])
        torch.index_select(cache.v, 1, places, out=buffer[1])
        host.copy_(buffer, non_blocking=True)

    return [milliseconds([copy] * (_REPEATS + 1), device) for copy in (pieces, copy_in, copy_out)]


def run_page_store(
    models: Sequence[str] = ("Qwen3-0.6B", "Qwen3-14B"),
    lengths: Sequence[int] = (512, 2000, 8000),
    repeat: int = 5,
    options: Mapping[str, Any] = {},
) -> Report:
    """Time to the first token of a prompt that is new, that is in host memory, and that has to evict another as well.

    The pool holds one conversation and a quarter. Nothing else runs, so no copy hides behind another request's step:
    a server sees less of them than this.
    """
    report = Report("page-store")
    names = ("computed, ms", "copied out, ms", "copied back, ms", "and another out, ms")
    ratio_names = ("computed / copied back", "computed / with another out", "least", "most")
    title = "a conversation that returns to an idle engine, medians"
    table = report.table(title, "model", "tokens", "GB", *names, *ratio_names)
    for model in models:
        for length in lengths:
            page_size = options.get("page_size", 16)
            sizes = {"num_pages": 5 * length // (4 * page_size) + 2, "max_seq_len": max(length + 1, 128)}
            with make_engine(model, {**sizes, "max_running_requests": 4, "page_store": "host", **options}) as llm:
                rng = np.random.default_rng(length)
                runs = [_come_back(llm, rng, length) for _ in range(repeat + 1)][1:]  # the first compiles what is left
                size = length // page_size * llm.engine.page_bytes / 1e9
            columns = list(zip(*runs, strict=True))
            for name, column in zip(names, columns, strict=True):
                report.samples[f"{model}, {length} tokens, {name}"] = list(column)
            computed, out, back, both = map(statistics.median, columns)
            ratios = [run[0] / run[3] for run in runs]  # the last column but two is of the medians
            quotients = (computed / back, computed / both, min(ratios), max(ratios))
            table.add(model, length, size, computed, out, back, both, *quotients)
        name = f"{model}, {length} tokens: times as fast as computed, and another out"
        report.target(name, computed / both, _FASTER, at_least=True)
    return report


def _come_back(llm: LLM, rng: np.random.Generator, length: int) -> tuple[float, float, float, float]:
    """Milliseconds: computed, copied out, copied back, copied back while another is copied out."""
    wanted, other = rng.integers(llm.model_config.vocab_size, size=(2, length)).tolist()
    evict_all(llm)
    computed = _milliseconds(llm, wanted, cached=0)
    out = evict_all(llm)
    whole = (length - 1) // llm.config.page_size * llm.config.page_size
    back = _milliseconds(llm, wanted, cached=whole)
    evict_all(llm)
    _milliseconds(llm, other, cached=0)
    return computed, out, back, _milliseconds(llm, wanted, cached=whole)


def _milliseconds(llm: LLM, prompt: list[int], cached: int) -> float:
    """Time to the first token of a prompt, of which so many tokens have to be in the cache or the store."""
    start = time.perf_counter()
    (output,) = llm.generate([prompt], _ONE_TOKEN)
    taken = 1e3 * (time.perf_counter() - start)
    if output.cached_tokens != cached:
        raise AssertionError(f"{output.cached_tokens} of {len(prompt)} tokens were found, not {cached}")
    return taken


def evict_all(llm: LLM) -> float:
    """Empty the prefix cache of what no request reads, as if others had wanted all pages.

    Returns milliseconds until all copies are made.
    """
    memory, device = llm.scheduler.memory, llm.engine.device
    synchronize(device)
    start = time.perf_counter()
    memory.pool.free(memory.alloc(memory.available))
    synchronize(device)
    return 1e3 * (time.perf_counter() - start)
