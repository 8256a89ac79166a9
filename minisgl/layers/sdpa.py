"""Attention as one formula: ``softmax(q·k × scale + mask)·v``, and the mask that makes it causal."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# All but cuDNN's, which fails on a mask whose rows are not aligned, as slices of a larger mask are not.
_CUDA_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def causal_mask(
    q_positions: torch.Tensor, k_positions: torch.Tensor, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Additive mask: 0 where the key is visible, −∞ where it is not.

    Args:
        q_positions: [B, Q] positions of the queries.
        k_positions: [B, L] positions of the keys.
        window: number of most recent positions a query sees, its own included; None sees all before.
        dtype: of the queries.

    Returns:
        [B, 1, Q, L].
    """
    q, k = q_positions[:, None, :, None], k_positions[:, None, None, :]
    visible = k <= q
    if window is not None:
        visible &= k > q - window
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def grouped_query_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attention in which several query heads share a KV head (GQA, Ainslie et al. 2023).

    Args:
        q: [B, Q, num_heads, head_dim].
        k, v: [B, L, num_kv_heads, head_dim].
        mask: [B, 1, Q, L] added to the scores; None hides nothing.
        scale: factor on q·k.

    Returns:
        [B, Q, num_heads, head_dim].
    """
    if q.shape[1] == 1:
        # A single query: the heads that share a KV head become the queries of one head, which reads its keys once.
        group = q.squeeze(1).unflatten(1, (k.shape[2], -1))
        return _sdpa(group, k, v, mask, scale).flatten(1, 2).unsqueeze(1)
    return _sdpa(q.transpose(1, 2), k, v, mask, scale).transpose(1, 2)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """PyTorch's kernel. ``q`` and the result are [B, heads, Q, head_dim]; the rest as above."""
    with sdpa_kernel(_CUDA_KERNELS) if q.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(
            q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale, enable_gqa=q.shape[1] > k.shape[2]
        )
