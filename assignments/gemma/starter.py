"""Assignment gemma: the starter. README.md beside this file says what to do."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from minisgl.layers.mlp import GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.models.decoder import CausalLM, DecoderLayer


class GemmaNorm(RMSNorm):
    """Gemma's norm. Its weight is the checkpoint's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] → [..., size], same dtype."""
        raise NotImplementedError("Assignment gemma: GemmaNorm.forward")


class GemmaMLP(GatedMLP):
    """Gemma's MLP: the plain one's projections, and another non-linearity."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        raise NotImplementedError("Assignment gemma: GemmaMLP.forward")


class GemmaLayer(DecoderLayer):
    """The plain layer. Class attributes say which norm and which MLP it has, and they are still the plain ones."""


class GemmaForCausalLM(CausalLM):
    """Gemma (Gemma Team 2024)."""

    layer = GemmaLayer
    hidden_act = "gelu_pytorch_tanh"

    @staticmethod
    def differences(hf: PretrainedConfig) -> dict[str, Any]:
        """Fields of `ModelConfig` in which Gemma differs from the plain decoder, with their values."""
        raise NotImplementedError("Assignment gemma: GemmaForCausalLM.differences")
