"""What engines over several ranks are asked in tests, and how their processes are found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from minisgl.llm import LLM
from minisgl.outputs import RequestOutput
from minisgl.sampling_params import SamplingParams
from tests.drafting import draft_always, drafts_of

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "page_size": 4, "verify_ranks": True}
PROMPTS = [[5, 6, 7] * 4, [5, 6, 7] * 4 + [1, 2], [9], list(range(40)), [3] * 25]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=2)
PARAMS = [
    GREEDY,
    SamplingParams(seed=4, max_tokens=9, ignore_eos=True, top_k=40, top_p=0.95),
    SamplingParams(seed=1, max_tokens=12, ignore_eos=True, repetition_penalty=1.3, logit_bias={7: 2.0}),
    SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
    SamplingParams(seed=2, temperature=0.7, max_tokens=14, min_p=0.05, min_tokens=6, stop_token_ids=[3, 4]),
]


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """What was generated; no request may have failed."""
    assert {output.finish_reason for output in outputs} <= {"length", "stop"}, [output.error for output in outputs]
    return [list(output.token_ids) for output in outputs]


def generate(path: Path, **options: Any) -> list[list[int]]:
    """The answers of a new engine to all prompts, twice: the second time from its prefix cache."""
    return tokens(generated(path, **options))


def generated(path: Path, **options: Any) -> list[RequestOutput]:
    """What `generate` shows the tokens of. With a drafter, drafts were right and wrong, whether they paid or not."""
    with LLM(path, **{**OPTIONS, "num_pages": 64, **options}) as llm:
        drafts = llm.scheduler.speculation is not None
        if drafts:
            draft_always(llm)
        outputs = llm.generate(PROMPTS, PARAMS) + llm.generate(PROMPTS, PARAMS)
        if drafts:
            drafted, accepted = drafts_of(llm)
            assert 0 < accepted < drafted
        return outputs


def step_for_ever(llm: LLM) -> None:
    """Until a step raises."""
    while True:
        llm.step()


def is_rank(process: psutil.Process) -> bool:
    """Whether it is a rank, of this driver or another, that still runs."""
    try:
        return "minisgl.distributed.rank_process" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def ranks_of(driver: psutil.Process) -> list[psutil.Process]:
    return [process for process in driver.children(recursive=True) if is_rank(process)]


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
