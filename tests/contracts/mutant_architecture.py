"""An architecture that is broken in one way, for its suite to notice."""

from __future__ import annotations

import torch

from minisgl.layers.rotary import Rotary, Rotation
from minisgl.layers.sharding import SINGLE_RANK, Communicator
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import CausalLM


class Unrotated(Rotary):
    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        cos, sin = super().forward(positions, dtype)
        return Rotation(torch.ones_like(cos), torch.zeros_like(sin))


class GraniteForCausalLM(CausalLM):
    """Granite without rotation. As long as its multipliers are 1, the default, it is a Llama otherwise."""

    def __init__(self, config: ModelConfig, communicator: Communicator = SINGLE_RANK) -> None:
        super().__init__(config, communicator)
        self.model.rotary = Unrotated(config.head_dim, config.max_position_embeddings, config.rope)
