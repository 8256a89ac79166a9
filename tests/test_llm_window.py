"""Models with a sliding window in all layers: the tokens are the same as without giving pages back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.batch import Batch, StepPhase
from minisgl.errors import ContextExceeded
from minisgl.llm import LLM
from minisgl.models.config import ModelConfig
from minisgl.request import Request
from minisgl.sampling_params import SamplingParams
from tests.drafters.test_model_drafters import random_head
from tests.drafting import draft_always
from tests.model_zoo import random_tokens, tiny_checkpoint
from tests.tiny_text_model import assert_idle_and_clean

LONG = SamplingParams(temperature=0.0, max_tokens=44, ignore_eos=True)
PROMPTS = [tokens.tolist() for tokens in random_tokens(3, 10, 25, 40, 17)]
PROMPTS += [PROMPTS[3][:30] + PROMPTS[0], PROMPTS[3]]  # with prefixes to share
WINDOW = 11


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("window"), "MistralForCausalLM", sliding_window=WINDOW)[0]


def make(path: Path, **options: Any) -> LLM:
    sizes = {"page_size": 4, "num_pages": 18, "max_prefill_tokens": 16, "max_running_requests": 4}
    return LLM(path, **{**sizes, "dtype": "float32", "device": "cpu", **options})


class Poison:
    """Fills all free pages and the dummy page with NaN before each step, and keeps the books in order."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def begin(self, phase: StepPhase, batch: Batch | None) -> None:
        if phase == "launch":
            memory, cache = self.llm.scheduler.memory, self.llm.engine.kv_cache
            assert batch is not None
            written = torch.from_numpy(batch.out_locs).long() // memory.page_size
            free = torch.from_numpy(memory.pool.is_free).nonzero().flatten()
            assert not torch.isin(written, free).any()
            for kv in (cache.k, cache.v):
                kv[:, free] = torch.nan
                kv[:, memory.num_pages] = torch.nan
            self.llm.scheduler.check()

    def end(self, phase: StepPhase, batch: Batch | None) -> None: ...

    def finish(self, requests: Sequence[Request]) -> None: ...


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    """Tokens of an engine that gives nothing back, and has room for everything at once."""
    llm = make(path, num_pages=256, max_prefill_tokens=512, prefix_cache="none")
    llm.scheduler.memory.window = None
    tokens = [output.token_ids for output in llm.generate(PROMPTS, LONG)]
    assert all(len(set(answer)) > 10 for answer in tokens), "no test if all say the same"
    return tokens


@pytest.mark.parametrize("prefix_cache", ["radix", "block-hash", "none"])
@pytest.mark.parametrize(("batch_policy", "overlap"), [("prefill-first", False), ("mixed", False), ("mixed", True)])
def test_tokens_are_those_of_an_engine_that_keeps_all_pages(
    path: Path, expected: list[list[int]], prefix_cache: str, batch_policy: str, overlap: bool
) -> None:
    llm = make(path, prefix_cache=prefix_cache, batch_policy=batch_policy, overlap=overlap)
    with llm.core.observe(Poison(llm)):
        outputs = llm.generate(PROMPTS, LONG)
        outputs += llm.generate(PROMPTS, LONG)  # with what the first ones left in the cache
    assert [output.token_ids for output in outputs] == expected * 2
    # Cached prompts stay until the window has passed them, and there is not enough memory for all of them.
    assert (sum(output.metrics.preemptions for output in outputs) > 0) == (prefix_cache != "none")
    assert_idle_and_clean(llm)


OURS = {"prefill_attention": "triton", "decode_attention": "triton"}


