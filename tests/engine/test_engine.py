"""What the engine refuses before it loads anything, and the order in which it builds its parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import minisgl.engine.engine as construction
from minisgl import ConfigError
from minisgl.core import EngineConfig
from minisgl.engine.engine import Engine, longest_sequence, resolve_kv_dtype
from minisgl.engine.runner import EagerRunners, EngineParts, StepRunner
from minisgl.kvcache.torch_attention import TorchAttention
from minisgl.models import ModelConfig
from tests.model_zoo import tiny_checkpoint


def test_the_longest_sequence_is_what_was_asked_for_or_what_the_model_has() -> None:
    assert longest_sequence(EngineConfig(max_seq_len=4096), 40960) == 4096
    assert longest_sequence(EngineConfig(), 40960) == 40960


def test_tables_that_an_int32_cannot_index_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_seq_len: 100000 tokens for 65536"):
        longest_sequence(EngineConfig(max_running_requests=65536, max_seq_len=100_000), 131_072)


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("cuda")])
def test_keys_and_values_are_in_the_models_dtype_or_in_eight_bits(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert resolve_kv_dtype("auto", torch.bfloat16, device) == torch.bfloat16
    assert resolve_kv_dtype("fp8", torch.bfloat16, device) == torch.float8_e4m3fn


def test_a_gpu_without_eight_bit_floats_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"kv_dtype: 'fp8' needs .* 8\.9 or later, this has 8\.6; use 'auto'"):
        resolve_kv_dtype("fp8", torch.bfloat16, torch.device("cuda"))
    assert resolve_kv_dtype("auto", torch.bfloat16, torch.device("cuda")) == torch.bfloat16


class WatchedRunners(EagerRunners):
    """Notes when a runner is tried, and when it is built."""

    def __init__(self, steps: list[str]) -> None:
        self.steps = steps

    def memory(self, parts: EngineParts) -> int:
        self.steps.append("trial")
        return super().memory(parts)

    def build(self, parts: EngineParts) -> StepRunner:
        self.steps.append("runner")
        return super().build(parts)


def test_each_part_is_built_after_those_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is read before the model takes its share. A runner is tried before the pages are counted, which have to
    leave room for it, and built last, since it may record where everything else lies."""
    steps: list[str] = []

    def watched(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any) -> Any:
            steps.append(name)
            return make(*arguments)

        return noting

    for name in ("free_memory", "load_model", "pages_that_fit", "KVCache", "DeviceState"):
        monkeypatch.setattr(construction, name, watched(name, getattr(construction, name)))
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    attention = watched("attention", TorchAttention)
    config = EngineConfig(model=str(path), device="cpu", sampler="default")
    Engine(config, path, ModelConfig.from_dir(path), attention, runners=WatchedRunners(steps))
    parts = ["KVCache", "DeviceState", "attention"]
    assert steps == ["free_memory", "load_model", *parts, "trial", "pages_that_fit", *parts, "runner"]
