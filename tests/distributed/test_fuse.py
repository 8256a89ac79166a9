"""Norms that take the sum over the ranks upon themselves, in whole models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from minisgl.distributed.fuse import fuse_all_reduce
from minisgl.distributed.peer_all_reduce import PeerAllReduce
from minisgl.distributed.reducing_norm import ReducingRMSNorm
from minisgl.layers import RMSNorm
from minisgl.models import ModelConfig, load_model
from minisgl.models.decoder import CausalLM, DecoderLayer
from tests.model_zoo import random_tokens, tiny_checkpoint
from tests.paged_runner import PagedRunner

CPU = torch.device("cpu")


class Echo:
    """A rank that has the whole model, and another one that brings the same numbers to every sum."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.sums = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return 2 * x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


class EchoOverPeerMemory(PeerAllReduce):
    """The same for more than four rows."""

    def __init__(self) -> None:
        self.sums = 0

    def fits_norm(self, x: torch.Tensor) -> bool:
        return len(x) > 4

    def add_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.sums += 1
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
    config, echo, peers = ModelConfig.from_dir(path), Echo(), EchoOverPeerMemory()
    model = load_model(path, config, torch.float32, CPU, communicator=echo)
    expected = logits(model, config)
    a_pass = 2 * config.num_layers
    assert echo.sums == 2 * a_pass
    fuse_all_reduce(model, peers)
    torch.testing.assert_close(logits(model, config), expected)
    assert peers.sums == a_pass
    assert echo.sums == 3 * a_pass, "the second pass has too few rows for peer memory"


class OwnLayer(DecoderLayer):
    pass


def test_layers_of_a_class_of_their_own_stay_as_they_are(tmp_path: Path) -> None:
    """What they do with the residual stream, which is spread over the ranks between two such norms, is not known."""

    class Model(CausalLM):
        layer = OwnLayer

    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    model = Model(ModelConfig.from_dir(path))
    fuse_all_reduce(model, EchoOverPeerMemory())
    assert not [module for module in model.modules() if isinstance(module, ReducingRMSNorm)]