@pytest.mark.parametrize("options", [{"page_store": "host"}, {"drafter": "ngram"}, OURS], ids=str)
def test_tokens_with_what_else_reads_pages(path: Path, expected: list[list[int]], options: dict[str, Any]) -> None:
    """Pages from the store, rows that verify drafts, and our own kernels."""
    llm = make(path, **options)
    prompts, params = PROMPTS, LONG
    if "drafter" in options:
        draft_always(llm)
    elif "decode_attention" in options:  # interpreted, and slow
        prompts, params = PROMPTS[1:3], dataclasses.replace(LONG, max_tokens=8)
    with llm.core.observe(Poison(llm)):
        outputs = llm.generate(prompts, params)
    wanted = expected[1:3] if len(prompts) == 2 else expected
    assert [output.token_ids for output in outputs] == [tokens[: params.max_tokens] for tokens in wanted]
    assert_idle_and_clean(llm)


@pytest.mark.parametrize("prefix_cache", ["radix", "block-hash", "none"])
def test_an_answer_may_be_longer_than_the_pool(path: Path, prefix_cache: str) -> None:
    params = dataclasses.replace(LONG, max_tokens=None)
    answers = []
    for num_pages in (128, 14):  # of 512 and of 56 positions
        llm = make(path, num_pages=num_pages, prefix_cache=prefix_cache, max_seq_len=150)
        with llm.core.observe(Poison(llm)):
            answers += llm.generate(PROMPTS[1:2], params)
        assert_idle_and_clean(llm)
    assert len(answers[0].token_ids) == 140
    assert answers[0].token_ids == answers[1].token_ids


def test_what_does_not_fit_is_refused_and_what_does_is_not(path: Path) -> None:
    processor = make(path, num_pages=13).core.input_processor
    (fits,) = processor.process(PROMPTS[1], dataclasses.replace(LONG, max_tokens=400))
    processor.check_fits(fits)
    (too_long,) = processor.process(PROMPTS[3], LONG)  # its prompt stays, until the window has passed all of it
    with pytest.raises(ContextExceeded, match="max_tokens: 44 with a prompt of 40 tokens"):
        processor.check_fits(too_long)


@pytest.mark.parametrize("prefix_cache", ["radix", "none"])
def test_what_just_fits_is_answered(path: Path, expected: list[list[int]], prefix_cache: str) -> None:
    """40 tokens of prompt, 11 of the window and one in flight take 13 pages, or 14 where their ends lie badly."""
    llm = make(path, num_pages=14, prefix_cache=prefix_cache)
    outputs = [llm.generate(PROMPTS[3:4], LONG)[0] for _ in range(2)]  # the second finds the first one's prompt
    assert [output.token_ids for output in outputs] == [expected[3]] * 2
    assert_idle_and_clean(llm)


def test_room_for_drafts_follows_from_the_config(path: Path) -> None:
    sizes = [
        make(path, num_pages=64, **options).scheduler.memory.most_pages(1, 400)
        for options in (
            {},
            {"drafter": "ngram"},
            {"drafter": "ngram", "num_draft_tokens": 64},
            {"num_draft_tokens": 64},
        )
    ]
    assert sizes == [7, 8, 23, 7]


def test_a_model_that_has_a_layer_without_window_keeps_all(tmp_path: Path) -> None:
    windows = {}
    for name in ("Mistral", "Phi3", "GptOss", "Gemma3", "Llama"):
        seven = {"sliding_window": 7} if name in ("Mistral", "Phi3") else {}
        path, _ = tiny_checkpoint(tmp_path, f"{name}ForCausalLM", **seven)
        windows[name] = make(path).scheduler.memory.window
    assert windows == {"Mistral": 7, "Phi3": 7, "GptOss": None, "Gemma3": None, "Llama": None}
    config = dataclasses.replace(ModelConfig.from_dir(path), sliding_windows=(4, 9))
    assert config.longest_window == 9


def test_a_drafter_that_reads_hidden_states_by_pages_keeps_all(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "MistralForCausalLM", sliding_window=7, num_hidden_layers=4)
    random_head(path, tmp_path / "head")
    eagle = {"drafter": "eagle", "draft_model": str(tmp_path / "head")}
    assert [make(path, **options).scheduler.memory.window for options in ({}, eagle)] == [7, None]
