"""Numbers that the ranks of an engine have to agree on, since a page has the same id on all of them."""

from __future__ import annotations

import torch

from minisgl.core.communicator import Communicator
from minisgl.errors import ConfigError

_LARGEST_IMBALANCE = 2 << 30


def gather(value: int, communicator: Communicator, device: torch.device) -> list[int]:
    """Every rank's ``value``, in the order of the ranks."""
    numbers = torch.tensor([[value]], dtype=torch.int64, device=device)
    values: list[int] = communicator.all_gather(numbers)[0].tolist()
    return values


def check_balance(free: int, communicator: Communicator, device: torch.device) -> None:
    """Refuse to start where the ranks' free memory is far apart: the fullest device would decide for all of them.

    The numbers are gathered, although one minimum of (free, −free) over the ranks would give the least and the most as
    well: an error has to name the ranks that they belong to.

    Args:
        free: bytes that are free on this rank's device.
        communicator: joins the ranks.
        device: of this rank. Ranks on a CPU share one memory, and always agree.

    Raises:
        ConfigError: two ranks are more than 2 GiB apart. All ranks raise it, and name those two.
    """
    if device.type != "cuda":
        return
    by_rank = gather(free, communicator, device)
    least, most = min(by_rank), max(by_rank)
    if most - least > _LARGEST_IMBALANCE:
        raise ConfigError(
            f"memory: rank {by_rank.index(least)} has {least >> 20} MiB free and rank {by_rank.index(most)} has "
            f"{most >> 20} MiB, which is more than {_LARGEST_IMBALANCE >> 20} MiB apart; end what else runs on the "
            "fuller device, or choose other devices with CUDA_VISIBLE_DEVICES"
        )
