"""How ranks find each other: a store in the driver's process, at a port that the system chooses."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

_ARRIVAL = timedelta(minutes=10)
"""In which all ranks must have come to the store."""


def open_store() -> TCPStore:
    """Serve a key-value store to the ranks of this machine, and to nobody else.

    The socket listens before anybody is told its port, so the port cannot be taken in between.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, None, True, _ARRIVAL, False, master_listen_fd=listener.detach())


def join_group(port: int, rank: int, size: int, device: torch.device, timeout: float) -> dist.ProcessGroup:
    """Meet the other ranks at the store.

    Args:
        port: of the store.
        rank, size: which rank this is, and how many there are.
        device: of this rank; decides between NCCL and gloo.
        timeout: seconds after which a collective that another rank has not joined fails.
    """
    limit = timedelta(seconds=timeout)
    store = TCPStore("127.0.0.1", port, None, False, _ARRIVAL)
    # Processes start at their own pace; from here on the ranks are about equally far.
    store.set(f"rank {rank}", "is here")
    store.wait([f"rank {each}" for each in range(size)], _ARRIVAL)
    on_cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=limit,
        device_id=device if on_cuda else None,
    )
    group = dist.group.WORLD
    assert group is not None, "the group has just been made"
    return group


def loopback() -> str | None:
    """Name of the network interface that leads nowhere but to this machine."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
