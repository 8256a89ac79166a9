"""What goes wrong in mini-sglang (commit 20fcd7f) when it is run with a fake forward pass, and does not here."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from minisgl.detokenizer import IncrementalDetokenizer
from minisgl.errors import InvalidRequest, QueueFull
from minisgl.kvcache.prefix import InsertResult
from minisgl.layers.rotary import RopeSettings, Rotary
from minisgl.llm import LLM
from minisgl.request import FinishReason, Int32Array, RequestState
from minisgl.sampling_params import SamplingParams
from minisgl.tokenizer import Tokenizer
from tests.scheduler.harness import Harness
from tests.scheduler.test_memory import Rows
from tests.tiny_text_model import Scripted, assert_idle_and_clean, directed_llm, text_checkpoint

CACHING = ["radix", "block-hash"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("mini-sglang"))


@pytest.fixture
def llm(path: Path) -> LLM:
    return directed_llm(path, page_size=4, num_pages=64, max_running_requests=4)


# -- 1 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHING)
def test_mini_sglang_1_freed_pages_stay_in_a_running_requests_page_table(cache: str) -> None:
    """An insert that finds the prefix cached frees the duplicate pages, and the running request goes on reading them
    through its page table, while the next request writes into them."""
    rows = Rows(cache)
    duplicate, first = rows.admit([1] * 14), rows.admit([1] * 14)
    own = rows.pages(duplicate)
    rows.prefill(first)
    rows.table.kv_len[duplicate] = 13
    rows.memory.cache_chunk(duplicate, kv_len_before=12)
    newcomer = rows.admit([2] * 40)  # takes the freed pages at once
    assert set(own[:3]) <= set(rows.pages(newcomer))
    assert set(rows.pages(duplicate)).isdisjoint(rows.pages(newcomer))
    assert rows.pages(duplicate)[:3] == rows.pages(first)[:3]
    rows.memory.check()


@pytest.mark.parametrize("cache", CACHING)
@pytest.mark.parametrize("delay", [0, 1])
def test_mini_sglang_1_in_many_steps(cache: str, delay: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same over a thousand random steps: each reads only its own KV, and no mapped page is ever free."""
    rng = np.random.default_rng(1)
    harness = Harness(
        prefix_cache=cache, page_size=2, num_pages=28, max_running=5, max_prefill_tokens=5, vocab=2, delay=delay
    )
    duplicates = _count_duplicates(harness, monkeypatch)
    requests = []
    for _ in range(1000):
        if rng.random() < 0.3:
            prompt = rng.integers(0, 2, rng.choice([1, 2, 3, 16])).tolist()
            requests.append(harness.add(prompt, max_tokens=int(rng.integers(1, 15))))
        harness.step()
    harness.run()
    for request in requests:
        harness.assert_output(request)
    harness.assert_idle_and_clean()
    assert sum(duplicates) > 100, "the case did occur"


