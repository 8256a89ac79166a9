"""Whole workloads on one device: how fast, beside other engines and simpler loops, and what each optimisation buys."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from minisgl.bench.report import Report, spread
from minisgl.llm import LLM
from minisgl.models.hub import resolve_model
from minisgl.sampling_params import SamplingParams

_HIGHEST_TOKEN = 10_000
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960, "rope_theta": 1_000_000,
    "torch_dtype": "bfloat16", "vocab_size": 151936, "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
_TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "head_dim": 8, "num_key_value_heads": 2, "max_position_embeddings": 131072, "rope_theta": 10000.0,
    "torch_dtype": "float32", "vocab_size": 512, "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "tie_word_embeddings")
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {**_QWEN3, **dict(zip(_SIZES, (1024, 3072, 16, 28, True), strict=True))},
    "Qwen3-14B": {**_QWEN3, **dict(zip(_SIZES, (5120, 17408, 40, 40, False), strict=True))},
    "Qwen3-32B": {**_QWEN3, **dict(zip(_SIZES, (5120, 25600, 64, 64, False), strict=True))},
    "tiny": {**_TINY, **dict(zip(_SIZES, (32, 48, 4, 2, False), strict=True))},
}
"""``config.json`` of models with random weights, by the name of the checkpoint whose sizes they have."""
FOR_ONE_GPU = ["Qwen3-0.6B", "Qwen3-14B"]

TARGETS: dict[tuple[str, str], float] = {
    ("Qwen3-0.6B", "mixed"): 28_500,
    ("Qwen3-0.6B", "bs1"): 0.48,
    ("Qwen3-0.6B", "prefix"): 0.27,
    ("Qwen3-0.6B", "refill"): 26_000,
    ("Qwen3-0.6B", "refill-32"): 14_500,
    ("Qwen3-14B", "mixed"): 6_600,
    ("Qwen3-14B", "bs1"): 7.2,
}
"""On one H200 in bfloat16, in the workload's unit."""
_START_TARGETS = {"cached": 12.0, "cold": 25.0}
ALL_OFF: dict[str, Any] = {
    "prefill_attention": "triton",
    "decode_attention": "triton",
    "enforce_eager": True,
    "fusions": (),
    "sampler": "default",
    "overlap": False,
}
LADDER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("paged attention kernels, all else plain PyTorch", {}),
    ("+ CUDA graphs", {"enforce_eager": False}),
    ("+ fused norm, rope and activation", {"fusions": ("norm", "rope", "activation")}),
    ("+ fused sampler", {"sampler": "triton"}),
    ("+ single-token decoder", {"fusions": ("norm", "rope", "activation", "single-token")}),
    ("+ its layers in one kernel", {"fusions": ("norm", "rope", "activation", "single-token", "persistent")}),
    ("+ overlap", {"overlap": True}),
    ("+ shared prefixes read once", {"prefill_attention": "cascade", "decode_attention": "cascade"}),
)
"""Each line adds its options to `ALL_OFF` and those of the lines above."""
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
"""Chapter, what it adds, and the options that switch it on; the first two are the reader's own loops."""
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
_REFERENCE = Path("benchmarks", "reference", "h200.json")
_SUFFIX_LEN = 24  # tokens of a question that follows the cached prefix

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[list[int]]]  # from prompts of one length and the number of tokens to generate


class Workload(NamedTuple):
    """A set of requests that arrive at once. Lengths are in tokens, the least and the most."""

    summary: str  # what it is, in a line
    unit: str  # of `Run.value`
    num_requests: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    temperature: float = 0.0
    shared: int = 0  # tokens that all prompts begin with, before their own
    options: Mapping[str, Any] = {}  # of the engine that it needs

    @property
    def more_is_better(self) -> bool:
        """About `Run.value`."""
        return self.unit == _SPEED

    def requests(self, seed: int, vocab_size: int) -> tuple[Prompts, list[SamplingParams]]:
        """Prompts and parameters; another seed gives other tokens and other lengths."""
        rng = random.Random(seed)
        head = _tokens(rng, self.shared, vocab_size)
        prompts = [head + _tokens(rng, _length(rng, *self.input_len), vocab_size) for _ in range(self.num_requests)]
        return prompts, [_params(self.temperature, _length(rng, *self.output_len)) for _ in prompts]


