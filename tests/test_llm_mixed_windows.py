"""Models in which some layers have a sliding window: the tokens are the same as without giving window pages back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.batch import Batch, StepPhase
from minisgl.engine.cuda_graph import CpuGraph, CudaGraphRunner
from minisgl.engine.prefill_graph import PrefillGraphRunner
from minisgl.llm import LLM
from minisgl.request import FinishReason, Request
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.memory import KVMemory
from minisgl.scheduler.mixed_memory import MixedMemory
from tests.drafters.test_model_drafters import random_head
from tests.drafting import draft_always, drafts_of
from tests.model_zoo import hf_logits, random_tokens, tiny_checkpoint
from tests.tiny_text_model import assert_idle_and_clean

LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPTS = [tokens.tolist() for tokens in random_tokens(3, 10, 25, 90, 17)]
PROMPTS += [PROMPTS[3][:60] + PROMPTS[0], PROMPTS[3]]  # with prefixes to share
WINDOW = 11
KINDS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
}
WITHOUT: dict[str, Any] = {"page_store": "host", "page_store_gib": 0.001}
"""Options with which an engine gives no window pages."""


@pytest.fixture(scope="module", params=["Gemma3ForCausalLM", "GptOssForCausalLM"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return tiny_checkpoint(tmp_path_factory.mktemp("mixed"), request.param, **KINDS)


@pytest.fixture(scope="module")
def path(model: tuple[Path, Any]) -> Path:
    return model[0]


def make(path: Path, **options: Any) -> LLM:
    """A pool of 200 positions, and window pages for 32."""
    sizes = {"page_size": 4, "num_pages": 50, "max_prefill_tokens": 8, "max_running_requests": 4}
    return LLM(path, **{**sizes, "dtype": "float32", "device": "cpu", **options})


def memory_of(llm: LLM) -> MixedMemory:
    assert isinstance(llm.scheduler.memory, MixedMemory)
    return llm.scheduler.memory


class Poison:
    """Fills free and dummy pages of both kinds with NaN before each step, and keeps the books in order."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.most_held = 0

    def begin(self, phase: StepPhase, batch: Batch | None) -> None:
        if phase != "launch":
            return
        memory, cache = memory_of(self.llm), self.llm.engine.kv_cache
        self.llm.scheduler.check()
        self.most_held = max(self.most_held, int((memory.windows.holders > 0).sum()))
        for pool, tensors in (
            (memory.pool, (cache.k, cache.v)),
            (memory.windows.pool, (cache.window_k, cache.window_v)),
        ):
            free = torch.from_numpy(pool.is_free).nonzero().flatten()
            for kv in tensors:
                kv[:, free] = torch.nan
                kv[:, pool.num_pages] = torch.nan

    def end(self, phase: StepPhase, batch: Batch | None) -> None: ...

    def finish(self, requests: Sequence[Request]) -> None: ...


def assert_nothing_is_left(llm: LLM) -> None:
    assert_idle_and_clean(llm)
    memory = memory_of(llm)
    assert memory.windows.available == memory.windows.pool.num_pages
    assert not memory.windows.holders.any()


@pytest.fixture(scope="module")
def expected(model: tuple[Path, Any]) -> list[list[int]]:
    """Tokens of an engine that gives nothing back and has room for everything at once, which are transformers'."""
    path, reference = model
    llm = make(path, num_pages=256, max_prefill_tokens=512, prefix_cache="none", **WITHOUT)
    assert type(llm.scheduler.memory) is KVMemory
    answers = [output.token_ids for output in llm.generate(PROMPTS, LONG)]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert len(set(answer)) > 10, "no test if all say the same"
        logits = hf_logits(reference, [*prompt, *answer])[len(prompt) - 1 : -1]
        assert logits.argmax(dim=-1).tolist() == answer
    return answers