def _count_duplicates(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    cache = harness.memory.cache
    insert = cache.insert

    def counting(tokens: Int32Array, pages: Int32Array) -> InsertResult:
        result = insert(tokens, pages)
        counts.append(int((result.pages != pages[: len(result.pages)]).sum()))
        return result

    monkeypatch.setattr(cache, "insert", counting)
    return counts


# -- 2 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [*CACHING, "none"])
def test_mini_sglang_2_an_abort_in_flight_frees_twice(cache: str) -> None:
    """An abort frees the pages of a request whose step is still running, and the step's result frees them again."""
    in_flight_aborts = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        harness = Harness(prefix_cache=cache, page_size=2, num_pages=24, max_running=4, max_prefill_tokens=6, delay=1)
        requests = [harness.add(rng.integers(0, 2, rng.integers(1, 14)).tolist(), max_tokens=8) for _ in range(12)]
        while harness.scheduler.has_work:
            harness.step()
            for request in requests:
                if rng.random() < 0.1:
                    in_flight_aborts += request.slot >= 0 and int(harness.table.in_flight[request.slot]) > 0
                    harness.abort(request)
        harness.run()
        for request in requests:
            harness.assert_output(request)
        harness.assert_idle_and_clean()
    assert in_flight_aborts > 30, "the case did occur"


# -- 3 -------------------------------------------------------------------------------------------------------------


def test_mini_sglang_3_the_rows_of_a_batch_are_in_the_order_of_a_hash() -> None:
    """The decode batch is a set of objects hashed by address, so ranks feed the same rows in different orders."""

    def run() -> list[list[int]]:
        ballast = [object() for _ in range(1000)]  # so that the second run has other addresses
        harness = Harness(max_running=8, num_pages=200, batch_policy="mixed", max_prefill_tokens=9)
        requests = [harness.add([i % 3] * (1 + i % 7), max_tokens=3 + i % 5) for i in range(30)]
        for i in range(0, 30, 7):
            harness.step()
            harness.abort(requests[i])
        order = []
        while harness.scheduler.has_work:
            harness.step()
            order.append(harness.batches[-1].slots.tolist())
            arrivals = harness.table.arrival[harness.batches[-1].slots[: harness.batches[-1].num_decode]]
            assert (np.diff(arrivals) > 0).all()
        del ballast[::2]
        return order

    assert run() == run()


# -- 4 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 1])
def test_mini_sglang_4_one_token_too_many_after_eos(delay: int) -> None:
    """With overlap, the step after the end token is under way already; its token must not reach the client."""
    harness = Harness(delay=delay, vocab=3)
    requests = [harness.add([seed, 1, 2], max_tokens=40, stop_ids=(0,), watched=True) for seed in range(3)]
    seen: dict[int, list[int]] = {request.uid: [] for request in requests}
    while harness.scheduler.has_work:
        for event in harness.step().events:
            seen[event.request.uid].append(event.token_id)
    for request in requests:
        assert request.finish_reason is FinishReason.STOP
        assert seen[request.uid] == request.output
        assert request.output.index(0) == len(request.output) - 1


def test_mini_sglang_4_the_detokenizer_never_forgets(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand finished requests leave a thousand detokenizer states."""
    made: list[weakref.ref[IncrementalDetokenizer]] = []

    class Recorded(IncrementalDetokenizer):
        def __init__(self, tokenizer: Tokenizer) -> None:
            super().__init__(tokenizer)
            made.append(weakref.ref(self))

    monkeypatch.setattr("minisgl.detokenizer.IncrementalDetokenizer", Recorded)
    for _ in range(20):
        list(llm.stream("the cat", GREEDY))
    llm.generate(["the dog"] * 20, SamplingParams(max_tokens=2, stop="zzz", n=2))
    abandoned = llm.stream("the cat", GREEDY)
    next(abandoned)
    abandoned.close()
    gc.collect()
    assert len(made) == 61
    assert not [ref for ref in made if ref() is not None]
    assert_idle_and_clean(llm)


# -- 5, 6 ----------------------------------------------------------------------------------------------------------


def test_mini_sglang_5_bad_requests_kill_the_scheduler(llm: LLM) -> None:
    """``max_tokens=-5`` or an empty prompt raises inside the scheduler's process, and all clients hang."""
    with pytest.raises(InvalidRequest, match="max_tokens"):
        SamplingParams(max_tokens=-5)
    with pytest.raises(InvalidRequest, match="prompt"):
        llm.generate([[]], GREEDY)
    assert_idle_and_clean(llm)
    assert len(llm.generate("the cat", GREEDY)[0].token_ids) == 6


@pytest.mark.parametrize("template", ["{% if %}", "{{ raise_exception('no') }}", "{{ messages[99].content }}"])
def test_mini_sglang_5_a_bad_chat_template_kills_the_tokenizer(tmp_path: Path, template: str) -> None:
    """A template that raises takes the tokenizer's process with it."""
    path = text_checkpoint(tmp_path)
    (path / "chat_template.jinja").write_text(template)
    llm = LLM(path, page_size=4, num_pages=64)
    with pytest.raises(InvalidRequest, match="messages"):
        llm.chat([{"role": "user", "content": "hello"}], GREEDY)
    assert len(llm.generate("the cat", GREEDY)[0].token_ids) == 6


def test_mini_sglang_6_an_over_long_prompt_gets_no_reply(llm: LLM) -> None:
    """It is dropped with a log line. Ours is refused if it exceeds the context, else it ends with an error result."""
    with pytest.raises(InvalidRequest, match="prompt: 600 tokens leave no room"):
        llm.generate([[1] * 600], GREEDY)
    good, beyond_the_pool = llm.generate([[1] * 9, [2] * 300], GREEDY)
    assert (good.finish_reason, beyond_the_pool.finish_reason) == ("length", "error")
    assert "300 tokens" in (beyond_the_pool.error or "")
    assert [d.finish_reason for d in llm.stream([2] * 300, GREEDY)] == ["error"]


def test_mini_sglang_6_an_over_long_max_tokens_changes_the_callers_object(llm: LLM) -> None:
    """It is clipped in place, in the object that the caller goes on using."""
    params = SamplingParams(max_tokens=600)
    with pytest.raises(InvalidRequest, match="509 fit"):
        llm.generate([[1, 2, 3]], params)
    assert params == SamplingParams(max_tokens=600)
    unlimited = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
    llm.generate([[1, 2, 3]], unlimited)
    assert unlimited.max_tokens is None


# -- 7 -------------------------------------------------------------------------------------------------------------


def test_mini_sglang_7_the_finish_reason_is_always_stop(llm: LLM) -> None:
    llm.executor.launcher = Scripted([5, 6, 1])
    reasons = {
        "stop": llm.generate("x", SamplingParams(max_tokens=9))[0].finish_reason,
        "length": llm.generate("x", SamplingParams(max_tokens=2))[0].finish_reason,
        "error": llm.generate([[2] * 300], SamplingParams(max_tokens=2))[0].finish_reason,
    }
    generation = llm.prepare([1, 2], SamplingParams())[0]
    llm.submit(generation)
    llm.abort(generation)
    reasons["abort"] = generation.completion().finish_reason
    assert {name: reason for name, reason in reasons.items() if name != reason} == {}


def test_mini_sglang_7_only_one_eos_id_counts(tmp_path: Path) -> None:
    """The others are in ``generation_config.json``, which is not read: Llama 3 then talks past its turn."""
    llm = directed_llm(text_checkpoint(tmp_path, eos=[1, 44, 45]), page_size=4, num_pages=64)
    for end in (1, 44, 45):
        llm.executor.launcher = Scripted([7, end, 8])
        output = llm.generate("x", SamplingParams(max_tokens=9))[0]
        assert (output.token_ids, output.finish_reason) == ([7, end], "stop")


def test_mini_sglang_7_chat_prompts_get_two_bos_tokens(llm: LLM) -> None:
    """The template writes one and the tokenizer adds another."""
    output = llm.chat([{"role": "user", "content": "hello"}], GREEDY)
    assert not isinstance(output, list)
    assert output.prompt_token_ids.count(0) == 1
    assert output.prompt_token_ids[0] == 0
    assert llm.generate("hello", GREEDY)[0].prompt_token_ids.count(0) == 1


# -- 8 -------------------------------------------------------------------------------------------------------------


def test_mini_sglang_8_the_queue_has_no_bound(path: Path) -> None:
    llm = LLM(path, page_size=4, num_pages=64, max_queued_requests=3)
    waiting = [llm.prepare([1, 2], GREEDY)[0] for _ in range(4)]
    for generation in waiting[:3]:
        llm.submit(generation)
    with pytest.raises(QueueFull):
        llm.submit(waiting[3])
    while llm.scheduler.has_work:
        llm.step()
    assert [generation.finished for generation in waiting] == [True, True, True, False]


def test_mini_sglang_8_the_head_of_the_line_blocks_all() -> None:
    """A request that waits for memory keeps everybody behind it waiting, however little they need."""
    harness = Harness(num_pages=10, page_size=4, prefix_cache="none")
    running, large = harness.add([0] * 20, max_tokens=16), harness.add([1] * 36, max_tokens=2)
    small = harness.add([2] * 3, max_tokens=2)
    while small.finish_reason is None:
        harness.step()
    assert running.state is RequestState.DECODE
    assert large.state is RequestState.WAITING
    harness.run()
    assert large.finish_reason is FinishReason.LENGTH


def test_mini_sglang_8_prefill_starves_decode() -> None:
    """As long as prompts arrive, no running request gets another token."""
    harness = Harness(num_pages=512, max_running=256, max_prefill_tokens=4, prefix_cache="none")
    running = harness.add([0] * 4, max_tokens=6)
    steps = 0
    while running.finish_reason is None:
        harness.add([1] * 4, max_tokens=1)
        harness.step()
        steps += 1
        assert steps <= 60
    harness.assert_output(running)


def test_mini_sglang_8_there_are_no_timeouts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 1.0)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    llm = LLM(path, page_size=4, num_pages=64, request_timeout=200.0)
    output = llm.generate([1, 2], SamplingParams(max_tokens=500, ignore_eos=True))[0]
    assert output.finish_reason == "error"
    assert "time limit" in (output.error or "")
    assert 0 < len(output.token_ids) < 200
    assert_idle_and_clean(llm)


# -- 9 -------------------------------------------------------------------------------------------------------------


def test_mini_sglang_9_yarn_without_its_attention_factor() -> None:
    """Frequencies are stretched, but cos and sin are not multiplied by 0.1 ln(factor) + 1."""
    scaling = {"factor": 4.0, "original_max_position_embeddings": 128}
    config = AutoConfig.for_model(
        "llama",
        hidden_size=64,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, **scaling},
    )
    positions = torch.arange(512)
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    ours = Rotary(16, 512, RopeSettings("yarn", 10000.0, scaling))(positions, torch.float32)
    assert torch.allclose(ours.cos[:, 0], theirs[0][0], atol=1e-6)
    assert torch.allclose(ours.sin[:, 0, 8:], theirs[1][0, :, 8:], atol=1e-6)
    assert float(ours.cos[0, 0, 0]) == pytest.approx(0.1 * np.log(4.0) + 1.0)


