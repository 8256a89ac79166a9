"""Assignment gemma: the starter. README.md beside this file says what to do."""

from __future__ import annotations

import torch
from torch import nn

from minisgl.layers.rotary import Rotation
from minisgl.layers.sharding import Communicator
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import CausalLM


class GemmaLayer(nn.Module):
    """One layer of Gemma. Its parameters are named as in the checkpoint."""

    def __init__(self, config: ModelConfig, layer_id: int, communicator: Communicator) -> None:
        super().__init__()
        raise NotImplementedError("Assignment gemma: GemmaLayer.__init__")

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `minisgl.models.decoder.DecoderLayer.forward`."""
        raise NotImplementedError("Assignment gemma: GemmaLayer.forward")


class GemmaForCausalLM(CausalLM):
    """Gemma (Gemma Team 2024)."""

    layer = GemmaLayer
    hidden_act = "gelu_pytorch_tanh"
