"""Chapter 10: the attention backends, all behind the protocol of chapter 1."""

from minisgl.attention.registry import (
    ATTENTION_BACKENDS,
    attention_choice,
    auto_backend,
    select_backend,
)

__all__ = ["ATTENTION_BACKENDS", "attention_choice", "auto_backend", "select_backend"]
