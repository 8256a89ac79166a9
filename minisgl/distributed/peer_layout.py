"""Where what lies in the memory that a rank shares, and what fits."""

from __future__ import annotations

from dataclasses import dataclass

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
