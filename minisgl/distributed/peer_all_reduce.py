"""All-reduce between the GPUs of one host, by kernels that write into each other's memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import triton

from minisgl.distributed.peer_kernels import one_shot_kernel, two_shot_kernel
from minisgl.distributed.peer_memory import exchange, share_memory
from minisgl.errors import EngineDead
from minisgl.kernels.launch import check_device, pdl_launch_args

ONE_SHOT_BYTES = {2: 1536 << 10, 4: 368 << 10, 8: 128 << 10}
"""Number of ranks → up to how many bytes one shot is faster than two. ``benchmarks/results/all-reduce.json`` has the
crossings of 2 and 4 H200s: 2,026 and 383 KB, and with the norm after it 1,283 and 390 KB. For 8 ranks this is computed,
from latencies of 3 and 8 µs and 350 KB a µs: one shot sends twice the data to each peer."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_POLL_SECONDS = 0.1e-6  # least duration of a poll: words that no peer writes are in the GPU's own cache
_WORDS = 256  # of a program of the one-shot kernel
_ELEMENTS = (4096, 2048)  # of a row in two shots without a norm: the first with which half of the programs have work
_MAX_ROW_BYTES = 32 << 10  # of a row that is normalised: one program keeps it in registers
_MIN_ROW_BYTES = 256  # of a row for which the memory has signal pads


class PeerAllReduce:
    """Sum over the ranks: small tensors in one shot (every rank sends all to every other), larger ones in two.

    In two shots each rank sums its share of the rows, and sends out the result. All ranks make the same calls with the
    same shapes in the same order on one stream, or replay such graphs. All get the same bits: sums are float32, in the
    order of the ranks, rounded once.

    Args:
        max_bytes: of the largest tensor that `fits`; about four times as much memory is shared.
        one_shot_bytes: of the largest tensor that is reduced in one shot; None for `ONE_SHOT_BYTES`.
        timeout: least seconds until a kernel gives up on a peer, which may be compiling for a minute or two.

    Raises:
        ConfigError: the device has no kernels, or ranks cannot share memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        max_bytes: int,
        one_shot_bytes: int | None = None,
        timeout: float = 300.0,
    ) -> None:
        check_device(device)
        self._rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        limit = ONE_SHOT_BYTES.get(ranks, min(ONE_SHOT_BYTES.values())) if one_shot_bytes is None else one_shot_bytes
        self._layout = PeerLayout(ranks, min(limit, max_bytes), max_bytes)
        self._device = device
        self._processors = _fewest_processors(group, device)
        self._memory = share_memory(self._layout.nbytes, group, device)
        self._peers = torch.tensor(self._memory.addresses, dtype=torch.int64, device=device)
        self._state = torch.tensor([0, math.ceil(timeout / _POLL_SECONDS)], dtype=torch.int64, device=device)
        self._lost = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._word = torch.zeros(1, device=device)

    def fits(self, x: torch.Tensor) -> bool:
        """Whether `all_reduce` takes this tensor. Depends on its shape and dtype alone."""
        return x.dtype in _DTYPES and x.is_contiguous() and self._layout.fits(x.nbytes)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, a new tensor like ``x``, which must fit."""
        return self.one_shot(x) if self._layout.fits_one_shot(x.nbytes) else self.two_shot(x)

    def one_shot(self, x: torch.Tensor) -> torch.Tensor:
        out, words = torch.empty_like(x), x.nbytes // 4
        one_shot_kernel[(triton.cdiv(words, _WORDS),)](
            x, out, self._peers, self._state, self._lost, words,
            CAPACITY=self._layout.capacity, RANK=self._rank, RANKS=self._layout.ranks, BLOCK=_WORDS,
            num_warps=4, **pdl_launch_args(x.view(1, -1)),  # one token, or as short as one
        )  # fmt: skip
        return out

    def two_shot(self, x: torch.Tensor) -> torch.Tensor:
        out, programs = torch.empty_like(x), 2 * self._processors
        for elements in _ELEMENTS:
            if x.numel() >= elements * self._layout.ranks * programs // 2:
                break
        self._launch(x, x, x, out, out, programs, SIZE=elements, NORM=False, ADD=False, EPS=0.0, num_warps=8)
        return out

    def fits_norm(self, x: torch.Tensor) -> bool:
        """Whether `add_and_norm` takes this tensor, [T, hidden_size], and is faster than all-reduce, then norm."""
        # With few rows it is slower: a norm needs one program a row, while one shot spreads a row over many.
        rows, row_bytes = len(x), x[0].nbytes
        return self.fits(x) and not self._layout.fits_one_shot(x.nbytes) and self._layout.fits_rows(rows, row_bytes)

    def add_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`Communicator.all_reduce_and_norm` in two shots, with the norm between them.

        Each rank sums, normalises and sends the rows with row % ranks == rank; its residual stream has only these rows.
        """
        normed, total = torch.empty_like(x), torch.empty_like(x)
        stream, size = x if residual is None else residual, x.shape[1]
        warps = min(max(triton.next_power_of_2(size) // 512, 1), 16)
        self._launch(
            x, stream, weight, normed, total, self._processors,
            SIZE=size, NORM=True, ADD=residual is not None, EPS=eps, num_warps=warps,
        )  # fmt: skip
        return normed, total

    def barrier(self) -> None:
        """Wait for every rank, so that `check` fails on all ranks if one has given up before."""
        self.all_reduce(self._word)

    def finish(self) -> None:
        """Wait until the device has finished all calls so far, and `check`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.check()

    def check(self) -> None:
        """Raise `EngineDead` if a kernel of this rank has given up; does not wait for the device.

        Results since then are wrong. The rank sends no more signals, so all others give up at their next call.
        """
        if self._lost.item():
            raise EngineDead(
                f"rank {self._rank} waited in vain for another rank in an all-reduce over peer memory: a rank has "
                "died, or the ranks do not make the same calls; restart the engine"
            )

    def close(self) -> None:
        """Free the memory. A collective call, after the last all-reduce."""
        self._memory.close()

    def _launch(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, total: torch.Tensor,
        max_programs: int, **constants: int | float,
    ) -> None:  # fmt: skip
        layout, size = self._layout, int(constants["SIZE"])
        groups = triton.cdiv(x.numel(), size * layout.ranks)
        two_shot_kernel[(min(groups, max_programs),)](
            x, residual, weight, out, total, self._peers, self._state, self._lost, x.numel(),
            BLOCK=triton.next_power_of_2(size), INBOX=layout.inbox, OUTBOX=layout.outbox, PADS=layout.pads,
            GROUPS=layout.groups, RANK=self._rank, RANKS=layout.ranks, **constants, **pdl_launch_args(x),
        )  # fmt: skip


