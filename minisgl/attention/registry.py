"""Attention backends by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from minisgl.attention.flashinfer_support import flashinfer_obstacle
from minisgl.attention.hybrid import HybridAttention
from minisgl.attention.triton_support import TRITON_DTYPES
from minisgl.core.attention import AttentionBackend
from minisgl.core.registry import Registry
from minisgl.errors import ConfigError
from minisgl.kvcache.kv_cache import KVCache
from minisgl.kvcache.paged_attention import PagedAttention
from minisgl.kvcache.torch_attention import TorchAttention

AttentionFactory = Callable[[KVCache], AttentionBackend]

ATTENTION_BACKENDS: Registry[AttentionFactory] = Registry("attention_backend")
ATTENTION_BACKENDS.register("torch")(TorchAttention)


@ATTENTION_BACKENDS.register("triton")
def _triton(kv_cache: KVCache) -> AttentionBackend:
    from minisgl.attention.triton_attention import TritonAttention

    return TritonAttention(kv_cache)


@ATTENTION_BACKENDS.register("cascade")
def _cascade(kv_cache: KVCache) -> AttentionBackend:
    from minisgl.attention.cascade import CascadeAttention

    return CascadeAttention(kv_cache)


def _flashinfer(name: str, version: str | None) -> None:
    """Register FlashInfer, which is imported when it is used."""

    @ATTENTION_BACKENDS.register(name)
    def make(kv_cache: KVCache) -> AttentionBackend:
        obstacle = flashinfer_obstacle(kv_cache)
        if obstacle is not None:
            raise ConfigError(f"attention_backend: {name!r} cannot be used: {obstacle}; choose 'triton' or 'torch'")
        from minisgl.attention.flashinfer_attention import flashinfer_attention

        return flashinfer_attention(kv_cache, version)


_flashinfer("flashinfer", None)
_flashinfer("flashinfer-fa2", "fa2")
_flashinfer("flashinfer-fa3", "fa3")


@dataclass(frozen=True, slots=True)
class AutoChoice:
    """What ``attention_backend="auto"`` stands for.

    Args:
        name: of the backend.
        reason: why, for people to read.
    """

    name: str
    reason: str


def auto_backend(kv_cache: KVCache) -> AutoChoice:
    """What was measured to be fastest, on an H200, of what can attend over ``kv_cache``.

    FlashInfer with FlashAttention 3 prefills long prompts faster than our kernels. That saves less than a hundredth of
    a mixed workload's time and costs a minute of compiling at its first use; ask for it as ``flashinfer,cascade``.
    """
    if kv_cache.k.device.type == "cpu":
        return AutoChoice("torch", "it is the fastest on a CPU")
    if find_spec("triton") is None:
        return AutoChoice("torch", "the faster backends need Triton, which is not installed")
    if kv_cache.dtype not in TRITON_DTYPES:
        name = str(kv_cache.dtype).removeprefix("torch.")
        return AutoChoice("torch", f"it is the only one that computes in {name}")
    return AutoChoice("cascade", "it decodes fastest, reads shared prefixes once, and has nothing to compile for long")


def choose_backend(name: str) -> AttentionFactory:
    """The backend called ``name``.

    Args:
        name: registered; or ``"auto"``, which is what `auto_backend` says; or two names ``"prefill,decode"``.

    Raises:
        ConfigError: no such backend, or more than two.
    """
    names = [part.strip() for part in name.split(",")]
    if len(names) > 2:
        raise ConfigError(f"attention_backend: give one name, or two as 'prefill,decode', got {name!r}")
    factories = [_choose_one(part) for part in names]
    return factories[0] if len(factories) == 1 else _hybrid(name, *factories)


def _choose_one(name: str) -> AttentionFactory:
    if name == "auto":
        return lambda kv_cache: choose_backend(auto_backend(kv_cache).name)(kv_cache)
    return ATTENTION_BACKENDS.get(name)


def _hybrid(name: str, make_prefill: AttentionFactory, make_decode: AttentionFactory) -> AttentionFactory:
    def make(kv_cache: KVCache) -> AttentionBackend:
        prefill, decode = make_prefill(kv_cache), make_decode(kv_cache)
        if not isinstance(prefill, PagedAttention) or not isinstance(decode, PagedAttention):
            raise ConfigError(f"attention_backend: {name!r}: both backends of a hybrid have to be a PagedAttention")
        return HybridAttention(kv_cache, prefill, decode)

    return make