def _length(rng: random.Random, least: int, most: int) -> int:
    return least if least == most else rng.randint(least, most)


def _tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randint(0, min(_HIGHEST_TOKEN, vocab_size - 1)) for _ in range(count)]


def _params(temperature: float, max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=max_tokens)


class Run(NamedTuple):
    """One run: seconds to the last token, tokens generated in all, and tokens of the longest output."""

    seconds: float
    output_tokens: int
    steps: int

    def value(self, workload: Workload) -> float:
        """The number that counts for this workload, in its unit."""
        ms = 1e3 * self.seconds
        by_unit = {_SPEED: self.output_tokens / self.seconds, "ms/token": ms / self.steps, "ms": ms}
        return by_unit.get(workload.unit, self.seconds)


_SPEED = "output tokens/s"
_MIXED = ((100, 1024), (100, 1024), 0.6)
WORKLOADS = {
    "mixed": Workload("256 requests, 100 to 1,024 tokens in and out, temperature 0.6", _SPEED, 256, *_MIXED),
    "bs1": Workload("one request, 128 tokens in and 512 out, greedy", "ms/token", 1, (128, 128), (512, 512)),
    "prefix": Workload(
        "256 requests, 2,048 shared tokens and 32 own in, 64 out, greedy", "s", 256, (32, 32), (64, 64), shared=2048
    ),
    "refill": Workload("512 requests as in mixed, at most 256 running", _SPEED, 512, *_MIXED),
    "refill-32": Workload(
        "96 requests as in mixed, at most 32 running", _SPEED, 96, *_MIXED, options={"max_running_requests": 32}
    ),
    "ttft": Workload("one request, 512 tokens in and 1 out, greedy", "ms", 1, (512, 512), (1, 1)),
}
NAMES = ("mixed", "bs1", "prefix")  # of those that start all at once and need no option


def model_dir(name: str, root: Path) -> str:
    """The directory of a model: a shape of `SHAPES` is written under ``root``, any other name is returned unchanged."""
    if name not in SHAPES:
        return name
    path = root / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPES[name]), encoding="utf-8")
    return str(path)


def make_engine(model: str, options: Mapping[str, Any]) -> LLM:
    """An engine that has run once: sequences of up to 4,096 tokens, and random weights for a shape of `SHAPES`."""
    dummy = {"load_format": "dummy"} if model in SHAPES else {}
    with tempfile.TemporaryDirectory() as root:
        llm = LLM(model_dir(model, Path(root)), **{"max_seq_len": 4096, **dummy, **options})
    rng, vocab_size = random.Random(9), llm.model_config.vocab_size
    for temperature in (0.6, 0.0):
        llm.generate([_tokens(rng, 64, vocab_size)], [_params(temperature, 8)])
    return llm


def run_workload(llm: LLM, workload: Workload, seed: int) -> Run:
    """Run a workload once, and assert that each request got as many tokens as it asked for."""
    prompts, params = workload.requests(seed, llm.model_config.vocab_size)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    wanted = [each.max_tokens or 0 for each in params]
    if [len(output.token_ids) for output in outputs] != wanted:
        raise AssertionError("a request did not get as many tokens as it asked for")
    return Run(seconds, sum(wanted), max(wanted))


def measure_workloads(
    model: str, options: Mapping[str, Any], names: Sequence[str], repeat: int
) -> dict[str, list[float]]:
    """Values of ``repeat`` runs of each workload, on engines of their own that are gone afterwards."""
    values: dict[str, list[float]] = {}
    for needed in (dict(items) for items in {tuple(WORKLOADS[name].options.items()): None for name in names}):
        with make_engine(model, {**needed, **options}) as llm:
            for name in (name for name in names if WORKLOADS[name].options == needed):
                values[name] = workload_values(llm, WORKLOADS[name], repeat)
    return {name: values[name] for name in names}


def workload_values(llm: LLM, workload: Workload, repeat: int) -> list[float]:
    """What counts of each of ``repeat`` runs, with other seeds."""
    return [run_workload(llm, workload, seed).value(workload) for seed in range(repeat)]


