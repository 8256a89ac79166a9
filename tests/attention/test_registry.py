"""What ``attention_backend="auto"`` chooses, and what it says about it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from minisgl.attention import auto_backend, choose_backend
from minisgl.kvcache.kv_cache import KVCache
from minisgl.kvcache.torch_attention import TorchAttention
from tests.steps import CPU


def cache_on(device: str, dtype: torch.dtype = torch.bfloat16) -> KVCache:
    """As far as the choice depends on it."""
    k = SimpleNamespace(device=torch.device(device), shape=torch.Size((1, 2, 16, 2, 128)))
    return SimpleNamespace(k=k, dtype=dtype)


@pytest.mark.parametrize(
    ("device", "dtype", "triton", "name", "reason"),
    [
        ("cpu", torch.float32, True, "torch", "fastest on a CPU"),
        ("cuda", torch.bfloat16, True, "cascade", "decodes fastest"),
        ("cuda", torch.float32, True, "cascade", "decodes fastest"),
        ("cuda", torch.float64, True, "torch", "computes in float64"),
        ("cuda", torch.bfloat16, False, "torch", "Triton, which is not installed"),
    ],
)
def test_auto_says_what_it_chose_and_why(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, triton: bool, name: str, reason: str
) -> None:
    monkeypatch.setattr("minisgl.attention.registry.find_spec", lambda package: object() if triton else None)
    choice = auto_backend(cache_on(device, dtype))
    assert choice.name == name
    assert reason in choice.reason


def test_auto_on_a_cpu_is_torch() -> None:
    assert isinstance(choose_backend("auto")(KVCache(1, 2, 8, 4, 16, torch.float32, CPU)), TorchAttention)
