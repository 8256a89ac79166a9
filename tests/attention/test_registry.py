"""What ``attention_backend="auto"`` chooses, and what it says about it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from minisgl.attention import auto_backend, choose_backend
from minisgl.kvcache.kv_cache import KVCache
from minisgl.kvcache.torch_attention import TorchAttention
from tests.attention import CPU


def cache_on(device: str, dtype: torch.dtype = torch.bfloat16) -> KVCache:
    """As far as the choice depends on it."""
    k = SimpleNamespace(device=torch.device(device), dtype=dtype, shape=torch.Size((1, 2, 16, 2, 128)))
    return SimpleNamespace(k=k)


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "packages", "name", "reason"),
    [
        ("cpu", torch.float32, (9, 0), {"triton", "flashinfer"}, "torch", "fastest on a CPU"),
        ("cuda", torch.bfloat16, (9, 0), {"triton", "flashinfer"}, "flashinfer,cascade", "FlashAttention 3 prefills"),
        ("cuda", torch.bfloat16, (9, 0), {"triton"}, "cascade", "but it is not installed"),
        ("cuda", torch.float32, (9, 0), {"triton", "flashinfer"}, "cascade", "the KV cache is float32"),
        ("cuda", torch.bfloat16, (8, 0), {"triton", "flashinfer"}, "cascade", "needs a Hopper GPU"),
        ("cuda", torch.bfloat16, (9, 0), set(), "torch", "Triton is not installed"),
    ],
)
def test_auto_says_what_it_chose_and_why(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    capability: tuple[int, int],
    packages: set[str],
    name: str,
    reason: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for module in ("registry", "flashinfer_support"):
        found = {package: object() for package in packages}
        monkeypatch.setattr(f"minisgl.attention.{module}.find_spec", found.get)
    choice = auto_backend(cache_on(device, dtype))
    assert choice.name == name
    assert reason in choice.reason


def test_auto_on_a_cpu_is_torch() -> None:
    assert isinstance(choose_backend("auto")(KVCache(1, 2, 8, 4, 16, torch.float32, CPU)), TorchAttention)