def run_offline(
    models: Sequence[str] = FOR_ONE_GPU,
    workloads: Sequence[str] = tuple(WORKLOADS),
    repeat: int = 3,
    options: Mapping[str, Any] = {},
    start: bool = False,
) -> Report:
    """Every workload on every model."""
    report = Report("offline", {"workloads": {name: WORKLOADS[name].summary for name in workloads}})
    table = report.table("workloads", "model", "workload", "median", "least", "most", "unit")
    if start:
        _measure_start(models[0], options, report)
    for model in models:
        for name, values in measure_workloads(model, options, workloads, repeat).items():
            workload = WORKLOADS[name]
            title = f"{model} {name}, {workload.unit}"
            report.samples[title] = values
            table.add(model, name, *spread(values), workload.unit)
            if (model, name) in TARGETS and torch.cuda.is_available():
                report.target(title, statistics.median(values), TARGETS[model, name], workload.more_is_better)
    return report


def _measure_start(model: str, options: Mapping[str, Any], report: Report) -> None:
    """Seconds to the first token in a new process: first without any compiled kernel, then with all of them."""
    table = report.table("from an empty process to the first token", "model", "kernels", "s")
    code = f"from minisgl.bench.workloads import make_engine; make_engine({model!r}, {dict(options)!r})"
    with tempfile.TemporaryDirectory() as cache:
        folders = {name: f"{cache}/{name}" for name in ("TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")}
        for kernels in ("cold", "cached"):
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **folders})
            seconds = time.perf_counter() - begin
            table.add(model, kernels, seconds)
            if torch.cuda.is_available():
                title = f"{model} first token, kernels {kernels}, s"
                report.target(title, seconds, _START_TARGETS[kernels], at_least=False)


def run_compare(model: str = "Qwen3-0.6B", workloads: Sequence[str] = NAMES, repeat: int = 3) -> Report:
    """Every workload with the optimisations of `LADDER` switched on one by one, beside other engines' results."""
    report = Report("compare", {"ladder": [label for label, _ in LADDER]})
    columns = ["", *(f"{name}, {WORKLOADS[name].unit}" for name in workloads)]
    table = report.table(f"{model}, one optimisation after another", *columns)
    options = dict(ALL_OFF)
    for label, added in LADDER:
        options |= added
        values = measure_workloads(model, options, workloads, repeat)
        report.samples.update({f"{label}: {name}": values[name] for name in workloads})
        table.add(label, *(statistics.median(values[name]) for name in workloads))
    if _REFERENCE.exists():
        reference = json.loads(_REFERENCE.read_text(encoding="utf-8"))
        others = report.table(f"other engines, {reference['hardware']}, {reference['date']}", *columns)
        for engine in reference["engines"]:
            if found := engine["results"].get(model):
                others.add(engine["name"], *(found.get(name, "–") for name in workloads))
    return report


def run_scoreboard(models: Sequence[str] = ("default",), repeat: int = 3) -> Report:
    """Output tokens a second of 16 chats with one system prompt, 32 tokens each, with one chapter after another."""
    from minisgl.book import toy

    on_cuda, (loop_model, tokenizer) = torch.cuda.is_available(), toy.load_default()
    device = torch.device("cuda" if on_cuda else "cpu")
    loop_model.weights = {name: weight.to(device) for name, weight in loop_model.weights.items()}
    prompts = [tokenizer.encode_chat(chat) for chat in CHATS]
    settings = {"chats": len(CHATS), "output_len": _COUNT, "input_len": sum(map(len, prompts)) / len(prompts)}
    report = Report("scoreboard", settings)
    for model in models:
        table = report.table(f"{model}, output tokens/s", "chapter", "", "median", "least", "most")
        options = {**ALL_OFF, "prefill_attention": "torch", "decode_attention": "torch", "max_seq_len": 2048}
        for place, (chapter, label, added) in enumerate(STAGES):
            options |= {"quantization": "fp8"} if on_cuda and chapter == 19 else added
            if (not added and model != "default") or (chapter in _ON_CUDA_ALONE and not on_cuda):
                continue
            if added:
                with make_engine(model, options) as llm:
                    speeds = _speeds(partial(_chat, llm), prompts, repeat)
            else:  # a loop takes one chat after the other, so of one it makes as many tokens a second as of all
                loop = partial((toy.generate_naively, toy.generate)[place], loop_model, count=_COUNT)
                with device:  # where the toy's new tensors go
                    speeds = _speeds(partial(map, loop), prompts[:1], repeat)
            report.samples[f"{model}: {label}"] = speeds
            table.add(chapter, label, *spread(speeds))
    return report


