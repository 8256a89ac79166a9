"""Where what lies in the memory that a rank shares, and what fits."""

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

_ROW_BYTES = 32 << 10
"""Of the longest row that is normalised: one program keeps it in registers."""


_LEAST_ROW_BYTES = 256
"""Of the shortest row that the memory has signal pads for."""


@dataclass(frozen=True)
class PeerLayout:
    """Parts of a rank's piece of peer memory, each on a boundary of 16 bytes; the first inbox is at its beginning.

    Args:
        ranks: how many share.
        one_shot_bytes: of the largest tensor that is reduced in one shot.
        max_bytes: of the largest tensor at all.
    """

    ranks: int
    one_shot_bytes: int
    max_bytes: int

    @property
    def capacity(self) -> int:
        """Words of four bytes that each rank may send each other in one shot."""
        return -(-self.one_shot_bytes // 16) * 4

    @property
    def groups(self) -> int:
        """How many groups of rows, one row a rank, two shots have signal pads for."""
        return -(-self.max_bytes // (self.ranks * _LEAST_ROW_BYTES))

    @property
    def inbox(self) -> int:
        """Byte at which the inbox of two shots begins: after two turns of eight bytes a word from each rank."""
        return 2 * self.ranks * self.capacity * 8

    @property
    def outbox(self) -> int:
        """Byte at which the outbox of two shots begins."""
        return self.inbox + self._room

    @property
    def pads(self) -> int:
        """Byte at which the signal pads begin, int32[2 × groups, ranks]."""
        return self.outbox + self._room

    @property
    def nbytes(self) -> int:
        """Of the whole piece."""
        return self.pads + 2 * self.groups * self.ranks * 4

    @property
    def _room(self) -> int:
        """Of a tensor whose last group lacks all rows but one."""
        return -(-self.max_bytes // 16) * 16 + self.ranks * _ROW_BYTES

    def fits_one_shot(self, nbytes: int) -> bool:
        """Whether so many bytes can be reduced in one shot."""
        return nbytes <= self.one_shot_bytes

    def fits(self, nbytes: int) -> bool:
        """Whether so many bytes can be reduced: whole words, at most ``max_bytes`` of them."""
        return 0 < nbytes <= self.max_bytes and nbytes % 4 == 0

    def fits_rows(self, rows: int, row_bytes: int) -> bool:
        """Whether so many rows can be reduced and normalised."""
        whole = self.fits(rows * row_bytes) and row_bytes % 4 == 0 and row_bytes <= _ROW_BYTES
        return whole and (self.fits_one_shot(rows * row_bytes) or -(-rows // self.ranks) <= self.groups)


ONE_SHOT_BYTES = {2: 1536 << 10, 4: 368 << 10, 8: 128 << 10}
"""Up to how many bytes one shot is faster than two, by ranks. ``benchmarks/results/all-reduce.json`` has the crossings
of 2 and 4 H200s: 2,026 and 383 KB, and with the norm after it 1,283 and 390 KB. For 8, which were not at hand, this is
reckoned with the latencies seen there, 3 and 8 µs, and 350 KB a µs: one shot sends twice the data to each peer."""


_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


_POLL_SECONDS = 0.1e-6
"""That one poll for a signal takes at the least: words that nobody writes to are in its own GPU's cache."""


_WORDS = 256
"""Of a program of the one-shot kernel."""


_ELEMENTS = (4096, 2048)
"""Of a row of the two-shot kernel where rows have no meaning: the first with which half of its programs have work."""


class PeerAllReduce:
    """Sum over the ranks of one host, by kernels that write into the memory of one another's devices.

    All ranks make the same calls with the same shapes in the same order on one stream, or record them in graphs and
    replay those in the same order. All get the same bits: a sum is taken in float32, in the order of the ranks, and
    rounded once, whichever way it is taken.

    Args:
        group: of the ranks, who meet over it before the first call and after the last.
        device: of this rank.
        max_bytes: of the largest tensor that `fits`; about four times as much memory is shared.
        one_shot_bytes: of the largest tensor that is reduced in one shot; None: what was measured.
        timeout: seconds that a kernel polls for the signal of a peer, at the least, before it gives up; see `check`.
            A rank may be compiling kernels for a minute or two.

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
        """Whether `all_reduce` takes this tensor; every rank gets the same answer for the same shape."""
        return x.dtype in _DTYPES and x.is_contiguous() and self._layout.fits(x.nbytes)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, a new tensor like ``x``, which must fit."""
        return self.one_shot(x) if self._layout.fits_one_shot(x.nbytes) else self.two_shot(x)

    def one_shot(self, x: torch.Tensor) -> torch.Tensor:
        """`all_reduce` as in `minisgl.distributed.peer_kernels`."""
        out, words = torch.empty_like(x), x.nbytes // 4
        one_shot_kernel[(triton.cdiv(words, _WORDS),)](
            x, out, self._peers, self._state, self._lost, words,
            CAPACITY=self._layout.capacity, RANK=self._rank, RANKS=self._layout.ranks, BLOCK=_WORDS,
            num_warps=4, **pdl_launch_args(x.view(1, -1)),  # one token, or as short as one
        )  # fmt: skip
        return out

    def two_shot(self, x: torch.Tensor) -> torch.Tensor:
        """`all_reduce` as in `minisgl.distributed.peer_kernels`."""
        out, programs = torch.empty_like(x), 2 * self._processors
        for elements in _ELEMENTS:
            if x.numel() >= elements * self._layout.ranks * programs // 2:
                break
        self._launch(x, x, x, out, out, programs, SIZE=elements, NORM=False, ADD=False, EPS=0.0, num_warps=8)
        return out

    def fits_norm(self, x: torch.Tensor) -> bool:
        """Whether `add_and_norm` takes this tensor, [T, size], and is faster than one step after the other. Few rows
        are not: a norm takes whole rows, a program each, while one shot spreads a row over many."""
        rows, row_bytes = len(x), x[0].nbytes
        return self.fits(x) and not self._layout.fits_one_shot(x.nbytes) and self._layout.fits_rows(rows, row_bytes)

    def add_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`Communicator.all_reduce_and_norm` in two shots, with the norm between them.

        Each rank does this for its own rows, those with row % ranks == rank, and hands out what it has normalised. So
        the residual stream that comes out is complete on no rank.
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
        """Wait once more for every rank. A rank that gave up in one call is silent from the next on, while others may
        have got the right sum in that one; after this, `check` tells all of them."""
        self.all_reduce(self._word)

    def finish(self) -> None:
        """Wait until the device is done with all calls so far, and `check`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.check()

    def check(self) -> None:
        """Look, without waiting for the device, whether a kernel of this rank has given a peer up. The rank is silent
        from then on, so that at their next call all others give it up as well.

        Raises:
            EngineDead: one has. Nothing that was computed since is of any use.
        """
        if self._lost.item():
            raise EngineDead(
                f"rank {self._rank} waited in vain for another rank in an all-reduce over peer memory: a rank has "
                "died, or the ranks do not make the same calls; restart the engine"
            )

    def close(self) -> None:
        """Give the memory back. A collective call, after the last all-reduce."""
        self._memory.close()

    def _launch(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        total: torch.Tensor,
        most_programs: int,
        **constants: int | float,
    ) -> None:
        layout, size = self._layout, int(constants["SIZE"])
        groups = triton.cdiv(x.numel(), size * layout.ranks)
        two_shot_kernel[(min(groups, most_programs),)](
            x, residual, weight, out, total, self._peers, self._state, self._lost, x.numel(),
            BLOCK=triton.next_power_of_2(size), INBOX=layout.inbox, OUTBOX=layout.outbox, PADS=layout.pads,
            GROUPS=layout.groups, RANK=self._rank, RANKS=layout.ranks, **constants, **pdl_launch_args(x),
        )  # fmt: skip


def _processors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _fewest_processors(group: dist.ProcessGroup, device: torch.device) -> int:
    """Of all ranks' devices: how a tensor is cut depends on it, and all must cut alike."""
    return min(map(int, exchange(str(_processors_of(device)).encode(), group, device)))
