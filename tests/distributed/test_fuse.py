"""Norms that take the sum over the ranks upon themselves, in whole models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from minisgl.layers.fused import FusedAllReduceRMSNorm
from minisgl.layers.norm import RMSNorm
from minisgl.layers.sharding import Communicator
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import CausalLM, DecoderLayer
from minisgl.models.fusions import fuse_layers
from minisgl.models.loader import load_model
from tests.distributed.ranks import Position
from tests.model_zoo import random_tokens, tiny_checkpoint
from tests.paged_runner import PagedRunner

CPU = torch.device("cpu")


class Echo(Communicator):
    """A rank that has the whole model, and another one that brings the same numbers to every sum. More than four rows
    are summed and normalised at once."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.sums = 0
        self.fused_sums = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return 2 * x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def fuses_norm(self, x: torch.Tensor) -> bool:
        return len(x) > 4

    def all_reduce_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.fused_sums += 1
        norm = RMSNorm(x.shape[1], eps)
        norm.weight = nn.Parameter(weight, requires_grad=False)
        return norm.add_and_norm(2 * x, residual)


def logits(model: CausalLM, config: ModelConfig) -> torch.Tensor:
    """Of nine tokens at once, then of two more."""
    runner = PagedRunner.of(model, config, torch.float32, rows=1, max_len=16, page_size=4)
    (tokens,) = random_tokens(11)
    return torch.cat([runner.step({0: chunk})[0] for chunk in (tokens[:9], tokens[9:])])


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_norms_take_the_sums_upon_themselves(tmp_path: Path, architecture: str) -> None:
    path, _ = tiny_checkpoint(tmp_path, architecture)
    config, echo = ModelConfig.from_dir(path), Echo()
    model = load_model(path, config, torch.float32, CPU, communicator=echo)
    expected = logits(model, config)
    a_pass = 2 * config.num_layers
    assert echo.sums == 2 * a_pass
    echo.size = 2
    fuse_layers(model, {"norm"})
    echo.size = 1
    torch.testing.assert_close(logits(model, config), expected)
    assert echo.fused_sums == a_pass
    assert echo.sums == 3 * a_pass, "the second pass has too few rows for the fused kernel"


class OwnLayer(DecoderLayer):
    pass


def test_layers_of_a_class_of_their_own_stay_as_they_are(tmp_path: Path) -> None:
    """What they do with the residual stream, which is spread over the ranks between two such norms, is not known."""

    class Model(CausalLM):
        layer = OwnLayer

    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    model = Model(ModelConfig.from_dir(path), Position(0, 2))
    fuse_layers(model, {"norm"})
    assert not [module for module in model.modules() if isinstance(module, FusedAllReduceRMSNorm)]
