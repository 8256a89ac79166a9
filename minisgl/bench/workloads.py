"""The offline workloads, the model shapes that they run on, and how both are run. All tokens are random."""

from __future__ import annotations

import gc
import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams

_HIGHEST_TOKEN = 10_000
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "num_key_value_heads": 8,
}
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "tie_word_embeddings")
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {**_QWEN3, **dict(zip(_SIZES, (1024, 3072, 16, 28, True), strict=True))},
    "Qwen3-14B": {**_QWEN3, **dict(zip(_SIZES, (5120, 17408, 40, 40, False), strict=True))},
    "Qwen3-32B": {**_QWEN3, **dict(zip(_SIZES, (5120, 25600, 64, 64, False), strict=True))},
    "tiny": {
        **{**_QWEN3, **dict(zip(_SIZES, (32, 48, 4, 2, False), strict=True))},
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", "head_dim": 8},
        **{"max_position_embeddings": 131072, "num_key_value_heads": 2, "rope_theta": 10000.0, "vocab_size": 512},
        **{"bos_token_id": None, "eos_token_id": 0},
    },
}
"""``config.json`` of models with random weights, by the name of the checkpoint whose sizes they have."""
FOR_ONE_GPU = ["Qwen3-0.6B", "Qwen3-14B"]

Requests = tuple[list[list[int]], list[SamplingParams]]
Tokens = Callable[[int], list[int]]


@dataclass(frozen=True, slots=True)
class Workload:
    """A set of requests that arrive at once."""

    summary: str  # what it is, in a line
    unit: str  # of `Run.value`
    more_is_better: bool  # about that value
    make: Callable[[Tokens, random.Random], Requests]  # from a source of random tokens and one of random lengths

    def requests(self, seed: int, vocab_size: int) -> Requests:
        """Prompts and parameters; another seed gives other tokens and other lengths."""
        rng = random.Random(seed)
        return self.make(_tokens(vocab_size, rng), rng)


@dataclass(frozen=True, slots=True)
class Run:
    """One run: seconds to the last token, tokens generated in all, and tokens of the longest output."""

    seconds: float
    output_tokens: int
    steps: int

    def value(self, workload: Workload) -> float:
        """The number that counts for this workload, in its unit."""
        by_unit = {
            "output tokens/s": self.output_tokens / self.seconds,
            "ms/token": 1e3 * self.seconds / self.steps,
            "s": self.seconds,
        }
        return by_unit[workload.unit]


def _params(temperature: float, max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=max_tokens)


def _mixed(tokens: Tokens, rng: random.Random) -> Requests:
    prompts = [tokens(rng.randint(100, 1024)) for _ in range(256)]
    return prompts, [_params(0.6, rng.randint(100, 1024)) for _ in range(256)]


def _bs1(tokens: Tokens, rng: random.Random) -> Requests:
    return [tokens(128)], [_params(0.0, 512)]


def _prefix(tokens: Tokens, rng: random.Random) -> Requests:
    head = tokens(2048)
    return [head + tokens(32) for _ in range(256)], [_params(0.0, 64)] * 256


WORKLOADS = {
    "mixed": Workload("256 requests, 100 to 1,024 tokens in and out, temperature 0.6", "output tokens/s", True, _mixed),
    "bs1": Workload("one request, 128 tokens in and 512 out, greedy", "ms/token", False, _bs1),
    "prefix": Workload("256 requests, 2,048 shared tokens and 32 own in, 64 out, greedy", "s", False, _prefix),
}
NAMES = tuple(WORKLOADS)


def _tokens(vocab_size: int, rng: random.Random) -> Tokens:
    highest = min(_HIGHEST_TOKEN, vocab_size - 1)
    return lambda count: [rng.randint(0, highest) for _ in range(count)]


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
    tokens = _tokens(llm.model_config.vocab_size, random.Random(9))
    for temperature in (0.6, 0.0):
        llm.generate([tokens(64)], [_params(temperature, 8)])
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
    """Values of ``repeat`` runs of each workload, on an engine of its own that is gone afterwards."""
    with make_engine(model, options) as llm:
        values = {
            name: [run_workload(llm, WORKLOADS[name], seed).value(WORKLOADS[name]) for seed in range(repeat)]
            for name in names
        }
    del llm
    free_memory()
    return values


def free_memory() -> None:
    """Collect engines in reference cycles, and give their GPU memory back."""
    gc.collect()
    torch.cuda.empty_cache()
