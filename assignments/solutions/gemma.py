"""Reference solution of ``gemma``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl.layers.embedding import Embedding
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.sharding import SINGLE_RANK, Communicator
from minisgl.models.config import ModelConfig
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


class GemmaEmbedding(Embedding):
    """Scaled by √hidden_size where it begins the residual stream, and not where it is the LM head."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] int32 → [T, hidden_size]; the factor is rounded to the model's dtype, as it was in training."""
        rows = super().forward(input_ids)
        return rows * torch.tensor(rows.shape[-1] ** 0.5, dtype=rows.dtype)


class GemmaLayer(DecoderLayer):
    """The plain layer with other norms and another MLP."""

    def __init__(self, config: ModelConfig, layer_id: int, communicator: Communicator) -> None:
        super().__init__(config, layer_id, communicator)
        self.input_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GemmaMLP(config.hidden_size, config.intermediate_size)


class GemmaForCausalLM(CausalLM):
    """Gemma (Gemma Team 2024)."""

    layer = GemmaLayer
    hidden_act = "gelu_pytorch_tanh"

    def __init__(self, config: ModelConfig, communicator: Communicator = SINGLE_RANK) -> None:
        super().__init__(config, communicator)
        self.model.embed_tokens = GemmaEmbedding(config.vocab_size, config.hidden_size)
        self.model.norm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
