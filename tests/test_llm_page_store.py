"""An engine with a page store gives the tokens of one without: conversations that return, in every kind of engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl.errors import ConfigError
from minisgl.llm import LLM
from minisgl.request import FinishReason
from minisgl.sampling_params import SamplingParams
from tests.model_zoo import tiny_checkpoint
from tests.test_metamorphic import TOKEN_BYTES, CheckedLLM

VOCAB = 50


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, _ = tiny_checkpoint(tmp_path_factory.mktemp("model"), "LlamaForCausalLM", vocab_size=VOCAB)
    return directory


def options_of(seed: int) -> dict[str, Any]:
    """Some combination of options, with a pool that holds two or three conversations and a store of any size."""
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([1, 2, 4, 8]))
    tokens = int(rng.integers(100, 160))
    return {
        "dtype": "float64",
        "page_size": page_size,
        "num_pages": tokens // page_size,
        "max_running_requests": int(rng.integers(1, 5)),
        "max_prefill_tokens": int(rng.choice([5, 16, 256])),
        "prefix_cache": str(rng.choice(["radix", "block-hash"])),
        "batch_policy": str(rng.choice(["prefill-first", "mixed"])),
        "admission_policy": str(rng.choice(["optimistic", "reserve"])),
        "overlap": bool(rng.integers(2)),
        "page_store_gib": int(rng.integers(page_size, 600)) * TOKEN_BYTES / 2**30,
        "page_store": "disk" if seed % 3 == 2 else "host",
    }


def converse(llm: LLM, seed: int, rounds: int = 5) -> list[list[int]]:
    """Six conversations side by side that grow by what is asked and answered; some requests are aborted on the way."""
    rng = np.random.default_rng(seed)
    history = [rng.integers(0, VOCAB, int(rng.integers(5, 30))).tolist() for _ in range(6)]
    answers = []
    for _ in range(rounds):
        params = [SamplingParams(temperature=0.7, seed=n, max_tokens=4 + n, ignore_eos=True) for n in range(6)]
        for number in rng.integers(6, size=2).tolist():  # the user stops an answer and asks again
            request = llm.prepare(history[number], params[number])[0].request
            llm.scheduler.add(request)
            for _ in range(int(rng.integers(1, 8))):
                llm.step()
            llm.scheduler.finish(request.uid, FinishReason.ABORT)
        outputs = llm.generate([list(each) for each in history], params)
        for each, output in zip(history, outputs, strict=True):
            assert output.finish_reason == "length", output.error
            answers.append(output.token_ids)
            each += [*output.token_ids, *rng.integers(0, VOCAB, int(rng.integers(1, 9))).tolist()]
            del each[:-70:]  # at most 70 tokens, the first of which change
    return answers


@pytest.mark.parametrize("seed", range(12))
def test_tokens_do_not_depend_on_the_store(path: Path, seed: int) -> None:
    options = options_of(seed)
    llm = CheckedLLM(path, device="cpu", **options)
    stored = converse(llm, seed)
    assert llm.scheduler.memory.offload.evicted > 0
    assert stored == converse(LLM(path, device="cpu", dtype="float64", num_pages=2000), seed)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_tokens_do_not_depend_on_the_store_on_cuda(path: Path, seed: int) -> None:
    llm = CheckedLLM(path, device="cuda", **options_of(seed))
    stored = converse(llm, seed)
    assert stored == converse(LLM(path, device="cpu", dtype="float64", num_pages=2000), seed)


@pytest.mark.parametrize("prefix_cache", ["radix", "block-hash"])
def test_a_conversation_that_returns_is_not_computed_again(path: Path, prefix_cache: str) -> None:
    llm = LLM(path, device="cpu", page_size=4, num_pages=14, prefix_cache=prefix_cache, page_store="host")
    one = SamplingParams(max_tokens=1, temperature=0.0)
    first = list(range(42))
    llm.generate([first], one)
    llm.generate([list(range(49, -1, -1))], one)
    offload = llm.scheduler.memory.offload
    assert (offload.evicted > 0, offload.restored) == (True, 0)
    (output,) = llm.generate([first], one)
    assert output.cached_tokens == 40
    assert 0 < offload.restored <= 10
    assert offload.wanted == 10 + 12 + offload.restored


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_store": "host", "page_store_gib": 1e-9}, "page_store_gib: 1e-09 GiB hold no page"),
        ({"page_store": "host", "page_store_gib": 9e4}, "page_store_gib: 90000 GiB do not fit"),
        ({"page_store_gib": 0}, "page_store_gib: must be a positive number of GiB"),
        ({"page_store_gib": "4"}, "page_store_gib: must be a positive number of GiB"),
    ],
)
def test_a_budget_that_cannot_work_is_named(path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(path, device="cpu", num_pages=64, **options)
