"""How ranks find each other: a store in the driver's process, at a port that the system chooses."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
import xxhash
from torch._C._distributed_c10d import TCPStore

from minisgl.batch import StepResult
from minisgl.child_process import BEAT_INTERVAL, Ready, beat, child_process
from minisgl.distributed.communicator import choose_communicator, peers_of
from minisgl.distributed.control_plane import CONTROL_PLANES, StepReceiver
from minisgl.distributed.messages import EngineInfo, RankOptions, Stepped, decode_batch, decode_report, encode_report
from minisgl.engine.build import build_engine, rank_device
from minisgl.engine.engine import Engine, LaunchedStep
from minisgl.registry import resolve

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


_SIZE = struct.Struct("<I")


def send_report(fd: int, report: Stepped) -> None:
    """Write a message to the driver."""
    message = encode_report(report)
    rest = memoryview(_SIZE.pack(len(message)) + message)
    while rest:
        rest = rest[os.write(fd, rest) :]


class ReportReader:
    """The driver's end of one rank's pipe.

    Args:
        fd: to read from; closed by `close`.
        alarm: another file, which becomes readable when there is no use in waiting any longer.
        check: called when it does; raises why.
    """

    def __init__(self, fd: int, alarm: int, check: Callable[[], None]) -> None:
        self._fd = fd
        self._check = check
        self._received = bytearray()
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._poll.register(alarm, select.POLLIN)
        os.set_blocking(fd, False)

    def read(self, timeout: float) -> Stepped:
        """The rank's next message.

        Raises:
            TimeoutError: there is none within ``timeout`` seconds.
            EngineDead: a rank has ended.
        """
        deadline = time.monotonic() + timeout
        while (report := self.take()) is None:
            self._check()
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no answer within {timeout:g} s")
            beat()  # the driver may be a child, which waits and does not hang
            self._poll.poll(1e3 * min(left, BEAT_INTERVAL))
        return report

    def take(self) -> Stepped | None:
        """The rank's next message if it is there."""
        while True:
            if len(self._received) >= _SIZE.size:
                end = _SIZE.size + _SIZE.unpack_from(self._received)[0]
                if len(self._received) >= end:
                    message = bytes(self._received[_SIZE.size : end])
                    del self._received[:end]
                    return decode_report(message)
            try:
                chunk = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return None
            if not chunk:
                return None
            self._received += chunk

    def close(self) -> None:
        """Let go of the pipe."""
        os.close(self._fd)


def main() -> None:
    """Build this rank's engine, then run steps until the driver closes the control plane or is gone."""
    with child_process(RankOptions) as (options, report):
        steps = resolve("control_plane", options.config.control_plane, CONTROL_PLANES).receiver(options.endpoint)
        engine = start(options)
        report(Ready(msgspec.to_builtins(info_of(engine))))
        with suppress(EOFError):
            Rank(engine, steps, options).run()


def start(options: RankOptions) -> Engine:
    """Meet the other ranks, and build the engine."""
    config = options.config
    device = rank_device(config, options.rank)
    torch.set_num_threads(options.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    size, timeout = config.tensor_parallel_size, config.distributed_timeout
    group = join_group(options.store_port, options.rank, size, device, timeout)
    communicator = choose_communicator(config.all_reduce, device, timeout)(group, device)
    engine = build_engine(config, Path(options.path), communicator)
    if (peers := peers_of(communicator)) is not None:
        peers.finish()
    return engine


def info_of(engine: Engine) -> EngineInfo:
    """What the driver has to know of the engine."""
    return EngineInfo(
        num_pages=engine.num_pages,
        page_bytes=engine.page_bytes,
        model_bytes=engine.model_bytes,
        graph_bytes=engine.graph_bytes,
        max_seq_len=engine.max_seq_len,
        attention=engine.attention_choice,
    )


class Rank:
    """Launches steps as they come, and reports those that are complete.

    The next step is launched as soon as it is there, be the one before complete or not. The first rank reports for all;
    the others have the same tokens, and just go on. With ``verify_ranks`` they report as well. A rank whose sums were
    not complete ends, whichever it is: its part of what the first one samples from is nonsense.

    Args:
        engine: of this rank.
        steps: from the driver.
        options: of this rank.
    """

    def __init__(self, engine: Engine, steps: StepReceiver, options: RankOptions) -> None:
        self._engine = engine
        self._steps = steps
        self._options = options
        self._peers = peers_of(engine.communicator)
        self._pending: deque[tuple[int, bytes, LaunchedStep]] = deque()

    def run(self) -> None:
        """Until the control plane ends."""
        reports = self._options.rank == 0 or self._options.config.verify_ranks
        step = 0
        while True:
            beat()
            message = self._steps.receive(timeout=0.0 if self._pending else BEAT_INTERVAL)
            if message is not None:
                pending = self._engine.launch(decode_batch(message))
                if reports:
                    self._pending.append((step, message, pending))
                step += 1
            self._check()
            while self._pending and self._pending[0][2].done():
                self._report(*self._pending.popleft())

    def _check(self) -> None:
        if self._peers is not None:
            self._peers.check()

    def _report(self, step: int, message: bytes, pending: LaunchedStep) -> None:
        result = pending.wait()
        self._check()
        digest = digest_of(message, result) if self._options.config.verify_ranks else 0
        send_report(self._options.reports, Stepped(step, result.tokens.tobytes(), result.logprobs, digest))


def digest_of(message: bytes, result: StepResult) -> int:
    """64 bits that differ if ranks were told different things, or sampled different tokens."""
    return xxhash.xxh3_64_intdigest(message + result.tokens.tobytes())


if __name__ == "__main__":
    main()
