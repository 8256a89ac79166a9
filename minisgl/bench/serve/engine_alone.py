"""The engine without a server: waves of requests to `minisgl.LLM`, in a process of their own.

Takes its orders as JSON from standard input, and prints pairs of a short wave and a long one: seconds that passed, and
seconds of processor time.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from minisgl.bench.serve.prompts import prompt_tokens
from minisgl.core.sampling_params import SamplingParams
from minisgl.llm import LLM


def main() -> None:
    """Warm up, measure, print."""
    asked: dict[str, Any] = json.load(sys.stdin)
    llm = LLM(asked["model"], **asked["options"])
    pairs = [[_wave(llm, asked, length, seed) for length in asked["lengths"]] for seed in range(asked["repeat"] + 1)]
    print(json.dumps(pairs[1:]))


def _wave(llm: LLM, asked: dict[str, Any], length: int, seed: int) -> tuple[float, float]:
    """Seconds from the first request to the last token, and of processor time."""
    count = asked["streams"]
    first = count * asked["lengths"].index(length)
    prompts = [
        prompt_tokens(first + index, asked["input_len"], None, asked["vocab_size"], seed) for index in range(count)
    ]
    begin, cpu = time.perf_counter(), time.process_time()
    llm.generate(prompts, SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True))
    return time.perf_counter() - begin, time.process_time() - cpu


if __name__ == "__main__":
    main()
