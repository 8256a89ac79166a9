"""Tiny models of ours, where the kernels run."""

from __future__ import annotations

from pathlib import Path

import torch

from minisgl.models.config import ModelConfig
from minisgl.models.decoder import CausalLM
from minisgl.models.loader import load_model
from tests.model_zoo import Variant

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load(
    directory: Path, variant: Variant, dtype: torch.dtype = torch.float32, quantization: str = "auto"
) -> tuple[CausalLM, ModelConfig]:
    """The model of a tiny checkpoint that is saved under ``directory``, and its config."""
    path, _ = variant.checkpoint(directory)
    config = ModelConfig.from_dir(path)
    model = load_model(path, config, dtype, DEVICE, quantization=quantization)
    assert isinstance(model, CausalLM)
    return model, config
