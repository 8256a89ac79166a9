"""What may never change an answer: cache, page size, policy, memory, chunk size, overlap, page store, drafts.

64 greedy requests with shared prefixes, and eight that are sampled with a seed each, run at the same time under every
combination. Everything is float64: sums over differently cut batches differ in the last bits, and in float64 no argmax
of a random model is that close.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from minisgl.llm import LLM
from minisgl.outputs import RequestOutput
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.scheduler import StepOutput
from tests.drafting import KnowsTheAnswers, draft_always, drafts_of
from tests.model_zoo import tiny_checkpoint

VOCAB = 64
NUM_GREEDY = 64
NUM_SAMPLED = 8
OUTPUT_LENGTHS = (12, 24, 6, 16)
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 12},
    "Qwen3MoeForCausalLM": {},
}
SCARCE_PAGES = {1: 160, 16: 9, 64: 3}
"""Pages of a scarce run, by page size: the longest request fits, and few run at a time."""
TOKEN_BYTES = 2 * 2 * 2 * 8 * 8
"""Keys and values of 2 layers and 2 heads of 8 float64."""

CACHES = ["radix", "block-hash", "none"]
MATRIX = list(product(CACHES, [1, 16, 64], ["prefill-first", "mixed"], ["ample", "scarce"], [7, 64, 4096]))
OVERLAP = np.random.default_rng(1).permutation(len(MATRIX)) % 2 == 0
"""Every combination runs with overlap or without, so that all of them take no longer than with neither."""
STORE = np.random.default_rng(2).permutation(len(MATRIX)) % 2 == 0
"""Every combination keeps evicted pages in host memory, or drops them."""
DRAFTERS = np.array(["none", "tests.drafting:KnowsTheAnswers", "suffix"])[np.random.default_rng(3).permutation(108) % 3]
"""The same with drafts, of which 30 % are wrong, and without."""
OTHER_MODELS = [
    ("radix", 1, "mixed", "scarce", 7, True),
    ("block-hash", 16, "prefill-first", "scarce", 64, False),
    ("none", 64, "mixed", "ample", 4096, True),
]


class CheckedLLM(LLM):
    """Checks every pool, table and cache after every step."""

    def step(self) -> StepOutput:
        output = super().step()
        self.scheduler.check()
        return output


@dataclass(frozen=True)
class Oracle:
    """A checkpoint, requests, and what must come out."""

    path: Path
    prompts: list[list[int]]
    params: list[SamplingParams]
    expected: list[list[int]]


def make_prompts() -> list[list[int]]:
    """Four groups that share a prefix of less than 64 tokens, and one that shares more; a few prompts are equal."""
    rng = np.random.default_rng(7)
    *shared, longest = [rng.integers(0, VOCAB, length).tolist() for length in (5, 44, 50, 56, 66)]
    prompts = []
    for i in range(NUM_GREEDY + NUM_SAMPLED):
        prefix = longest if i >= 60 else shared[i % 4]
        prompts.append(prefix + rng.integers(0, VOCAB, 1 + i % 11).tolist())
    prompts[40:44] = prompts[20:24]
    return prompts


def make_params() -> list[SamplingParams]:
    greedy = [
        SamplingParams(
            temperature=0.0, max_tokens=OUTPUT_LENGTHS[i // 4 % 4], stop_token_ids=(3, 4) if i % 3 == 0 else ()
        )
        for i in range(NUM_GREEDY)
    ]
    sampled = [SamplingParams(temperature=1.0, top_p=0.95, max_tokens=10, seed=100 + i) for i in range(NUM_SAMPLED)]
    return greedy + sampled


def greedy_reference(model: PreTrainedModel, prompt: list[int], params: SamplingParams) -> list[int]:
    """What transformers generates, cut behind the first stop token."""
    generated = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=params.max_tokens)
    tokens: list[int] = generated[0, len(prompt) :].tolist()
    ends = [i for i, token in enumerate(tokens) if token in tuple(params.stop_token_ids)]
    return tokens[: ends[0] + 1] if ends else tokens


def make_oracle(directory: Path, architecture: str, **overrides: Any) -> Oracle:
    settings = MODELS.get(architecture, {}) | overrides
    path, model = tiny_checkpoint(directory, architecture, vocab_size=VOCAB, **settings)
    model.double()
    prompts, params = make_prompts(), make_params()
    expected = [greedy_reference(model, *each) for each in zip(prompts[:NUM_GREEDY], params[:NUM_GREEDY], strict=True)]
    # transformers draws differently; for the sampled requests the reference is each of them alone in an engine.
    alone = LLM(path, dtype="float64", num_pages=256, page_size=1, prefix_cache="none", max_running_requests=1)
    sampled = alone.generate(list(prompts[NUM_GREEDY:]), params[NUM_GREEDY:])
    return Oracle(path, prompts, params, expected + [output.token_ids for output in sampled])


@pytest.fixture(scope="session")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Oracle]:
    return {name: make_oracle(tmp_path_factory.mktemp(name), name) for name in MODELS}


def run(
    oracle: Oracle,
    cache: str,
    page_size: int,
    composition: str,
    memory: str,
    chunk: int,
    overlap: bool | None = None,
    device: str = "cpu",
    dtype: str = "float64",
    store: bool = False,
    **options: Any,
) -> list[RequestOutput]:
    if store:  # fewer tokens than the prompts have together, so that the store has to choose
        options |= {"page_store": "host", "page_store_gib": 500 * TOKEN_BYTES / 2**30}
    llm = CheckedLLM(
        oracle.path,
        device=device,
        dtype=dtype,
        prefix_cache=cache,
        page_size=page_size,
        batch_policy=composition,
        num_pages=SCARCE_PAGES[page_size] if memory == "scarce" else 16384 // page_size,
        max_prefill_tokens=chunk,
        overlap=overlap,
        **options,
    )
    KnowsTheAnswers.answers = [a + b for a, b in zip(oracle.prompts, oracle.expected, strict=True)]
    drafts = llm.scheduler.speculation is not None
    if drafts:
        draft_always(llm)
    outputs = llm.generate(list(oracle.prompts), oracle.params)
    if drafts:
        drafted, accepted = drafts_of(llm)
        assert 0 < accepted < drafted
    assert not llm.scheduler.has_work, "a step is still in flight"
    assert llm.scheduler.memory.available == llm.scheduler.memory.num_pages, "pages have leaked"
    if store and memory == "scarce" and cache != "none" and page_size < 64:  # few prompts have a page of 64 tokens
        offload = llm.scheduler.memory.offload
        assert offload is not None
        assert offload.restored > 0, "no page has come back from the store"
    return outputs


def assert_answers(
    oracle: Oracle, outputs: list[RequestOutput], cache: str, memory: str, few_steps: bool = False
) -> None:
    """``few_steps``: requests may be done before memory runs out."""
    assert [output.token_ids for output in outputs] == oracle.expected
    preemptions = sum(output.metrics.preemptions for output in outputs)
    if memory == "ample" or not few_steps:
        assert (preemptions > 0) == (memory == "scarce")
    if memory == "ample":
        assert (sum(output.cached_tokens for output in outputs) > 0) == (cache != "none")


@pytest.mark.parametrize(
    ("cache", "page_size", "composition", "memory", "chunk", "overlap", "store", "drafter"),
    [
        (*case, bool(overlap), bool(store), str(drafter))
        for case, overlap, store, drafter in zip(MATRIX, OVERLAP, STORE, DRAFTERS, strict=True)
    ],
)
def test_llama_gives_the_same_tokens(
    oracles: dict[str, Oracle],
    cache: str,
    page_size: int,
    composition: str,
    memory: str,
    chunk: int,
    overlap: bool,
    store: bool,
    drafter: str,
) -> None:
    oracle = oracles["LlamaForCausalLM"]
    outputs = run(oracle, cache, page_size, composition, memory, chunk, overlap, store=store, drafter=drafter)
    few_steps = page_size == 64 and drafter.endswith("KnowsTheAnswers")
    assert_answers(oracle, outputs, cache, memory, few_steps)


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize(("cache", "page_size", "composition", "memory", "chunk", "overlap"), OTHER_MODELS)
def test_windows_and_experts_give_the_same_tokens(
    oracles: dict[str, Oracle],
    architecture: str,
    cache: str,
    page_size: int,
    composition: str,
    memory: str,
    chunk: int,
    overlap: bool,
) -> None:
    oracle = oracles[architecture]
    outputs = run(
        oracle, cache, page_size, composition, memory, chunk, overlap, drafter="tests.drafting:KnowsTheAnswers"
    )
    # Where a page is longer than the window, a row gives one back for each that it takes: none has to be preempted.
    window = MODELS[architecture].get("sliding_window", page_size)
    assert_answers(oracle, outputs, cache, memory, few_steps=page_size > window)


def test_the_requests_are_worth_comparing(oracles: dict[str, Oracle]) -> None:
    """The tokens differ between requests, some requests end at a stop token, and the seeds matter."""
    for oracle in oracles.values():
        assert len({tuple(tokens[:5]) for tokens in oracle.expected}) > 50
        lengths = [len(tokens) for tokens in oracle.expected[:NUM_GREEDY]]
        assert 0 < sum(n < p.max_tokens for n, p in zip(lengths, oracle.params, strict=False) if p.max_tokens) < 30
