"""Bad input, at every edge: a typed error that names the field, nothing allocated, and the next request is served."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from minisgl.errors import ConfigError, InvalidRequest, MiniSGLError, ModelLoadError
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from tests.tiny_text_model import assert_idle_and_clean, text_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
VOCAB = 300
MAX_SEQ_LEN = 64


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("bad"))


@pytest.fixture(scope="module")
def shared_llm(path: Path) -> LLM:
    return LLM(path, page_size=4, num_pages=12, max_seq_len=MAX_SEQ_LEN, max_running_requests=4)


@pytest.fixture
def llm(shared_llm: LLM) -> LLM:
    return shared_llm


def assert_still_serves(llm: LLM) -> None:
    assert_idle_and_clean(llm)
    assert len(llm.generate([7, 8, 9], GREEDY)[0].token_ids) == 4
    assert_idle_and_clean(llm)


# -- prompts -------------------------------------------------------------------------------------------------------

PROMPTS: list[tuple[str, Any, str]] = [
    ("empty ids", [[]], "prompt"),
    ("empty array", [np.array([], dtype=np.int64)], "prompt"),
    ("id out of vocabulary", [[1, VOCAB, 2]], "prompt"),
    ("negative id", [[1, -1]], "prompt"),
    ("huge id", [[1, 2**70]], "prompt"),
    ("float ids", [[1.0, 2.0]], "prompt"),
    ("bool ids", [[True, False]], "prompt"),
    ("text among ids", [[1, "a"]], "prompt"),
    ("nested ids", [[[1, 2], [3, 4]]], "prompt"),
    ("ragged ids", [[[1], [2, 3]]], "prompt"),
    ("None", [None], "prompt"),
    ("a number", [5.5], "prompt"),
    ("bytes", [b"the cat"], "prompt"),
    ("an object", [{"text": "the cat"}], "prompt"),
    ("a lone surrogate", ["\ud800"], "prompt"),
    ("no list at all", 5, "prompts"),
    ("None instead of a list", None, "prompts"),
    ("an object instead of a list", {"prompt": "the cat"}, "prompts"),
    ("no room for output", [[1] * MAX_SEQ_LEN], "prompt"),
    ("far too long", [[1] * 10_000], "prompt"),
]


@pytest.mark.parametrize(("prompts", "field"), [p[1:] for p in PROMPTS], ids=[p[0] for p in PROMPTS])
def test_a_bad_prompt(llm: LLM, prompts: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(prompts, GREEDY)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    if field == "prompt":
        with pytest.raises(InvalidRequest):
            next(llm.stream(prompts[0], GREEDY))
    assert_still_serves(llm)


def test_one_bad_prompt_among_good_ones_computes_nothing(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="token id 300 is outside of the vocabulary of 300 tokens"):
        llm.generate([[1, 2], [300], [3, 4]], GREEDY)
    assert_still_serves(llm)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        (None, "messages"),
        (5, "messages"),
        ("hello", "messages"),
        ({"role": "user", "content": "hello"}, "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "king", "content": "hello"}], "messages[0].role"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "tool", "content": "the template raises"}], "messages"),
        ([[{"role": "user", "content": "hello"}], []], "messages"),
    ],
)
def test_bad_messages(llm: LLM, messages: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.chat(messages, GREEDY)
    assert caught.value.field == field
    assert_still_serves(llm)


# -- parameters ----------------------------------------------------------------------------------------------------

PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 2**40}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": None}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": math.nan}, "top_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": math.nan}, "frequency_penalty"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"logit_bias": {1: 101.0}}, "logit_bias"),
    ({"logit_bias": {"1": 1.0}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop": 5}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a", 5]}, "stop"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"beam_width": 4}, "beam_width"),
    ({"best_of": 2, "max_tokens": 3}, "best_of"),
]


@pytest.mark.parametrize(("params", "field"), PARAMS, ids=[str(p[0]) for p in PARAMS])
def test_bad_parameters(params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**params)
    assert caught.value.field == field


PARAMS_OF_A_MODEL: list[tuple[str, Any, str]] = [
    ("more than the context has room for", SamplingParams(max_tokens=MAX_SEQ_LEN - 1), "max_tokens"),
    ("astronomical", SamplingParams(max_tokens=2**31 - 1), "max_tokens"),
    ("more at least than the context holds", SamplingParams(max_tokens=None, min_tokens=MAX_SEQ_LEN), "min_tokens"),
    ("stop id out of vocabulary", SamplingParams(max_tokens=4, stop_token_ids=[VOCAB]), "stop_token_ids"),
    ("too many stop ids", SamplingParams(max_tokens=4, stop_token_ids=range(65)), "stop_token_ids"),
    (
        "too many together with the model's own",
        SamplingParams(max_tokens=4, stop_token_ids=range(2, 66)),
        "stop_token_ids",
    ),
    ("biased id out of vocabulary", SamplingParams(max_tokens=4, logit_bias={VOCAB: 1.0}), "logit_bias"),
    ("a dict", {"max_tokens": 3}, "params"),
    ("a number", 5, "params"),
    ("text", "greedy", "params"),
    ("too many", [SamplingParams(), SamplingParams()], "params"),
    ("none for a prompt", [], "params"),
    ("a list of dicts", [{"max_tokens": 3}], "params"),
]


@pytest.mark.parametrize(("params", "field"), [p[1:] for p in PARAMS_OF_A_MODEL], ids=[p[0] for p in PARAMS_OF_A_MODEL])
def test_parameters_that_this_model_cannot_fulfil(llm: LLM, params: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate([[1, 2]], params)
    assert caught.value.field == field
    assert_still_serves(llm)


def test_as_many_stop_ids_as_allowed(llm: LLM) -> None:
    output = llm.generate([[1, 2]], SamplingParams(max_tokens=3, min_tokens=2, stop_token_ids=range(2, 65)))[0]
    assert output.finish_reason in ("stop", "length")
    assert_still_serves(llm)


def test_end_tokens_that_the_model_does_not_have_are_ignored(tmp_path: Path) -> None:
    """Some checkpoints are cut down and keep the generation config of the whole model."""
    llm = LLM(text_checkpoint(tmp_path, eos=[50256, 5]), page_size=4, num_pages=12)
    assert len(llm.generate([1, 2], SamplingParams(max_tokens=9, min_tokens=9, seed=1))[0].token_ids) == 9


def test_a_prompt_larger_than_the_pool_is_an_error_result(llm: LLM) -> None:
    outputs = llm.generate([[1] * 10, [2] * 50, [3] * 10], GREEDY)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert "do not fit the KV cache (12 pages of 4 tokens)" in (outputs[1].error or "")
    assert outputs[1].token_ids == []
    assert_still_serves(llm)


# -- options -------------------------------------------------------------------------------------------------------

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"pages": 5}, "pages"),
    ({"page_size": 3}, "page_size"),
    ({"page_size": 512}, "page_size"),
    ({"page_size": 0}, "page_size"),
    ({"page_size": "16"}, "page_size"),
    ({"num_pages": 0}, "num_pages"),
    ({"num_pages": 10**12}, "num_pages"),
    ({"max_seq_len": 0}, "max_seq_len"),
    ({"max_seq_len": 513}, "max_seq_len"),
    ({"max_running_requests": 0}, "max_running_requests"),
    ({"max_running_requests": 2**22, "max_seq_len": 512}, "max_running_requests"),
    ({"max_queued_requests": -1}, "max_queued_requests"),
    ({"max_prefill_tokens": 0}, "max_prefill_tokens"),
    ({"max_prefill_tokens": 1.5}, "max_prefill_tokens"),
    ({"memory_ratio": 0.0}, "memory_ratio"),
    ({"memory_ratio": 1.5}, "memory_ratio"),
    ({"memory_ratio": math.nan}, "memory_ratio"),
    ({"memory_ratio": "half"}, "memory_ratio"),
    ({"memory_ratio": True}, "memory_ratio"),
    ({"request_timeout": "soon"}, "request_timeout"),
    ({"overlap": 1}, "overlap"),
    ({"overlap": "on"}, "overlap"),
    ({"device": None}, "device"),
    ({"queue_policy": 3}, "queue_policy"),
    ({"batch_policy": None}, "batch_policy"),
    ({"admission_policy": 3}, "admission_policy"),
    ({"policy": "fcfs"}, "policy"),
    ({"architecture": 3}, "architecture"),
    ({"architecture": "Perceptron"}, "architecture"),
    ({"eviction_policy": 3}, "eviction_policy"),
    ({"fusions": "norm,rope"}, "fusions"),
    ({"fusions": (1,)}, "fusions"),
    ({"prefix_cache": 3}, "prefix_cache"),
    ({"page_store": 3}, "page_store"),
    ({"prefill_attention": 3}, "prefill_attention"),
    ({"decode_attention": 3}, "decode_attention"),
    ({"sampler": 3}, "sampler"),
    ({"max_running_requests": 10**9}, "max_running_requests"),
    ({"memory_formula": "both"}, "memory_formula"),
    ({"request_timeout": 0.0}, "request_timeout"),
    ({"request_timeout": math.nan}, "request_timeout"),
    ({"dtype": "int8"}, "dtype"),
    ({"device": "tpu"}, "device"),
    ({"device": "cuda:99"}, "device"),
    ({"load_format": "gguf"}, "load_format"),
    ({"seed": -1}, "seed"),
    ({"prefix_cache": "lru"}, "prefix_cache"),
    ({"eviction_policy": "oldest"}, "eviction_policy"),
    ({"page_store": "tape"}, "page_store"),
    ({"page_store": "disk", "page_store_path": "/nowhere"}, "page_store_path"),
    ({"page_store_path": 3}, "page_store_path"),
    ({"prefix_cache": "no.such:Cache"}, "prefix_cache"),
    ({"prefill_attention": "flash"}, "prefill_attention"),
    ({"decode_attention": "flash"}, "decode_attention"),
    ({"sampler": "beam"}, "sampler"),
    ({"queue_policy": "fifo"}, "queue_policy"),
    ({"batch_policy": "lpm"}, "batch_policy"),
    ({"admission_policy": "mixed"}, "admission_policy"),
]


@pytest.mark.parametrize(("options", "field"), OPTIONS, ids=[str(o[0]) for o in OPTIONS])
def test_bad_options_are_refused_before_kv_memory_is_taken(
    path: Path, options: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_kv(*args: object) -> None:
        raise AssertionError("KV memory was allocated")

    monkeypatch.setattr("minisgl.engine.build.KVCache", no_kv)
    with pytest.raises(ConfigError, match=field):
        LLM(path, **{"device": "cpu", "num_pages": 12, **options})


# -- checkpoints ---------------------------------------------------------------------------------------------------


def _remove(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).unlink()


def _config(**changes: Any) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def _truncate(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:-100])


def _tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def rewrite(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return rewrite


def _lose_a_shard(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    half = len(tensors) // 2
    names = list(tensors)
    save_file({name: tensors[name] for name in names[:half]}, path / "model-00001-of-00002.safetensors")
    shards = {name: f"model-0000{1 + (i >= half)}-of-00002.safetensors" for i, name in enumerate(names)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


CHECKPOINTS: list[tuple[str, Callable[[Path], object], str]] = [
    ("no weights", _remove("model.safetensors"), "model.safetensors"),
    ("no config", _remove("config.json"), "config.json"),
    ("a shard is missing", _lose_a_shard, "model-00002-of-00002.safetensors"),
    ("truncated", _truncate("model.safetensors"), "model.safetensors"),
    ("no safetensors file", lambda path: (path / "model.safetensors").write_bytes(b"hello"), "model.safetensors"),
    ("unknown architecture", _config(architectures=["GPT5ForCausalLM"]), "GPT5ForCausalLM"),
    ("config is no JSON", lambda path: (path / "config.json").write_text("{"), "config.json"),
    ("a tensor is missing", _tensors(lambda t: t.pop("model.norm.weight")), "missing: model.norm.weight"),
    ("a tensor too many", _tensors(lambda t: t.update(extra=t["model.norm.weight"].clone())), "unexpected: extra"),
    (
        "a tensor of another shape",
        _tensors(lambda t: t.update({"model.norm.weight": t["model.norm.weight"][:5].clone()})),
        "wrong shape: model.norm.weight",
    ),
    ("the tokenizer is broken", lambda path: (path / "tokenizer.json").write_text("{"), "tokenizer"),
    ("the end ids are broken", lambda path: (path / "generation_config.json").write_text("["), "generation_config"),
]


@pytest.mark.parametrize(("damage", "named"), [c[1:] for c in CHECKPOINTS], ids=[c[0] for c in CHECKPOINTS])
def test_a_damaged_checkpoint(path: Path, tmp_path: Path, damage: Callable[[Path], object], named: str) -> None:
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    damage(copy)
    with pytest.raises(ModelLoadError) as caught:
        LLM(copy, num_pages=12)
    assert named in str(caught.value)


@pytest.mark.parametrize("name", ["", "/no/such/directory", "no spaces allowed"])
def test_a_model_that_is_not_there(name: str) -> None:
    with pytest.raises(ModelLoadError):
        LLM(name)


def test_every_error_is_of_one_family() -> None:
    assert all(issubclass(error, MiniSGLError) for error in (ConfigError, InvalidRequest, ModelLoadError))
    assert issubclass(InvalidRequest, ValueError)
