"""A kernel that gives a peer up returns, and what it returns is nonsense: it must end the engine, and reach nobody."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl import LLM, EngineDead
from minisgl.core import Communicator
from minisgl.distributed import TorchCommunicator
from minisgl.distributed.peer_all_reduce import PeerAllReduce
from tests.distributed import broken
from tests.distributed.generating import GREEDY, OPTIONS, PROMPTS, step_for_ever, tokens
from tests.distributed.ranks import on_ranks
from tests.model_zoo import tiny_checkpoint


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")[0]


def start(path: Path, communicator: str) -> LLM:
    """Two ranks that report as they do in use: rank 0 alone."""
    options = {"num_pages": 64, "tensor_parallel_size": 2, "all_reduce": f"{broken.__name__}:{communicator}"}
    return LLM(path, **{**OPTIONS, **options, "verify_ranks": False})


@pytest.mark.parametrize("rank", [0, 1])
def test_no_token_of_such_a_step_is_reported_whichever_rank_it_was(path: Path, rank: int) -> None:
    """And soon: a rank says so itself, while the others may have to wait for it for minutes."""
    expected = tokens(LLM(path, **OPTIONS, num_pages=64).generate(PROMPTS, GREEDY))
    with start(path, f"rank_{rank}_loses") as llm:
        generations = [generation for prompt in PROMPTS for generation in llm.prepare(prompt, GREEDY)]
        for generation in generations:
            llm.submit(generation)
        with pytest.raises(EngineDead, match=f"rank {rank} died: rank {rank} waited in vain for another rank"):
            step_for_ever(llm)
        assert [generation.request.output for generation in generations] == [right[:2] for right in expected]


def test_ranks_whose_warm_up_was_nonsense_do_not_report_for_duty(path: Path) -> None:
    with pytest.raises(EngineDead, match=r"rank ([01]) died: rank \1 waited in vain for another rank"):
        start(path, "loses_while_it_starts")


def test_every_gather_ends_with_a_barrier() -> None:
    """Only that tells a rank whose own sums were right that another one has gathered nonsense."""
    heard: list[str] = []

    class Peers(PeerAllReduce):
        def __init__(self) -> None:
            pass

        def barrier(self) -> None:
            heard.append("barrier")

    def gather(ranks: Communicator) -> None:
        assert ranks.all_gather(torch.ones(2, 3)).tolist() == [[1.0] * 3] * 2

    on_ranks(1, gather, lambda group, device: TorchCommunicator(group, device, Peers()))
    assert heard == ["barrier"]
