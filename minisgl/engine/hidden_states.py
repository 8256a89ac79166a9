"""Hidden states that the engine keeps for a drafter which reads them, beside the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from minisgl.context import get_forward_context
from minisgl.errors import ConfigError
from minisgl.kvcache.pool import KVCache
from minisgl.models.decoder import CausalLM


class HiddenStates:
    """The residual stream before some of the model's ``layers``, of every token that is in the KV cache.

    A token's states lie at the location of its KV, so they share the fate of its page: found again with a cached
    prefix, moved with a slot, overwritten where a draft was wrong. Each step stores those of the tokens that it feeds,
    in CUDA graphs too, since hooks on the layers do it. A model without hooks costs nothing.
    """

    def __init__(self, model: nn.Module, layers: Sequence[int], kv_cache: KVCache) -> None:
        if not isinstance(model, CausalLM) or not all(0 <= layer < model.config.num_layers for layer in layers):
            raise ConfigError(
                f"drafter: it reads the hidden states before layers {', '.join(map(str, layers))}, and this model has "
                "no such layers; use a drafter that was made for this model"
            )
        locations = (kv_cache.num_pages + 1) * kv_cache.page_size
        # A page that a page store brings back has the states of another one: guesses from them are worse, answers are
        # not. Cleared, because states that nobody has written must at least be finite.
        self.values = torch.zeros(
            (locations, len(layers), model.config.hidden_size), dtype=kv_cache.dtype, device=kv_cache.k.device
        )
        for column, layer in enumerate(layers):
            model.model.layers[layer].register_forward_pre_hook(partial(self._keep, column))

    def _keep(self, column: int, layer: nn.Module, inputs: tuple[torch.Tensor, torch.Tensor | None, object]) -> None:
        x, residual, _ = inputs
        locations = get_forward_context().inputs.out_locs.long()
        self.values[:, column].index_copy_(0, locations, x if residual is None else x + residual)
