"""What our Triton kernels can do, for those who must know without importing Triton."""

from __future__ import annotations

import torch

TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Tensor cores take no float64."""