def _chat(llm: LLM, prompts: Prompts) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, _params(0.0, _COUNT))]


def _speeds(generate: Callable[[Prompts], Iterable[list[int]]], prompts: Prompts, repeat: int) -> list[float]:
    """Tokens a second of each run. A prefix cache keeps nothing from one to the next: the prompts begin differently."""
    speeds = []
    for run in range(repeat):
        some = [[prompt[0], 1000 + run, *prompt[1:]] for prompt in prompts]
        start = time.perf_counter()
        speeds.append(sum(map(len, generate(some))) / (time.perf_counter() - start))
    return speeds


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
    rng = np.random.default_rng(0)

    def ours(prompts: Prompts, output_len: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=output_len, min_tokens=output_len, temperature=0.0)
        return [output.token_ids for output in llm.generate(prompts, params)]

    def prompts(count: int, length: int) -> Prompts:
        ids: Prompts = rng.integers(llm.model_config.vocab_size, size=(count, length)).tolist()
        return ids

    report = Report("cpu", {"dtype": "float32"})
    title = f"generated tokens/s, {input_len} tokens in, {output_len} out"
    table = report.table(title, "requests", "minisgl", "transformers", "ratio", "same output")
    engines = (ours, _transformers(model))
    for name, count, goal in (("batch", requests, 1.5), ("single", 1, 1.0)):
        seconds, agreeing = _race(engines, [prompts(count, input_len) for _ in range(repeat + 1)], output_len)
        report.samples.update({f"{name}_seconds": seconds[0], f"{name}_seconds_transformers": seconds[1]})
        speeds = [count * output_len / statistics.median(each) for each in seconds]
        table.add(count, *speeds, speeds[0] / speeds[1], f"{agreeing} of {count * repeat}")
        title = f"{count} request{'s' * (name == 'batch')}, × transformers"
        report.target(title, speeds[0] / speeds[1], goal, at_least=True)
    cold, warm = _time_to_first_token(llm, prompts, prefix_len, repeat)
    report.samples.update({"first_token_seconds_uncached": cold, "first_token_seconds_cached": warm})
    uncached, cached = statistics.median(cold), statistics.median(warm)
    title = f"time to first token, {prefix_len} tokens of prefix and {_SUFFIX_LEN} more"
    table = report.table(title, "", "prefix uncached, ms", "prefix cached, ms", "cached / uncached")
    table.add("minisgl", uncached * 1e3, cached * 1e3, cached / uncached)
    report.target("first token, cached / uncached", cached / uncached, 0.2, at_least=False)
    return report


def _race(
    engines: tuple[Generate, Generate], batches: Sequence[Prompts], output_len: int
) -> tuple[tuple[list[float], list[float]], int]:
    """Seconds of both engines for all but the first of the ``batches``, and how many requests got the same tokens."""
    seconds: tuple[list[float], list[float]] = ([], [])
    agreeing = 0
    for run, prompts in enumerate(batches):
        outputs, length = {}, output_len if run else min(4, output_len)  # the first warms up
        for number in (0, 1) if run % 2 else (1, 0):
            start = time.perf_counter()
            outputs[number] = engines[number](prompts, length)
            if run:
                seconds[number].append(time.perf_counter() - start)
            if any(len(tokens) != length for tokens in outputs[number]):
                raise AssertionError("an engine did not generate as many tokens as it was asked for")
        agreeing += sum(a == b for a, b in zip(outputs[0], outputs[1], strict=True)) if run else 0
    return seconds, agreeing


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
    uncached, cached = list[float](), list[float]()
    for _ in range(repeat):
        [prefix] = make_prompts(1, prefix_len)
        for seconds, least_cached in ((uncached, 0), (cached, prefix_len - llm.config.page_size)):
            [question] = make_prompts(1, _SUFFIX_LEN)
            [output] = llm.generate([prefix + question], params)
            if (output.cached_tokens > 0) != (seconds is cached) or output.cached_tokens < least_cached:
                raise AssertionError(f"{output.cached_tokens} prompt tokens came from the prefix cache")
            seconds.append(output.metrics.ttft)
    return uncached, cached
