"""The last step of loading a model for the CPU: its weights in the order in which they will be read."""

from __future__ import annotations

import torch
from torch import nn

from minisgl.layers import Embedding, Linear, LMHead, blocked
from minisgl.models.decoder import CausalLM


def block_weights(model: nn.Module) -> None:
    """Give every `Linear` of ``model`` a weight in the CPU's `blocked` layout, one after the other.

    A tied LM head gets a weight of its own, since the embedding looks up rows of the row-major table. That copy is the
    only memory that this takes.
    """
    if isinstance(model, CausalLM) and model.lm_head is None:
        model.lm_head = _untied(model.model.embed_tokens)
    for module in model.modules():
        if isinstance(module, Linear):
            module.weight = blocked(module.weight)


def _untied(table: Embedding) -> LMHead:
    with torch.device("meta"):
        head = LMHead(table.weight.shape[1], table.shard.total, table.communicator)
    head.weight = table.weight
    return head
