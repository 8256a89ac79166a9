"""Attention kernels in Triton, and the backend that launches them."""

from __future__ import annotations

import torch

# Tensor cores take no float64.
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
