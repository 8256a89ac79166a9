"""What the engine refuses before it loads anything, and the order in which it builds its parts."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import minisgl.engine.build as construction
from minisgl.config import EngineConfig
from minisgl.engine.build import build_engine, resolve_kv_dtype, warn_if_occupied
from minisgl.engine.memory import INT32_MAX, longest_sequence
from minisgl.errors import ConfigError
from minisgl.models.config import ModelConfig
from tests.model_zoo import tiny_checkpoint


def test_the_longest_sequence_is_what_was_asked_for_or_what_the_model_has() -> None:
    assert longest_sequence(EngineConfig(max_seq_len=4096), 40960) == 4096
    assert longest_sequence(EngineConfig(), 40960) == 40960


def test_the_last_entry_of_the_largest_token_table_has_an_int32_for_its_index() -> None:
    rows = 65536 + 1
    longest = longest_sequence(EngineConfig(max_running_requests=rows - 1), 131_072)
    assert rows * longest <= INT32_MAX < rows * (longest + 1)


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


def test_each_part_is_built_after_those_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is read before the model takes its share. A runner is tried before the pages are counted, which have to
    leave room for it, and built last, since it may record where everything else lies."""
    steps: list[str] = []

    def watched(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any, **options: Any) -> Any:
            steps.append(name)
            return make(*arguments, **options)

        return noting

    names = ("free_memory", "load_model", "measure_graph_memory", "pages_that_fit", "build_runner", "Engine")
    for name in (*names, "KVCache", "DeviceState", "ModelRunner"):
        monkeypatch.setattr(construction, name, watched(name, getattr(construction, name)))
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    build_engine(EngineConfig(model=str(path), device="cpu"), path)
    parts = ["KVCache", "DeviceState", "ModelRunner"]
    before = ["free_memory", "load_model", *parts, "measure_graph_memory", "pages_that_fit"]
    assert steps == [*before, *parts, "build_runner", "Engine"]


@pytest.mark.parametrize(("held", "warns"), [(14_000_000_000, False), (132_800_000_000, True)])
def test_memory_that_another_engine_holds_is_warned_of(
    caplog: pytest.LogCaptureFixture, held: int, warns: bool
) -> None:
    warn_if_occupied(held, 150_100_000_000)
    assert ("132.8 of 150.1 GB on this device are held by this process already" in caplog.text) == warns
    assert ("Call close() on an LLM" in caplog.text) == warns


class Warned(Exception):
    """Raised where the engine would go on to measure a device that is not there."""


def test_the_warning_comes_before_an_engine_is_sized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def free_memory(device: torch.device) -> int:
        raise Warned

    monkeypatch.setattr(construction, "rank_device", lambda config, rank: torch.device("cuda"))
    monkeypatch.setattr(construction, "device_guard", lambda device: nullcontext())
    monkeypatch.setattr(construction, "total_memory", lambda device: 150_100_000_000)
    monkeypatch.setattr(construction, "free_memory", free_memory)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 132_800_000_000)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    with pytest.raises(Warned):
        build_engine(EngineConfig(model=str(path), sampler="default"), path)
    assert "132.8 of 150.1 GB on this device are held by this process already" in caplog.text


def test_an_engine_whose_config_has_been_read_needs_no_transformers(tmp_path: Path) -> None:
    """Which takes longer to import than PyTorch; the driver of ranks has read it for all of them."""
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    code = """
import pickle, sys
from pathlib import Path
from minisgl.config import EngineConfig
from minisgl.distributed import rank_process
from minisgl.engine.build import build_engine
model_config = pickle.loads(bytes.fromhex(sys.argv[2]))
build_engine(EngineConfig(num_pages=8, device="cpu"), Path(sys.argv[1]), model_config=model_config)
print("transformers" in sys.modules)
"""
    command = [sys.executable, "-c", code, path, pickle.dumps(ModelConfig.from_dir(path)).hex()]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
