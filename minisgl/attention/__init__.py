"""Chapter 10: the attention backends, all behind the protocol of chapter 1."""

from minisgl.attention.registry import ATTENTION_BACKENDS, AutoChoice, auto_backend, choose_backend

__all__ = ["ATTENTION_BACKENDS", "AutoChoice", "auto_backend", "choose_backend"]