@pytest.mark.parametrize(
    ("prefix_cache", "batch_policy", "overlap"),
    [
        ("radix", "prefill-first", False),
        ("block-hash", "mixed", True),
        ("none", "mixed", False),
    ],
)
def test_tokens_are_those_of_an_engine_that_keeps_all(
    path: Path, expected: list[list[int]], prefix_cache: str, batch_policy: str, overlap: bool
) -> None:
    """Prompts in chunks, hits on prefixes with and without window pages, and requests that give way."""
    llm = make(path, prefix_cache=prefix_cache, batch_policy=batch_policy, overlap=overlap, num_pages=34)
    assert llm.engine.num_window_pages == 6
    poison = Poison(llm)
    with llm.core.observe(poison):
        outputs = llm.generate(PROMPTS, LONG)
        outputs += llm.generate(PROMPTS[2:], LONG)  # with what the first ones left in the cache
    assert [output.token_ids for output in outputs] == expected + expected[2:]
    assert poison.most_held <= 6
    assert prefix_cache == "none" or sum(output.metrics.preemptions for output in outputs) > 0
    assert_nothing_is_left(llm)


def test_a_conversation_goes_on_from_its_end_and_not_from_a_middle_without_windows(
    path: Path, expected: list[list[int]]
) -> None:
    """Both are the same tokens as ever; only the first is a hit."""
    llm = make(path)
    conversation, short = PROMPTS[3] + expected[3], dataclasses.replace(LONG, max_tokens=30)
    with llm.core.observe(Poison(llm)):
        first, *_ = llm.generate([PROMPTS[3]], LONG)
        onward, fork = (
            llm.generate([prompt], short)[0] for prompt in ([*conversation, 7], [*PROMPTS[3][:40], *PROMPTS[2]])
        )
    assert first.token_ids == expected[3]
    assert onward.cached_tokens == (len(conversation) - 1) // 4 * 4
    assert fork.cached_tokens == 0
    plain = make(path, num_pages=256, max_prefill_tokens=512, prefix_cache="none", **WITHOUT)
    again = plain.generate([[*conversation, 7], [*PROMPTS[3][:40], *PROMPTS[2]]], short)
    assert [onward.token_ids, fork.token_ids] == [output.token_ids for output in again]
    assert_nothing_is_left(llm)


@pytest.mark.parametrize(("fused", "overlap"), [(False, True), (True, False)])
def test_tokens_from_graphs(path: Path, expected: list[list[int]], fused: bool, overlap: bool) -> None:
    """Decode steps replayed with inputs at fixed addresses, whose page-table changes cover both tables."""
    llm = make(path, overlap=overlap)
    llm.engine.runner = runner = CudaGraphRunner(llm.engine.runner, (1, 4), CpuGraph, fused)
    replays = []
    with llm.core.observe(Poison(llm)):
        for captured in runner.graphs.values():
            replay = captured.replay
            captured.replay = lambda replay=replay: (replays.append(1), replay())
        outputs = llm.generate(PROMPTS, LONG)
    assert [output.token_ids for output in outputs] == expected
    assert len(replays) > 40, "steps with a page-table change a row fit as well"
    assert_nothing_is_left(llm)


OURS = {"prefill_attention": "triton", "decode_attention": "triton"}


def test_tokens_from_our_kernels_in_graphs(tmp_path: Path) -> None:
    """Prefill chunks too, by the Triton backend."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
    path, _ = tiny_checkpoint(tmp_path, "Gemma3ForCausalLM", **kinds)
    params = dataclasses.replace(LONG, max_tokens=3)
    (expected,) = make(path, **WITHOUT).generate(PROMPTS[2:3], params)
    llm = make(path, **OURS)  # interpreted, and slow
    runner = PrefillGraphRunner(llm.engine.runner, (8,), CpuGraph)
    llm.engine.runner = CudaGraphRunner(runner, (2,), CpuGraph, fused=True)
    with llm.core.observe(Poison(llm)):
        (output,) = llm.generate(PROMPTS[2:3], params)
    assert output.token_ids == expected.token_ids
    assert len(runner.graphs) > 0
    assert_nothing_is_left(llm)


@pytest.mark.parametrize(("drafter", "num_pages"), [("ngram", 34), ("model", 50)])
def test_tokens_with_drafts(path: Path, expected: list[list[int]], drafter: str, num_pages: int) -> None:
    """Of the request's own words, which are mostly wrong, and of the same model, which are right."""
    draft_model = str(path) if drafter == "model" else None
    llm = make(path, num_pages=num_pages, drafter=drafter, draft_model=draft_model)
    draft_always(llm)
    with llm.core.observe(Poison(llm)):
        outputs = llm.generate(PROMPTS, LONG)
    assert [output.token_ids for output in outputs] == expected
    drafted, accepted = drafts_of(llm)
    assert accepted == drafted > 100 if drafter == "model" else accepted < drafted
    assert_nothing_is_left(llm)


