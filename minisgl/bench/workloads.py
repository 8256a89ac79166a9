"""The offline workloads: which prompts, and what is asked of them. All tokens are random, and new for every run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from minisgl.core.sampling_params import SamplingParams
from minisgl.llm import LLM

_HIGHEST_TOKEN = 10_000
Requests = tuple[list[list[int]], list[SamplingParams]]
Tokens = Callable[[int], list[int]]


@dataclass(frozen=True, slots=True)
class Workload:
    """A set of requests that are handed over at once.

    Args:
        summary: what it is, in a line.
        unit: of `Run.value`.
        more_is_better: about that value.
        make: requests, from a source of random tokens and another of random lengths.
    """

    summary: str
    unit: str
    more_is_better: bool
    make: Callable[[Tokens, random.Random], Requests]

    def requests(self, seed: int, vocab_size: int) -> Requests:
        """Prompts and parameters; another seed gives other tokens and other lengths."""
        rng = random.Random(seed)
        return self.make(_tokens(vocab_size, rng), rng)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload.

    Args:
        seconds: from the call to the last token.
        output_tokens: generated in all.
        steps: tokens of the longest output, so about the number of decode steps.
    """

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


def warm_up(llm: LLM) -> None:
    """A few tokens, sampled and greedy, as the first request of a server would bring."""
    tokens = _tokens(llm.model_config.vocab_size, random.Random(9))
    for temperature in (0.6, 0.0):
        llm.generate([tokens(64)], [_params(temperature, 8)])


def run_workload(llm: LLM, workload: Workload, seed: int) -> Run:
    """Run it once.

    Raises:
        AssertionError: a request did not get as many tokens as it asked for.
    """
    prompts, params = workload.requests(seed, llm.model_config.vocab_size)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    wanted = [each.max_tokens or 0 for each in params]
    if [len(output.token_ids) for output in outputs] != wanted:
        raise AssertionError("a request did not get as many tokens as it asked for")
    return Run(seconds, sum(wanted), max(wanted))


def _tokens(vocab_size: int, rng: random.Random) -> Tokens:
    highest = min(_HIGHEST_TOKEN, vocab_size - 1)
    return lambda count: [rng.randint(0, highest) for _ in range(count)]
