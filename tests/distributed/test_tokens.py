"""Engines over several processes give the tokens of a single one, in float32 to the last token."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from minisgl.config import EngineConfig
from minisgl.engine.build import build_engine
from minisgl.errors import ConfigError
from minisgl.layers.sharding import Communicator
from minisgl.llm import LLM
from minisgl.outputs import RequestOutput
from minisgl.sampling_params import SamplingParams
from tests.distributed import broken
from tests.distributed.generating import GREEDY, OPTIONS, PROMPTS, generate, generated, tokens
from tests.distributed.ranks import on_ranks
from tests.model_zoo import ARCHITECTURES, Variant, tiny_checkpoint

CASES: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {
    "2 ranks": ("LlamaForCausalLM", {}, 2, {"overlap": True}),
    "4 ranks, 1 KV head, QK-norm": (
        "Qwen3ForCausalLM",
        {"num_key_value_heads": 1},
        4,
        {"control_plane": "zmq", "prefix_cache": "block-hash", "overlap": True},
    ),
    "2 ranks, experts, chunks": (
        "Qwen3MoeForCausalLM",
        {},
        2,
        {"control_plane": "zmq", "batch_policy": "mixed", "max_prefill_tokens": 16, "prefix_cache": "none"},
    ),
    "2 ranks, biases, tied, scarce memory, a ring": (
        "Qwen2ForCausalLM",
        {"tie_word_embeddings": True},
        2,
        {"all_reduce": "ring", "num_pages": 14, "overlap": True},
    ),
    "2 ranks, a window in one of two layers": (
        "Gemma3ForCausalLM",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "num_key_value_heads": 2},
        2,
        {"max_prefill_tokens": 8, "overlap": True},
    ),
    "2 ranks, drafts": ("Qwen3ForCausalLM", {}, 2, {"drafter": "ngram", "overlap": True}),
}


@pytest.mark.parametrize(("architecture", "sizes", "ranks", "options"), CASES.values(), ids=CASES)
def test_tokens_are_those_of_one_rank(
    tmp_path: Path, architecture: str, sizes: dict[str, Any], ranks: int, options: dict[str, Any]
) -> None:
    path, _ = tiny_checkpoint(tmp_path, architecture, **sizes)
    expected = generate(path, **{**options, "all_reduce": "auto", "drafter": "none"})
    assert generate(path, tensor_parallel_size=ranks, **options) == expected


FAMILIES = ("smollm3-window", "olmo3", "granite", "granite4-nope", "phi4-mini", "glm4", "gpt-oss")


@pytest.mark.parametrize(
    "variant", [each for each in ARCHITECTURES if each.name in FAMILIES], ids=lambda variant: variant.name
)
def test_two_engines_in_one_process_give_the_tokens_of_one(tmp_path: Path, variant: Variant) -> None:
    """And its log-probabilities: cached prefixes, chunks, and steps of chunks and decode rows. Ranks are threads, which
    start sooner than processes. Each has a scheduler of its own, and all of these decide alike."""
    path, _ = variant.checkpoint(tmp_path)
    options = {"batch_policy": "mixed", "max_prefill_tokens": 16}
    config = EngineConfig.from_options(str(path), {**OPTIONS, **options, "num_pages": 64, "tensor_parallel_size": 2})

    def answers(ranks: Communicator) -> list[RequestOutput]:
        return generated(path, executor=build_engine(config, path, ranks), **options)

    expected = generated(path, **options)
    for found in on_ranks(2, answers):
        assert tokens(found) == tokens(expected)
        assert _logprobs(found) == pytest.approx(_logprobs(expected), rel=0, abs=1e-4)


def _logprobs(answers: list[RequestOutput]) -> list[float]:
    return [position.logprob for output in answers for position in output.logprobs or ()]


@pytest.mark.parametrize("control_plane", ["shared-memory", "zmq"])
def test_every_rank_keeps_its_part_of_the_pages_that_are_evicted(tmp_path: Path, control_plane: str) -> None:
    """Two conversations that do not fit together take turns, and grow."""
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    one, other = list(range(30)), [5, 6, 7] * 10
    prompts = [one, other, [*one, 1, 2], [*other, 3], [*one, 1, 2, 3, 4], [*other, *[3] * 9]]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

    def answers(**options: Any) -> list[list[int]]:
        with LLM(path, **{**OPTIONS, "num_pages": 14, "overlap": True, **options}) as llm:
            found = [tokens(llm.generate([prompt], params))[0] for prompt in prompts]
            if "page_store" in options:
                assert llm.scheduler.memory.offload.restored >= 8
        return found

    # On each rank, 40 pages of 4 tokens with a head of 8 floats in 2 layers: fewer than are evicted.
    gib = 2 * 40 * (4 * 1 * 8 * 4 * 2 * 2) / 2**30
    stored = answers(tensor_parallel_size=2, control_plane=control_plane, page_store="host", page_store_gib=gib)
    assert stored == answers()


def smol_shape(directory: Path, **sizes: int) -> Path:
    """SmolLM2-135M's widths in two layers, without weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 2,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**config, **sizes}))
    return directory


def test_dummy_weights_are_those_of_one_rank(tmp_path: Path) -> None:
    """SmolLM2's widths with a number of heads that two ranks can share."""
    path = smol_shape(tmp_path / "model", num_attention_heads=8, num_key_value_heads=4)
    options = {**OPTIONS, "num_pages": 64, "load_format": "dummy", "seed": 5}
    expected = tokens(LLM(path, **options).generate(PROMPTS, GREEDY))
    with LLM(path, tensor_parallel_size=2, **options) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        assert tokens(outputs) == expected
        assert llm.attention_backend.name == "torch"
        with pytest.raises(ConfigError, match="the 2 engines are in processes of their own"):
            _ = llm.engine.kv_cache.store
        with llm.trace() as trace:
            llm.generate([1, 2, 3], SamplingParams(max_tokens=3))
        assert {event.track for event in trace.events} == {"host", "requests"}


def test_heads_that_two_ranks_cannot_share_are_an_error_that_names_them(tmp_path: Path) -> None:
    """A rank finds it out, and the caller gets its error. So with a checkpoint that is not there."""
    path = smol_shape(tmp_path / "model")
    options = {**OPTIONS, "num_pages": 64, "tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match="2 ranks cannot share num_attention_heads of 9 equally"):
        LLM(path, load_format="dummy", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: must be an integer of at least 1"),
        ({"tensor_parallel_size": 2, "page_store": f"{broken.__name__}:Store"}, "page_store: .* use 'none'"),
        ({"tensor_parallel_size": 2, "page_store": "disk"}, "page_store: 'disk' copies pages of one device"),
        ({"tensor_parallel_size": 2, "control_plane": "smoke-signals"}, "control_plane: unknown name 'smoke-signals'"),
        ({"tensor_parallel_size": 2, "all_reduce": "abacus"}, "all_reduce: unknown name 'abacus'"),
        ({"distributed_timeout": 0}, "distributed_timeout: must be a positive number"),
        ({"distributed_timeout": None}, "distributed_timeout: must be a positive number"),
        ({"distributed_timeout": math.inf}, "distributed_timeout: must be .* at most 1000000, got inf"),
        ({"distributed_timeout": 3e6}, "distributed_timeout: must be .* at most 1000000"),
        ({"verify_ranks": 1}, "verify_ranks: must be True or False"),
    ],
)
def test_an_option_that_cannot_work_is_named_before_anything_is_started(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = smol_shape(tmp_path / "model")
    with pytest.raises(ConfigError, match=message):
        LLM(path, device="cpu", **options)