@dataclass(frozen=True)
class PeerLayout:
    """The parts of a rank's peer memory, each on a boundary of 16 bytes, and what fits into them."""

    # First is the inbox of one shot; then come the inbox, the outbox and the signal pads of two shots.
    ranks: int
    one_shot_bytes: int  # of the largest tensor that is reduced in one shot
    max_bytes: int  # of the largest tensor

    @property
    def capacity(self) -> int:
        """Words of four bytes that a rank can send to each other rank in one shot."""
        return -(-self.one_shot_bytes // 16) * 4

    @property
    def groups(self) -> int:
        """Groups of rows, one row a rank, that two shots have signal pads for."""
        return -(-self.max_bytes // (self.ranks * _MIN_ROW_BYTES))

    @property
    def inbox(self) -> int:
        """Offset of the inbox of two shots. The one before has two turns of eight bytes a word for each rank."""
        return 2 * self.ranks * self.capacity * 8

    @property
    def outbox(self) -> int:
        return self.inbox + self._room

    @property
    def pads(self) -> int:
        """Offset of the signal pads, int32[2 × groups, ranks]."""
        return self.outbox + self._room

    @property
    def nbytes(self) -> int:
        return self.pads + 2 * self.groups * self.ranks * 4

    @property
    def _room(self) -> int:
        # Up to `ranks - 1` rows of the last group are empty.
        return -(-self.max_bytes // 16) * 16 + self.ranks * _MAX_ROW_BYTES

    def fits_one_shot(self, nbytes: int) -> bool:
        return nbytes <= self.one_shot_bytes

    def fits(self, nbytes: int) -> bool:
        """Whether a tensor of ``nbytes`` can be reduced: whole words, at most ``max_bytes``."""
        return 0 < nbytes <= self.max_bytes and nbytes % 4 == 0

    def fits_rows(self, rows: int, row_bytes: int) -> bool:
        """Whether ``rows`` of ``row_bytes`` each can be reduced and normalised."""
        whole = self.fits(rows * row_bytes) and row_bytes % 4 == 0 and row_bytes <= _MAX_ROW_BYTES
        return whole and (self.fits_one_shot(rows * row_bytes) or -(-rows // self.ranks) <= self.groups)


def _processors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _fewest_processors(group: dist.ProcessGroup, device: torch.device) -> int:
    """Minimum over the ranks, because all must divide a tensor alike."""
    return min(map(int, exchange(str(_processors_of(device)).encode(), group, device)))
