"""SiLU·mul, the non-linearity of gated MLPs."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU (Shazeer 2020): ``silu(gate) × up``.

    Args:
        gate_up: [..., 2 × n], gate in the first half of the last dimension, up in the second.

    Returns:
        [..., n], same dtype.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