@pytest.fixture
def flat_llm(tmp_path: Path) -> LLM:
    """All logits of this model are 0, so that bias and penalties alone decide: the lowest id wins a tie."""
    path = text_checkpoint(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"].zero_()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return directed_llm(path, page_size=4, num_pages=64)


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        ({}, [7, 7, 7, 7]),
        ({"presence_penalty": 1.5}, [7, 0, 1, 2]),
        ({"frequency_penalty": 0.75}, [7, 7, 0, 1]),
        ({"repetition_penalty": 2.0, "logit_bias": {7: 8.0, 8: 6.0}}, [7, 8, 7, 7]),
    ],
)
def test_mini_sglang_9_penalties_are_accepted_and_ignored(
    flat_llm: LLM, params: dict[str, Any], tokens: list[int]
) -> None:
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "logit_bias": {7: 1.0}}
    output = flat_llm.generate([[50, 51]], SamplingParams(**{**greedy, **params}))[0]
    assert output.token_ids == tokens


def test_mini_sglang_9_n_and_stop_are_accepted_and_ignored(llm: LLM) -> None:
    llm.executor.launcher = Scripted([*llm.tokenizer.encode("the cat and the dog")[1:], 1])
    output = llm.generate("x", SamplingParams(n=3, stop=" and", max_tokens=40))[0]
    assert [completion.text for completion in output.completions] == ["the cat"] * 3
    assert {completion.finish_reason for completion in output.completions} == {"stop"}
