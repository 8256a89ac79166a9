"""One rank of the checks of the all-reduce over peer memory: on GPUs, or on the CPU in Triton's interpreter.

``python -m tests.distributed.peer_ranks RANK RANKS DIRECTORY DEVICE`` runs every check and writes their outcomes to
``DIRECTORY/RANK.json``. All ranks run the same checks in the same order, so one that fails does not stop the others.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minisgl.distributed import peer_all_reduce
from minisgl.distributed.communicator import TorchCommunicator
from minisgl.distributed.peer_all_reduce import _ELEMENTS, _POLL_SECONDS, PeerAllReduce
from minisgl.distributed.peer_memory import share_memory
from minisgl.errors import ConfigError, EngineDead
from minisgl.kernels.norm import add_and_norm
from minisgl.layers.fused import FusedAllReduceRMSNorm
from minisgl.layers.norm import RMSNorm
from tests.kernels.closeness import assert_close

EPS = 1e-6
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def sum_in_order(inputs: list[torch.Tensor]) -> torch.Tensor:
    """The sum in float32, in the order of the ranks."""
    total = torch.zeros_like(inputs[0], dtype=torch.float32)
    for x in inputs:
        total += x
    return total


class Ranks:
    """What a check needs to know, and what it does with all ranks."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.group = dist.new_group(backend="gloo")
        self.is_gpu = device.type == "cuda"
        self.own_random = random.Random(rank)
        self.pause = 0.0002
        """Seconds before each look at a signal, in the interpreter."""

    def peers(self, max_bytes: int = 4 << 20, polls: int | None = None) -> PeerAllReduce:
        """An all-reduce that takes one shot up to a quarter of its largest tensor, and gives up after some seconds."""
        if polls is None:
            polls = 1 << 25 if self.is_gpu else 4000
        return PeerAllReduce(self.group, self.device, max_bytes, max_bytes // 4, polls * _POLL_SECONDS)

    def inputs(self, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
        """What every rank brings along."""
        generators = [torch.Generator().manual_seed(seed * self.size + rank) for rank in range(self.size)]
        return [torch.randn(shape, generator=each).to(dtype).to(self.device) for each in generators]

    def assert_sum(self, out: torch.Tensor, inputs: list[torch.Tensor]) -> None:
        """The sum in float32, in the order of the ranks, rounded once; the interpreter cuts bfloat16 off."""
        total = sum_in_order(inputs)
        if self.is_gpu or out.dtype != torch.bfloat16:
            assert torch.equal(out, total.to(out.dtype))
        else:
            assert_close(out, total.double(), out.dtype)
        self.assert_same_bits(out)

    def assert_same_bits(self, out: torch.Tensor) -> None:
        mine = out.cpu().contiguous().view(torch.uint8).flatten()
        everyones = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyones, mine, group=self.group)
        assert all(torch.equal(theirs, mine) for theirs in everyones)

    def stumble(self) -> None:
        """Sometimes be late, each rank at other times."""
        if self.own_random.random() < 0.2:
            if self.is_gpu:
                torch.cuda._sleep(self.own_random.randrange(1, 200_000))
            else:
                time.sleep(self.own_random.random() / 50)


def memory_is_zero_and_shared(ranks: Ranks) -> None:
    if ranks.is_gpu:
        return  # there is no tensor over it; the sums below show as much
    import ctypes

    memory = share_memory(4096, ranks.group, ranks.device)
    pieces = [(ctypes.c_int32 * 1024).from_address(address) for address in memory.addresses]
    assert not any(any(piece) for piece in pieces)
    dist.barrier(group=ranks.group)
    for piece in pieces:
        piece[ranks.rank] = ranks.rank + 1
    dist.barrier(group=ranks.group)
    assert [list(piece[: ranks.size + 1]) for piece in pieces] == [[*range(1, ranks.size + 1), 0]] * ranks.size
    memory.close()


def all_ranks_learn_that_one_cannot_share(ranks: Ranks) -> None:
    last = ranks.size - 1
    with pytest.raises(ConfigError, match=rf"ranks \[{last}\] could not make or map"):
        share_memory(-1 if ranks.rank == last else 4096, ranks.group, ranks.device)


def every_size_and_dtype(ranks: Ranks) -> None:
    shapes: dict[torch.dtype, list[tuple[int, int]]] = {torch.float32: [(3, 1026)], torch.float16: [(7, 640)]}
    shapes[torch.bfloat16] = [(1, 2), (5, 514)]
    if ranks.is_gpu:
        shapes[torch.bfloat16] += [(1, 5120), (33, 514), (64, 5120), (255, 5122), (256, 5120)]
        for dtype in (torch.float32, torch.float16):
            shapes[dtype] += [(64, shapes[dtype][0][1])]
    for dtype in DTYPES:
        peers = ranks.peers()
        for seed, shape in enumerate(shapes[dtype]):
            inputs = ranks.inputs(shape, dtype, seed)
            x = inputs[ranks.rank].clone()
            assert peers.fits(x)
            assert not peers.fits(x.t()) or 1 in shape
            if x.nbytes <= 1 << 20:
                ranks.assert_sum(peers.one_shot(x), inputs)
            ranks.assert_sum(peers.two_shot(x), inputs)
            ranks.assert_sum(peers.all_reduce(x), inputs)
            assert torch.equal(x, inputs[ranks.rank])
        peers.check()
        peers.close()


def norms(ranks: Ranks) -> None:
    """Layers one after the other, so that the residual stream of the first reaches the last."""
    shapes = {torch.float32: [(13, 100)], torch.float16: [(2, 640)], torch.bfloat16: [(1, 128), (7, 64)]}
    if ranks.is_gpu:
        shapes[torch.bfloat16] = [(1, 5120), (33, 5120), (256, 5120)]
    for dtype in DTYPES:
        peers = ranks.peers()
        for seed, shape in enumerate(shapes[dtype]):
            norm = RMSNorm(shape[1], EPS).to(ranks.device, dtype)
            norm.weight.data.copy_(ranks.inputs((shape[1],), dtype, 90)[0])
            inputs = [ranks.inputs(shape, dtype, 100 + 3 * seed + layer) for layer in range(3)]
            _assert_layers(ranks, peers, norm, inputs)
            alike = FusedAllReduceRMSNorm(norm, TorchCommunicator(ranks.group, ranks.device, peers))
            normed, residual = alike.add_and_norm(inputs[0][ranks.rank], None)
            normed, _ = alike.add_and_norm(inputs[1][ranks.rank], residual)
            ranks.assert_same_bits(normed)
            if ranks.is_gpu:  # as bits go, it makes no difference that one kernel does the work of two
                total = peers.all_reduce(inputs[0][ranks.rank])
                expected, _ = add_and_norm(peers.all_reduce(inputs[1][ranks.rank]), total, norm.weight, EPS)
                assert_close(normed, expected.double(), dtype)
        peers.check()
        peers.close()


def _assert_layers(ranks: Ranks, peers: PeerAllReduce, norm: RMSNorm, inputs: list[list[torch.Tensor]]) -> None:
    residual: torch.Tensor | None = None
    exact = torch.zeros_like(inputs[0][0], dtype=torch.float64)
    for everyones in inputs:
        x = everyones[ranks.rank].clone()
        normed, residual = peers.add_and_norm(x, residual, norm.weight, EPS)
        exact += torch.stack(everyones).double().sum(0)
        mean_square = exact.square().mean(-1, keepdim=True)
        reference = exact / (mean_square + EPS).sqrt() * norm.weight.double()
        error = float((normed.double() - reference).norm() / reference.norm())
        assert error <= {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[x.dtype], error
        ranks.assert_same_bits(normed)


def calls_of_all_kinds_with_late_ranks(ranks: Ranks) -> None:
    """A fast rank does not overwrite what a slow one still reads, whatever comes after what."""
    dtype = torch.float16
    peers = ranks.peers()
    shared = random.Random(7)
    pool = [ranks.inputs((64, 1024) if ranks.is_gpu else (8, 192), dtype, 200 + each) for each in range(3)]
    sums = [sum_in_order(inputs).to(dtype) for inputs in pool]
    wrong = torch.zeros((), dtype=torch.int64, device=ranks.device)
    for _ in range(10_000 if ranks.is_gpu else 40):
        which, rows = shared.randrange(3), shared.choice([1, 1, 2, 5, len(pool[0][0])])
        shot = shared.choice([peers.one_shot, peers.two_shot])
        ranks.stumble()
        wrong += (shot(pool[which][ranks.rank][:rows]) != sums[which][:rows]).sum()
    peers.check()
    assert int(wrong) == 0
    peers.close()


def a_rank_that_looks_late_finds_what_it_was_sent(ranks: Ranks) -> None:
    """It has sent its own, so the others are a call ahead, and must not have overwritten what it has not looked at."""
    peers = ranks.peers()
    pool = [ranks.inputs((2, 64), torch.float32, 250 + call) for call in range(8)]
    ranks.pause = 0.05 if ranks.rank == 0 else 0.0002
    outs = [shot(inputs[ranks.rank]) for shot in (peers.one_shot, peers.two_shot) for inputs in pool]
    ranks.pause = 0.0002
    peers.check()
    assert all(torch.equal(out, sum_in_order(inputs)) for out, inputs in zip(outs, pool * 2, strict=True))
    peers.close()


def two_graphs_with_eager_calls_between(ranks: Ranks) -> None:
    if not ranks.is_gpu:
        return
    peers = ranks.peers()
    few, many = ranks.inputs((1, 5120), torch.bfloat16, 300), ranks.inputs((256, 5120), torch.bfloat16, 301)
    few_sum, many_sum = (sum_in_order(inputs).bfloat16() for inputs in (few, many))
    x, rows = few[ranks.rank], many[ranks.rank]

    def calls() -> torch.Tensor:
        outs = [(peers.one_shot(x), few_sum), (peers.two_shot(rows), many_sum), (peers.one_shot(x), few_sum)]
        outs += [(peers.one_shot(rows[:40]), many_sum[:40]), (peers.two_shot(rows[:3]), many_sum[:3])]
        return torch.stack([(out == expected).all() for out, expected in outs]).all()

    calls()
    graphs = []
    for repetitions in (1, 2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            correct = torch.stack([calls() for _ in range(repetitions)]).all()
        graphs.append((graph, correct))
    all_correct = torch.ones((), dtype=torch.bool, device=ranks.device)
    for replay in range(1000):
        graph, correct = graphs[replay % 2]
        ranks.stumble()
        graph.replay()
        all_correct &= correct
        if replay % 3 == 0:
            all_correct &= (peers.one_shot(x) == few_sum).all()
    peers.check()
    assert bool(all_correct)
    dist.barrier(group=ranks.group)
    peers.close()


def a_missing_peer_is_given_up(ranks: Ranks) -> None:
    """Rank 0 calls alone, in either way; it returns, says so, and does not wait a second time."""
    for shot in ("one_shot", "two_shot"):
        peers = ranks.peers(max_bytes=1 << 16, polls=200)
        if ranks.rank == 0:
            peers.check()
            call = getattr(peers, shot)
            for _ in range(3):
                call(torch.ones(2, 512, device=ranks.device))
            if ranks.is_gpu:
                torch.cuda.synchronize()
            with pytest.raises(EngineDead, match="rank 0 waited in vain"):
                peers.check()
        dist.barrier(group=ranks.group)
        peers.close()


def who_has_waited_in_vain_falls_silent(ranks: Ranks) -> None:
    """So nobody goes on with numbers that are nonsense: all ranks learn of it, at the latest in the next call."""
    for shot in ("one_shot", "two_shot"):
        peers = ranks.peers(max_bytes=1 << 16, polls=2000 if ranks.is_gpu else 200)
        call, x = getattr(peers, shot), torch.ones(2, 512, device=ranks.device)
        if ranks.rank == 0:
            call(x)  # alone
            if ranks.is_gpu:
                torch.cuda.synchronize()
        dist.barrier(group=ranks.group)
        if ranks.rank > 0:
            call(x)
        call(x)
        if ranks.is_gpu:
            torch.cuda.synchronize()
        with pytest.raises(EngineDead, match=f"rank {ranks.rank} waited in vain"):
            peers.check()
        dist.barrier(group=ranks.group)
        peers.close()


def a_rank_that_gave_up_in_the_last_call_is_missed_in_the_barrier(ranks: Ranks) -> None:
    """The others had been late, and got the right sum: they would not know."""
    last = ranks.size - 1
    for shot in ("one_shot", "two_shot"):
        peers = ranks.peers(max_bytes=1 << 16, polls=2000 if ranks.is_gpu else 200)
        x = torch.ones(1, 256, device=ranks.device)  # for one program, which has spoken when it gives up
        if ranks.rank == last:
            getattr(peers, shot)(x)
            with pytest.raises(EngineDead, match=f"rank {last} waited in vain"):
                peers.finish()
        dist.barrier(group=ranks.group)
        if shot == "one_shot" and ranks.rank < last:
            assert bool((peers.one_shot(x) == ranks.size).all())
            peers.finish()
        peers.barrier()
        with pytest.raises(EngineDead, match=f"rank {ranks.rank} waited in vain"):
            peers.finish()
        dist.barrier(group=ranks.group)
        peers.close()


def devices_of_different_sizes_cut_a_tensor_alike(ranks: Ranks) -> None:
    processors_of = peer_all_reduce._processors_of
    peer_all_reduce._processors_of = lambda device: 2 + ranks.rank
    try:
        peers = ranks.peers()
    finally:
        peer_all_reduce._processors_of = processors_of
    rows = _ELEMENTS[0] * ranks.size * 5 // 2  # long rows for two processors, short ones for three
    inputs = ranks.inputs((rows,), torch.float32, 400)
    ranks.assert_sum(peers.two_shot(inputs[ranks.rank]), inputs)
    peers.finish()
    dist.barrier(group=ranks.group)
    peers.close()


CHECKS: list[Callable[[Ranks], None]] = [
    memory_is_zero_and_shared,
    all_ranks_learn_that_one_cannot_share,
    every_size_and_dtype,
    norms,
    calls_of_all_kinds_with_late_ranks,
    a_rank_that_looks_late_finds_what_it_was_sent,
    two_graphs_with_eager_calls_between,
    a_missing_peer_is_given_up,
    who_has_waited_in_vain_falls_silent,
    a_rank_that_gave_up_in_the_last_call_is_missed_in_the_barrier,
    devices_of_different_sizes_cut_a_tensor_alike,
]


def pause_before_polls(ranks: Ranks) -> None:
    """A rank that polls for a signal in the interpreter gives way to those that send it: cores are fewer."""
    from triton.runtime.interpreter import InterpreterBuilder

    add, load = InterpreterBuilder.create_atomic_rmw, InterpreterBuilder.create_masked_load

    def patient_add(*arguments: Any) -> Any:
        time.sleep(ranks.pause)
        return add(*arguments)

    def patient_load(*arguments: Any) -> Any:
        if arguments[-1]:  # is volatile
            time.sleep(ranks.pause)
        return load(*arguments)

    InterpreterBuilder.create_atomic_rmw = patient_add
    InterpreterBuilder.create_masked_load = patient_load


def main() -> None:
    rank, size, directory, device_type = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)  # on which Triton launches, wherever the tensors are
    store = dist.FileStore(str(directory / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    torch.set_grad_enabled(False)
    ranks = Ranks(rank, size, device)
    if device_type == "cpu":
        pause_before_polls(ranks)
    outcomes: dict[str, str] = {}
    start = time.monotonic()
    for check in CHECKS:
        try:
            check(ranks)
            outcomes[check.__name__] = "passed"
            print(f"rank {rank}: {check.__name__} passed after {time.monotonic() - start:.1f} s", flush=True)
        except Exception:
            outcomes[check.__name__] = traceback.format_exc()
        (directory / f"{rank}.json").write_text(json.dumps(outcomes))
    os._exit(0)  # no farewell to ranks that may be gone


if __name__ == "__main__":
    main()
