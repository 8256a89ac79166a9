"""Who sends which part of a sum to whom: the schedules of an all-reduce as lists, and what they add up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, permutations
from typing import Literal

from minisgl.errors import ConfigError

Sums = list[list[Counter[int]]]
"""[ranks][chunks] whose numbers are in the sum that a rank has of a chunk, and how often."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message of a collective.

    Args:
        when: number of the turn, or a time in any unit; those with the same take place at once.
        source, destination: ranks.
        chunk: which part of the tensor; None is all of it.
        nbytes: of the message.
        kind: ``"add"``: the destination adds it to what it has; ``"take"``: it replaces what it has.
    """

    when: float
    source: int
    destination: int
    chunk: int | None
    nbytes: int
    kind: Literal["add", "take"]

    def __post_init__(self) -> None:
        if self.source == self.destination or min(self.source, self.destination, self.chunk or 0) < 0:
            raise ConfigError(f"a transfer goes from one rank to another and numbers count from 0: {self}")


def ring_all_reduce(ranks: int, nbytes: int) -> list[Transfer]:
    """Every rank sends to its neighbour only (Patarasuk and Yuan 2009): each chunk goes round once and grows, and goes
    round once more when it is complete. ``2 (ranks − 1)`` turns.

    Args:
        ranks: at least two.
        nbytes: of the tensor.
    """
    chunks = _chunk_sizes(ranks, nbytes)
    transfers: list[Transfer] = []
    for turn in range(ranks - 1):
        for rank in range(ranks):
            chunk = (rank - turn) % ranks
            transfers.append(Transfer(turn, rank, (rank + 1) % ranks, chunk, chunks[chunk], "add"))
    for turn in range(ranks - 1):
        for rank in range(ranks):
            chunk = (rank + 1 - turn) % ranks
            transfers.append(Transfer(ranks - 1 + turn, rank, (rank + 1) % ranks, chunk, chunks[chunk], "take"))
    return transfers


def one_shot_all_reduce(ranks: int, nbytes: int) -> list[Transfer]:
    """Every rank gets everything from all others, and adds it up for itself. One turn.

    Args:
        ranks: at least two.
        nbytes: of the tensor.
    """
    _chunk_sizes(ranks, nbytes)
    return [Transfer(0, source, rank, None, nbytes, "add") for source, rank in permutations(range(ranks), 2)]


def two_shot_all_reduce(ranks: int, nbytes: int) -> list[Transfer]:
    """Every rank gets one chunk from all others and adds it up; then all get the complete chunks from each other.

    Args:
        ranks: at least two.
        nbytes: of the tensor.
    """
    chunks = _chunk_sizes(ranks, nbytes)
    pairs = list(permutations(range(ranks), 2))
    scatter = [Transfer(0, source, owner, owner, chunks[owner], "add") for source, owner in pairs]
    return scatter + [Transfer(1, owner, rank, owner, chunks[owner], "take") for owner, rank in pairs]


def _chunk_sizes(ranks: int, nbytes: int) -> list[int]:
    """As equal as possible, the first ones larger."""
    if ranks < 2 or nbytes < 1:
        raise ConfigError(f"an all-reduce takes at least 2 ranks and 1 byte, not {ranks} and {nbytes}")
    return [nbytes // ranks + (chunk < nbytes % ranks) for chunk in range(ranks)]


def turns(transfers: Sequence[Transfer]) -> list[list[Transfer]]:
    """What takes place at once, in order of time."""
    in_order = sorted(transfers, key=lambda transfer: transfer.when)
    return [list(turn) for _, turn in groupby(in_order, key=lambda transfer: transfer.when)]


def in_words(turn: Sequence[Transfer]) -> str:
    """``0 to 1 chunk 3 to add, 1 to 2 …``."""
    return ", ".join(
        f"{transfer.source} to {transfer.destination}"
        f"{'' if transfer.chunk is None else f' chunk {transfer.chunk}'} to {transfer.kind}"
        for transfer in turn
    )


def num_ranks(transfers: Sequence[Transfer]) -> int:
    """Ranks that send or receive, counted from 0."""
    return 1 + max((max(transfer.source, transfer.destination) for transfer in transfers), default=0)


def partial_sums(transfers: Sequence[Transfer]) -> Iterator[Sums]:
    """What every rank has of every chunk before the first turn, and after each.

    In a turn, all is sent before anything is received.

    Raises:
        ConfigError: a chunk arrives to be taken while another one of it arrives at the same rank.
    """
    ranks = num_ranks(transfers)
    chunks = 1 + max((transfer.chunk or 0 for transfer in transfers), default=0)
    sums: Sums = [[Counter([rank]) for _ in range(chunks)] for rank in range(ranks)]
    yield sums
    for turn in turns(transfers):
        sums = _after(sums, turn)
        yield sums


def _after(before: Sums, turn: Sequence[Transfer]) -> Sums:
    sums = [list(row) for row in before]
    taken: set[tuple[int, int]] = set()
    arrived: set[tuple[int, int]] = set()
    for transfer in turn:
        chunks = range(len(before[0])) if transfer.chunk is None else [transfer.chunk]
        for chunk in chunks:
            place, sent = (transfer.destination, chunk), before[transfer.source][chunk]
            if place in taken or (place in arrived and transfer.kind == "take"):
                raise ConfigError(
                    f"rank {transfer.destination} takes chunk {chunk} while it gets it from another rank, too; "
                    "give these transfers different times"
                )
            arrived.add(place)
            if transfer.kind == "take":
                taken.add(place)
                sums[transfer.destination][chunk] = sent
            else:
                sums[transfer.destination][chunk] = sums[transfer.destination][chunk] + sent
    return sums
