"""Attention kernels in Triton, and the backend that launches them."""

from __future__ import annotations

import torch

TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # tensor cores take no float64
