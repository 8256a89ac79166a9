"""Select the attention backend: by name, or by the GPU's architecture and what was measured on it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch

from minisgl.attention.hybrid import HybridAttention
from minisgl.attention.torch_backend import PagedAttention, TorchAttention
from minisgl.attention.triton import TRITON_DTYPES
from minisgl.config import EngineConfig
from minisgl.context import AttentionBackend, AttentionChoice
from minisgl.errors import ConfigError
from minisgl.kvcache.pool import KVCache
from minisgl.registry import Registry, build, resolve

_FLASHINFER_DTYPES = (torch.float16, torch.bfloat16)
_FLASHINFER_HEAD_DIMS = (64, 128, 256)
_FLASHINFER_CAPABILITY = (8, 0)


def flashinfer_obstacle(kv_cache: KVCache) -> str | None:
    """Say what keeps FlashInfer from attending over ``kv_cache``, as half a sentence; None if nothing does."""
    device, dtype, head_dim = kv_cache.k.device, kv_cache.k.dtype, kv_cache.k.shape[-1]
    if device.type != "cuda":
        return f"it needs an NVIDIA GPU and the device is {device.type!r}"
    if torch.cuda.get_device_capability(device) < _FLASHINFER_CAPABILITY:
        return f"it needs a GPU of compute capability {_FLASHINFER_CAPABILITY[0]}.{_FLASHINFER_CAPABILITY[1]} or later"
    if dtype not in _FLASHINFER_DTYPES:
        return f"it computes float16 and bfloat16 and the KV cache is {str(dtype).removeprefix('torch.')}"
    if head_dim not in _FLASHINFER_HEAD_DIMS:
        return f"it has kernels for heads of 64, 128 and 256 and the model's have {head_dim}"
    if find_spec("flashinfer") is None:
        return "it is not installed (pip install 'minisgl[cuda]')"
    return None


AttentionFactory = Callable[[KVCache], AttentionBackend]


def _flashinfer(kv_cache: KVCache, version: str | None = None) -> AttentionBackend:
    obstacle = flashinfer_obstacle(kv_cache)
    if obstacle is not None:
        raise ConfigError(
            f"prefill_attention, decode_attention: FlashInfer cannot be used: {obstacle}; choose 'triton' or 'torch'"
        )
    from minisgl.attention.flashinfer import flashinfer_attention

    return flashinfer_attention(kv_cache, version)


ATTENTION_BACKENDS: Registry[AttentionFactory] = {
    "torch": TorchAttention,
    "triton": "minisgl.attention.triton.backend:TritonAttention",
    "cascade": "minisgl.attention.cascade:CascadeAttention",
    "flashinfer": _flashinfer,
    "flashinfer-fa2": partial(_flashinfer, version="fa2"),
    "flashinfer-fa3": partial(_flashinfer, version="fa3"),
}


class Architecture(NamedTuple):
    """What ``"auto"`` stands for on GPUs from a compute capability on."""

    name: str
    capability: tuple[int, int]
    backend: str
    measured_on: str | None  # a card for which `benchmarks/results/attention.json` compares the backends
    reason: str


_FITS = "its largest tile fits the {} of shared memory there; tiles and thresholds are those measured on an H200"
ARCHITECTURES = (
    Architecture("before Ampere", (0, 0), "torch", None, "Triton compiles for compute capability 8.0 and later"),
    Architecture("Ampere", (8, 0), "cascade", None, _FITS.format("99 kB or more")),
    Architecture("Ada", (8, 9), "cascade", None, _FITS.format("99 kB")),
    Architecture(
        "Hopper",
        (9, 0),
        "cascade",
        "H200",
        "it decodes many rows fastest, reads shared prefixes once, and has nothing to compile for long",
    ),
    Architecture("Blackwell", (10, 0), "cascade", None, _FITS.format("227 kB")),
    Architecture("Blackwell, consumer", (12, 0), "cascade", None, _FITS.format("99 kB")),
)
"""In the order of their capabilities. A card that is not listed counts as the one before it."""


def auto_backend(kv_cache: KVCache, features: Collection[str] = ()) -> tuple[str, str]:
    """Name the backend that was fastest, or must do unmeasured, of those that can attend over ``kv_cache``; say why.

    Never FlashInfer: with FlashAttention 3 it gained under 1 % on a mixed workload and compiled for a minute.
    """
    device = kv_cache.k.device
    if device.type == "cpu":
        return "torch", "it is the fastest on a CPU"
    if find_spec("triton") is None:
        return "torch", "the faster backends need Triton, which is not installed"
    if kv_cache.dtype not in TRITON_DTYPES:
        name = str(kv_cache.dtype).removeprefix("torch.")
        return "torch", f"it is the only one that computes in {name}"
    if "soft_cap" in features:
        return "torch", "it is the only one with a soft cap on scores"
    capability = torch.cuda.get_device_capability(device)
    found = next(each for each in reversed(ARCHITECTURES) if each.capability <= capability)
    return found.backend, found.reason


def attention_choice(config: EngineConfig, kv_cache: KVCache, features: Collection[str] = ()) -> AttentionChoice:
    """Name the backends that ``config`` stands for over ``kv_cache``, and say why."""
    names = config.prefill_attention, config.decode_attention
    fastest, reason = auto_backend(kv_cache, features)
    prefill, decode = (fastest if name == "auto" else name for name in names)
    if "auto" not in names:
        reason = "it was asked for" if prefill == decode else "they were asked for"
    elif prefill != decode:
        phase, other = ("prefill", "decode") if names[0] == "auto" else ("decode", "prefill")
        reason = f"{other} was asked for; of {phase}: {reason}"
    return AttentionChoice(prefill, decode, reason)


def select_backend(prefill: str, decode: str, features: Collection[str] = ()) -> AttentionFactory:
    """Return a factory for the backends of two names: a single backend if they are equal, else a `HybridAttention`.

    Names are keys of `ATTENTION_BACKENDS`, ``"module:Class"`` or ``"auto"``. Raises `ConfigError` for an unknown name;
    the factory raises it where the two cannot share a KV cache, or lack one of the ``features`` that the model needs.
    """
    for option, name in (("prefill_attention", prefill), ("decode_attention", decode)):
        if name != "auto":
            resolve(option, name, ATTENTION_BACKENDS)
    return partial(_build, prefill, decode, features)


def _build(prefill: str, decode: str, features: Collection[str], kv_cache: KVCache) -> AttentionBackend:
    names = [auto_backend(kv_cache, features)[0] if name == "auto" else name for name in (prefill, decode)]
    backend = _build_any(names, kv_cache)
    known: Collection[str] = getattr(backend, "features", ())
    for feature in features:
        if feature not in known:
            raise ConfigError(
                f"prefill_attention, decode_attention: this model's attention has {_FEATURE_NAMES[feature]}, which "
                f"{' and '.join(map(repr, dict.fromkeys(names)))} cannot compute; choose 'auto' or 'torch'"
            )
    return backend


_FEATURE_NAMES = {"soft_cap": "a soft cap", "sinks": "sinks"}


def _build_any(names: Sequence[str], kv_cache: KVCache) -> AttentionBackend:
    first = build("prefill_attention", names[0], ATTENTION_BACKENDS, AttentionBackend, kv_cache)
    if names[0] == names[1]:
        return first
    second = build("decode_attention", names[1], ATTENTION_BACKENDS, AttentionBackend, kv_cache)
    if not isinstance(first, PagedAttention) or not isinstance(second, PagedAttention):
        raise ConfigError(
            f"prefill_attention, decode_attention: {names[0]!r} and {names[1]!r} differ, so both have to be a "
            "PagedAttention; give the same name twice to use one backend"
        )
    return HybridAttention(kv_cache, first, second)
