"""Which communicator the names in the options stand for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from minisgl.distributed import communicator
from minisgl.distributed.communicator import TorchCommunicator, peer_all_reduce_of, select_communicator
from minisgl.distributed.peer_all_reduce import PeerAllReduce
from minisgl.errors import ConfigError
from minisgl.layers.sharding import SINGLE_RANK, Communicator
from tests.distributed.ranks import CPU, on_ranks

CUDA = torch.device("cuda", 0)


def cannot_share(timeout: float, group: dist.ProcessGroup, device: torch.device) -> Communicator:
    raise ConfigError("peer memory: ranks [1] could not make or map 96 bytes")


def test_where_memory_cannot_be_shared_auto_leaves_everything_to_torch(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def sum_up(ranks: Communicator) -> tuple[bool, float]:
        return peer_all_reduce_of(ranks) is None, float(ranks.all_reduce(torch.full((1,), 1.0 + ranks.rank)))

    monkeypatch.setattr(communicator, "_over_peer_memory", cannot_share)
    assert on_ranks(2, sum_up, select_communicator("auto", CUDA, 5.0)) == [(True, 3.0)] * 2
    said = capfd.readouterr().err
    assert "all-reduces go through NCCL alone. peer memory: ranks [1] could not make or map 96 bytes" in said


def test_between_cpu_ranks_auto_is_torch() -> None:
    assert select_communicator("auto", CPU, 5.0) is TorchCommunicator


def test_who_asks_for_peer_memory_where_there_is_none_is_told() -> None:
    with pytest.raises(ConfigError, match="'peer-memory' needs CUDA devices and Triton; use 'torch'"):
        select_communicator("peer-memory", CPU, 5.0)


@pytest.mark.parametrize("name", ["auto", "peer-memory"])
def test_kernels_wait_as_long_as_the_options_say(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    waits: list[float] = []

    class Peers(PeerAllReduce):
        def __init__(self, *arguments: object, timeout: float) -> None:
            waits.append(timeout)

    monkeypatch.setattr("minisgl.distributed.peer_all_reduce.PeerAllReduce", Peers)
    made = on_ranks(
        1, lambda ranks: isinstance(peer_all_reduce_of(ranks), Peers), select_communicator(name, CUDA, 1800.0)
    )
    assert made == [True]
    assert waits == [1800.0]


def test_one_rank_has_no_peers() -> None:
    assert peer_all_reduce_of(SINGLE_RANK) is None
