"""Weights in the memory order that the CPU's matrix kernels read them in.

A matrix kernel works through small blocks that fit the vector registers, and a row-major weight is copied into that
order at every call. Beside the arithmetic of a long prompt the copy is little; in a decode step, which uses each weight
for a few tokens only, it takes more time than the arithmetic. oneDNN can keep a weight in its kernel's order, a
"blocked layout", so that the copy is made once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def blocked(weight: nn.Parameter) -> nn.Parameter:
    """A copy of ``weight`` ([out_features, in_features]) in oneDNN's layout; ``to_dense()`` of it is the weight again.

    Only float32 on the CPU has one; any other weight is returned as it is.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return weight
    return nn.Parameter(torch.ops.mkldnn._reorder_linear_weight(weight), requires_grad=False)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x Wᵀ + b`` for a weight of either layout.

    Args:
        x: [T, in_features].
        weight: [out_features, in_features], row-major or `blocked`.
        bias: [out_features] or None.

    Returns:
        [T, out_features].
    """
    if weight.is_mkldnn:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)
