"""Engines that share a model: the same number of pages, a fair share of a CPU's memory, balanced devices."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl.config import EngineConfig
from minisgl.engine.build import build_engine, rank_device
from minisgl.engine.memory import MemoryPeak, all_gather_int, check_memory_balance, pages_that_fit
from minisgl.errors import ConfigError
from minisgl.layers.sharding import Communicator
from tests.distributed.ranks import CPU, on_ranks
from tests.model_zoo import tiny_checkpoint

GIB = 1 << 30


class Gathered(Communicator):
    """Two ranks, of which the other one has said this."""

    rank, size = 0, 2

    def __init__(self, other: int) -> None:
        self.other = other

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("not needed")

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.full_like(x, self.other)], dim=1)


def test_every_rank_learns_every_number() -> None:
    assert on_ranks(3, lambda ranks: all_gather_int(10**12 * ranks.rank, ranks, CPU)) == [[0, 10**12, 2 * 10**12]] * 3


def test_ranks_far_apart_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.engine.memory.all_gather_int", lambda value, ranks, device: [value, ranks.other])
    cuda = torch.device("cuda", 0)
    check_memory_balance(80 * GIB, Gathered(78 * GIB), cuda)
    with pytest.raises(ConfigError, match="rank 1 has 79872 MiB free and rank 0 has 81921 MiB"):
        check_memory_balance(80 * GIB + (1 << 20), Gathered(78 * GIB), cuda)


def test_the_rank_with_fewest_pages_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    pages = iter([70, 50])
    monkeypatch.setattr("minisgl.engine.build.pages_that_fit", lambda *arguments, **sizes: next(pages))
    config = EngineConfig(model=str(path), device="cpu", tensor_parallel_size=2)
    assert on_ranks(2, lambda ranks: build_engine(config, path, ranks).kv_cache.num_pages) == [50, 50]


@pytest.mark.parametrize("formula", ["free", "peak"])
def test_ranks_on_a_cpu_share_its_memory(monkeypatch: pytest.MonkeyPatch, formula: str) -> None:
    monkeypatch.setattr("minisgl.engine.memory.free_memory", lambda device: 3 * GIB)
    monkeypatch.setattr("minisgl.engine.memory.total_memory", lambda device: 4 * GIB)
    monkeypatch.setattr("minisgl.engine.memory.measure_worst_steps", lambda *arguments: MemoryPeak())
    trial: Any = SimpleNamespace(device=CPU, state=SimpleNamespace(tokens=torch.empty((1, 1 << 20), device="meta")))
    config = EngineConfig(memory_formula=formula, memory_ratio=0.5, max_running_requests=65536)

    def pages(num_ranks: int) -> int:
        return pages_that_fit(
            config,
            trial,
            model_bytes=0,
            graph_bytes=0,
            free_before=3 * GIB,
            page_bytes=1 << 16,
            num_ranks=num_ranks,
        )

    assert pages(4) == pages(1) // 4


def test_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert rank_device(EngineConfig(device="cuda", tensor_parallel_size=2), 1) == torch.device("cuda", 1)
    assert rank_device(EngineConfig(device="cuda:1"), 0) == torch.device("cuda", 1)
    assert rank_device(EngineConfig(device="cpu", tensor_parallel_size=4), 3) == CPU
    with pytest.raises(ConfigError, match="tensor_parallel_size: 4 ranks need as many GPUs, and 2 are present"):
        rank_device(EngineConfig(device="cuda", tensor_parallel_size=4), 0)
    with pytest.raises(ConfigError, match="device: 'cuda:1' is one GPU and tensor_parallel_size is 2"):
        rank_device(EngineConfig(device="cuda:1", tensor_parallel_size=2), 0)