def test_tokens_with_eight_bit_keys_and_values(path: Path) -> None:
    """They are rounded as in an engine with one pool, in window pages too."""
    plain, llm = (make(path, kv_dtype="fp8", **options) for options in ({"num_pages": 256, **WITHOUT}, {}))
    assert type(plain.scheduler.memory) is KVMemory
    assert llm.engine.kv_cache.window_k.dtype == torch.float8_e4m3fn
    expected, answers = ([output.token_ids for output in each.generate(PROMPTS, LONG)] for each in (plain, llm))
    assert answers == expected
    assert_nothing_is_left(llm)


def test_a_page_store_has_the_pages_of_all_layers(path: Path, expected: list[list[int]]) -> None:
    """So there are no window pages, and what comes back from the store is whole."""
    llm = make(path, num_pages=34, page_store="host", page_store_gib=0.01)
    assert type(llm.scheduler.memory) is KVMemory
    assert [output.token_ids for output in llm.generate(PROMPTS, LONG)] == expected
    assert llm.scheduler.memory.offload is not None
    assert llm.scheduler.memory.offload.restored > 0
    assert_idle_and_clean(llm)


def test_what_is_aborted_leaves_nothing(path: Path, expected: list[list[int]]) -> None:
    llm = make(path, overlap=True)
    requests = [llm.core.input_processor.process(prompt, LONG)[0] for prompt in PROMPTS]
    for request in requests:
        llm.core.add(request)
    with llm.core.observe(Poison(llm)):
        for request in (requests[3], requests[1], requests[4]):
            for _ in range(12):
                llm.core.step()
            llm.core.finish(request.uid)
        while llm.core.has_work:
            llm.core.step()
    for number, request in enumerate(requests):
        assert request.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
        assert request.output == expected[number][: len(request.output)]
    assert_nothing_is_left(llm)


def test_only_mixed_models_have_window_pages_and_not_with_a_store_or_hidden_states(tmp_path: Path) -> None:
    have = {}
    for name in ("Llama", "Mistral", "Gemma2", "Gemma3", "GptOss", "Olmo3"):
        seven = {"sliding_window": 7, "num_hidden_layers": 4} if name == "Mistral" else {}
        directory, _ = tiny_checkpoint(tmp_path, f"{name}ForCausalLM", **seven)
        llm = make(directory)
        have[name] = isinstance(llm.scheduler.memory, MixedMemory)
        assert have[name] == (llm.engine.num_window_pages is not None)
        assert have[name] == hasattr(llm.engine.kv_cache, "window_k")
    assert have == {"Llama": False, "Mistral": False, "Gemma2": True, "Gemma3": True, "GptOss": True, "Olmo3": True}
    qwen, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM", use_sliding_window=True, **KINDS)
    random_head(qwen, tmp_path / "head")
    eagle = {"drafter": "eagle", "draft_model": str(tmp_path / "head")}
    own_backend = {"prefill_attention": "minisgl.attention.torch_backend:TorchAttention", "decode_attention": "torch"}
    assert isinstance(make(qwen).scheduler.memory, MixedMemory)
    for options in (WITHOUT, eagle, own_backend):
        assert type(make(qwen, **options).scheduler.memory) is KVMemory
