"""The LLM's options of weights and memory: dummy weights, dtypes, both sizing formulas, and lengths left open."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.errors import ConfigError, EngineDead, InvalidRequest
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from tests.tiny_text_model import text_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("llm"))


def make(path: Path, **options: Any) -> LLM:
    return LLM(path, **{"page_size": 4, "num_pages": 256, "dtype": "float64", "device": "cpu", **options})


def test_dummy_weights_need_a_config_and_nothing_else(path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    answers = [make(tmp_path, load_format="dummy", seed=seed).generate([[1, 2, 3]], GREEDY)[0] for seed in (0, 0, 1)]
    assert answers[0].token_ids == answers[1].token_ids != answers[2].token_ids
    assert answers[0].text == ""
    llm = make(tmp_path, load_format="dummy")
    for call, field in (
        (lambda: llm.generate("the cat"), "prompt"),
        (lambda: llm.generate([1], SamplingParams(stop="x")), "stop"),
        (lambda: llm.chat([{"role": "user", "content": "hi"}]), "messages"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            call()
        assert caught.value.field == field
    streamed = list(llm.stream([1, 2, 3], GREEDY))
    assert [t for d in streamed for t in d.token_ids] == answers[0].token_ids


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
def test_dtypes(path: Path, name: str) -> None:
    llm = make(path, dtype=name)
    dtype = getattr(torch, name)
    assert {parameter.dtype for parameter in llm.engine.model.parameters()} == {dtype}
    assert llm.engine.kv_cache.k.dtype == dtype
    assert len(llm.generate("the cat", GREEDY)[0].token_ids) == 12


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
def test_keys_and_values_of_eight_bits_with_every_dtype(path: Path, name: str) -> None:
    llm = make(path, dtype=name, kv_dtype="fp8")
    assert llm.engine.kv_cache.k.dtype == torch.float8_e4m3fn
    assert {parameter.dtype for parameter in llm.engine.model.parameters()} == {getattr(torch, name)}
    assert len(llm.generate("the cat", GREEDY)[0].token_ids) == 12


def test_keys_and_values_of_eight_bits_change_logits_a_little(path: Path) -> None:
    """With random weights, whose attention is far less sure than a trained model's."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=20)
    prompts = [list(range(1, 2 + i)) for i in range(60)]
    exact, rounded = (make(path, kv_dtype=name).generate(prompts, params) for name in ("auto", "fp8"))
    differences = []
    for a, b in zip(exact, rounded, strict=True):
        assert a.logprobs is not None
        assert b.logprobs is not None
        of_b = dict(b.logprobs[0].top)
        differences += [abs(logprob - of_b[token]) for token, logprob in a.logprobs[0].top if token in of_b]
    assert len(differences) > 60 * 15
    assert 0.01 < sum(differences) / len(differences) < 0.2
    assert max(differences) < 2.0
    assert sum(a.token_ids == b.token_ids for a, b in zip(exact, rounded, strict=True)) >= 50


def test_auto_is_float32_on_the_cpu(path: Path) -> None:
    assert make(path, dtype="auto").engine.dtype == torch.float32


@pytest.mark.parametrize(("formula", "budget"), [("free", 900_000), ("peak", 500_000)])
@pytest.mark.parametrize(("kv_dtype", "itemsize"), [("auto", 8), ("fp8", 1)])
def test_the_pool_is_sized_by_either_formula(
    path: Path, formula: str, budget: int, kv_dtype: str, itemsize: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free: 0.9 of 1 MB + the model, less the model. Peak: 0.9 of 1 MB, less 400 kB in use, and the warm-up."""
    model_bytes = make(path).engine.model_bytes
    scale = 1_000_000
    free_before = (scale + model_bytes / 0.9) if formula == "free" else scale - 400_000
    monkeypatch.setattr("minisgl.engine.build.free_memory", lambda device: free_before)
    monkeypatch.setattr("minisgl.engine.memory.free_memory", lambda device: scale - 400_000)
    monkeypatch.setattr("minisgl.engine.memory.total_memory", lambda device: scale)
    monkeypatch.setattr("minisgl.engine.memory.measure_peak_memory", _no_peak)
    llm = make(path, num_pages=None, memory_formula=formula, memory_ratio=0.9, kv_dtype=kv_dtype)
    engine = llm.engine
    assert engine.num_pages == budget // engine.page_bytes
    assert engine.page_bytes == 2 * 2 * 8 * 4 * itemsize * 2  # k and v, heads, width, tokens, bytes, layers
    assert engine.kv_cache.k.nbytes + engine.kv_cache.v.nbytes == (engine.num_pages + 1) * engine.page_bytes


class _no_peak:
    peak = current = 12345

    def __init__(self, device: torch.device) -> None: ...
    def __enter__(self) -> _no_peak:
        return self

    def __exit__(self, *error: object) -> None: ...


@pytest.mark.parametrize("formula", ["free", "peak"])
def test_the_real_memory_has_room_for_pages(path: Path, formula: str) -> None:
    llm = make(path, num_pages=None, memory_formula=formula, memory_ratio=1.0, max_running_requests=2)
    assert llm.engine.num_pages == 2 * 512 // 4, "never more than all slots at full length, on the CPU"
    assert len(llm.generate("the cat", GREEDY)[0].token_ids) == 12


def test_memory_for_not_even_one_page_is_a_config_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.engine.build.free_memory", lambda device: 1000)
    with pytest.raises(ConfigError, match=r"not one .*page fits"):
        make(path, num_pages=None)


def test_no_max_tokens_fills_the_context_or_the_pool(path: Path) -> None:
    unlimited = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    context = make(path, max_seq_len=40).generate([[1] * 10], unlimited)[0]
    assert (len(context.token_ids), context.finish_reason) == (30, "length")
    pool = make(path, num_pages=6).generate([[1] * 10], unlimited)[0]
    assert (len(pool.token_ids), pool.finish_reason) == (15, "length")  # 24 positions, and a token that needs none


def test_a_closed_engine_gives_its_memory_back_and_says_so(path: Path) -> None:
    """A second engine is sized by the memory that is free, so one that is done with must not keep any."""
    llm = make(path)
    memory = [weakref.ref(llm.engine.kv_cache), weakref.ref(llm.engine.model), weakref.ref(llm.engine.runner)]
    llm.close()
    assert [each() for each in memory] == [None] * 3
    with pytest.raises(EngineDead, match="was closed"):
        llm.generate("the cat", GREEDY)
    llm.close()
