"""Reference solution of ``gemma``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig

from minisgl.layers.mlp import GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.models.decoder import CausalLM, DecoderLayer


class GemmaNorm(RMSNorm):
    """A weight of 0 leaves the normalised input as it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] in and out; computed in float32 at least, since 1 + w has no room in half precision."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.weight.shape, 1 + self.weight.to(wide), self.eps).to(x.dtype)


class GemmaMLP(GatedMLP):
    """GeGLU (Shazeer 2020), with the approximation of GELU by a tanh."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] in and out."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: torch.Tensor = self.down_proj(F.gelu(gate, approximate="tanh") * up)
        return out


class GemmaLayer(DecoderLayer):
    """The plain layer with another norm and another MLP."""

    norm_class = GemmaNorm
    mlp_class = GemmaMLP


class GemmaForCausalLM(CausalLM):
    """Gemma (Gemma Team 2024)."""

    layer = GemmaLayer
    hidden_act = "gelu_pytorch_tanh"

    @staticmethod
    def differences(hf: PretrainedConfig) -> dict[str, Any]:
        """The residual stream begins with embeddings times √hidden_size; the tied LM head has no such factor."""
        return {"embedding_multiplier": hf.hidden_size**0.5}
