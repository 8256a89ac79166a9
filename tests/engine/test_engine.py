"""What the engine refuses before it loads anything."""

from __future__ import annotations

import pytest
import torch

from minisgl import ConfigError
from minisgl.core import EngineConfig
from minisgl.engine.engine import longest_sequence, resolve_kv_dtype


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
