from __future__ import annotations

import pytest
import torch

from minisgl.attention.torch_backend import DenseAttention, causal_mask, grouped_query_attention
from minisgl.context import AttentionSpec, ForwardContext, forward_context
from minisgl.layers.attention import Attention
from minisgl.layers.rotary import RopeSettings, Rotary
from tests.steps import naive_attention, step_of

SPEC = AttentionSpec(layer_id=0, num_heads=6, num_kv_heads=2, head_dim=8, scale=0.3)


def test_causal_mask_shows_the_past_and_the_token_itself() -> None:
    mask = causal_mask(torch.tensor([[3, 4]]), torch.arange(6)[None], None, torch.float32)
    assert mask.shape == (1, 1, 2, 6)
    assert (mask[0, 0] == 0).tolist() == [[True] * 4 + [False] * 2, [True] * 5 + [False]]


def test_a_window_counts_the_token_itself() -> None:
    mask = causal_mask(torch.tensor([[4]]), torch.arange(6)[None], 2, torch.float32)
    assert (mask[0, 0, 0] == 0).tolist() == [False, False, False, True, True, False]


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_query_heads_share_kv_heads_in_order(kv_heads: int) -> None:
    q = torch.randn(2, 3, 6, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 5, kv_heads, 8, dtype=torch.float64)
    out = grouped_query_attention(q, k, v, None, 0.3)
    for head in range(6):
        shared = head // (6 // kv_heads)
        probs = (q[:, :, head] @ k[:, :, shared].transpose(1, 2) * 0.3).softmax(-1)
        torch.testing.assert_close(out[:, :, head], probs @ v[:, :, shared])


@pytest.mark.parametrize("window", [None, 3])
def test_dense_attention_keeps_rows_apart(window: int | None) -> None:
    spec = AttentionSpec(0, 6, 2, 8, 0.3, sliding_window=window)
    batch, inputs = step_of(q_lens=[4, 1, 7], kv_lens=[0, 0, 0])
    q = torch.randn(12, 6, 8, dtype=torch.float64)
    k, v = torch.randn(2, 12, 2, 8, dtype=torch.float64)
    backend = DenseAttention()
    backend.plan(batch, inputs)
    out = backend.forward(q, k, v, spec)
    for start, stop in ((0, 4), (4, 5), (5, 12)):
        expected = naive_attention(q[start:stop], k[start:stop], v[start:stop], spec)
        torch.testing.assert_close(out[start:stop], expected)


def test_the_layer_asks_the_backend_of_the_context() -> None:
    class Recorder:
        capturable = False

        def plan(self, batch: object, inputs: object) -> None: ...

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
            self.seen = (q.shape, k.shape, v.shape, spec)
            return torch.zeros_like(q)

    attention = Attention(12, SPEC, o_bias=True)
    for parameter in attention.parameters():
        parameter.normal_()
    rotation = Rotary(8, 16, RopeSettings())(torch.arange(5, dtype=torch.int32), torch.float32)
    _, inputs = step_of(q_lens=[5], kv_lens=[0])
    backend = Recorder()
    with forward_context(ForwardContext(inputs, backend)):
        out = attention(torch.randn(5, 12), rotation)
    assert backend.seen == ((5, 6, 8), (5, 2, 8), (5, 2, 8), SPEC)
    assert attention.o_proj.bias is not None
    torch.testing.assert_close(out, attention.o_proj.bias.data.expand(5, -1))
    with pytest.raises(RuntimeError, match="forward context"):
        attention(torch.randn(5, 12), rotation)
