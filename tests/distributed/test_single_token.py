"""The decoder for single tokens, in shares: what a rank adds to the stream is its part of a sum."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl.kvcache.pool import KVCache
from minisgl.layers.sharding import Communicator, divide_kv_heads
from minisgl.models.config import ModelConfig
from minisgl.models.loader import load_model
from minisgl.models.single_token import SingleTokenDecoder
from tests.distributed.ranks import CPU, in_turns
from tests.model_zoo import Variant, random_tokens
from tests.paged_runner import PagedRunner

VARIANTS = [
    Variant("biases", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    Variant(
        "tied, one KV head", "Qwen2ForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 32}
    ),
    Variant("QK-norm", "Qwen3ForCausalLM", {"head_dim": 32}),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_steps_give_the_logits_of_the_plain_decoder(tmp_path: Path, variant: Variant) -> None:
    path, _ = variant.checkpoint(tmp_path)
    config = ModelConfig.from_dir(path)
    (prompt,) = random_tokens(30)

    def logits(ranks: Communicator) -> list[tuple[torch.Tensor, torch.Tensor]]:
        model = load_model(path, config, torch.float32, CPU, communicator=ranks)
        kv_heads = divide_kv_heads(config.num_kv_heads, ranks).size
        caches = [KVCache(config.num_layers, kv_heads, config.head_dim, 8, 8, torch.float32, CPU) for _ in range(2)]
        plain, fast = (PagedRunner(model, cache, rows=1, max_len=64) for cache in caches)
        for runner in (plain, fast):
            runner.step({0: prompt})
        assert SingleTokenDecoder.supports(model)
        fast.model = SingleTokenDecoder(model, fast.cache)
        step = {0: np.array([7], dtype=np.int32)}
        return [(fast.step(step)[0], plain.step(step)[0]) for _ in range(2)]

    first, second = in_turns(2, logits)
    for (ours, expected), (theirs, _) in zip(first, second, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
        assert torch.equal(ours, theirs), "ranks agree to the bit"
