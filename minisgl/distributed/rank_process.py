"""The process of one rank: it builds its engine, runs the steps that the driver sends, and reports the tokens."""

from __future__ import annotations

import os
import pickle
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
from minisgl.distributed.communicator import peer_all_reduce_of, select_communicator
from minisgl.distributed.control_plane import CONTROL_PLANES, StepReceiver
from minisgl.distributed.messages import EngineInfo, RankOptions, StepReport, decode_batch, decode_report, encode_report
from minisgl.engine.build import build_engine, rank_device
from minisgl.engine.engine import Engine, LaunchedStep
from minisgl.engine.nvtx import NvtxObserver
from minisgl.registry import resolve


def main() -> None:
    """Build this rank's engine, then run steps until the driver closes the control plane or dies."""
    with child_process(RankOptions) as (options, report):
        steps = resolve("control_plane", options.config.control_plane, CONTROL_PLANES).receiver(options.endpoint)
        engine = _build_engine(options)
        report(Ready(msgspec.to_builtins(_engine_info(engine))))
        with suppress(EOFError):
            RankWorker(engine, steps, options).run()


def _build_engine(options: RankOptions) -> Engine:
    config = options.config
    device = rank_device(config, options.rank)
    torch.set_num_threads(options.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    size, timeout = config.tensor_parallel_size, config.distributed_timeout
    group = init_process_group(options.store_port, options.rank, size, device, timeout)
    communicator = select_communicator(config.all_reduce, device, timeout)(group, device)
    engine = build_engine(config, Path(options.path), communicator, model_config=pickle.loads(options.model_config))
    if config.nvtx:
        engine.observers.append(NvtxObserver())
    if (peers := peer_all_reduce_of(communicator)) is not None:
        peers.finish()
    return engine


def _engine_info(engine: Engine) -> EngineInfo:
    return EngineInfo(
        num_pages=engine.num_pages,
        num_window_pages=engine.num_window_pages,
        page_bytes=engine.page_bytes,
        model_bytes=engine.model_bytes,
        graph_bytes=engine.graph_bytes,
        max_seq_len=engine.max_seq_len,
        attention=engine.attention_choice,
    )


class RankWorker:
    """The main loop of a rank, which launches each step as it arrives, whether or not the one before is complete.

    Rank 0 reports the tokens; with ``verify_ranks`` all ranks do.
    """

    def __init__(self, engine: Engine, steps: StepReceiver, options: RankOptions) -> None:
        self._engine = engine
        self._steps = steps
        self._options = options
        self._peers = peer_all_reduce_of(engine.communicator)
        self._pending: deque[tuple[int, bytes, LaunchedStep]] = deque()

    def run(self) -> None:
        """Run steps until the control plane raises `EOFError`.

        Raises `EngineDead` if an all-reduce was incomplete, so that the tokens of all ranks are wrong.
        """
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
        digest = step_digest(message, result) if self._options.config.verify_ranks else 0
        send_report(self._options.reports, StepReport(step, result.tokens.tobytes(), result.logprobs, digest))


def step_digest(message: bytes, result: StepResult) -> int:
    """64 bits that differ if ranks got different steps, or sampled different tokens."""
    return xxhash.xxh3_64_intdigest(message + result.tokens.tobytes())


# -- where the ranks meet ----------------------------------------------------------------------------------------------

_MEETING_TIMEOUT = timedelta(minutes=10)


def open_store() -> TCPStore:
    """Serve a key-value store to the ranks of this machine, at a port that the system chooses."""
    # The socket listens before any rank learns its port, so no other process can take the port in between.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, None, True, _MEETING_TIMEOUT, False, master_listen_fd=listener.detach())


def init_process_group(port: int, rank: int, size: int, device: torch.device, timeout: float) -> dist.ProcessGroup:
    """Meet the other ranks at the store at ``port``. A collective fails after ``timeout`` seconds."""
    limit = timedelta(seconds=timeout)
    store = TCPStore("127.0.0.1", port, None, False, _MEETING_TIMEOUT)
    # Processes start at their own pace, so wait for all before the timeout of collectives begins to count.
    store.set(f"rank {rank}", "is here")
    store.wait([f"rank {each}" for each in range(size)], _MEETING_TIMEOUT)
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


def loopback_interface() -> str | None:
    """Name of the network interface that reaches this machine alone."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)


# -- reports to the driver ---------------------------------------------------------------------------------------------

_SIZE = struct.Struct("<I")


def send_report(fd: int, report: StepReport) -> None:
    """Write a report to the driver's pipe, its size in front."""
    message = encode_report(report)
    rest = memoryview(_SIZE.pack(len(message)) + message)
    while rest:
        rest = rest[os.write(fd, rest) :]


class ReportReader:
    """The driver's end of one rank's pipe. If waiting is pointless, ``wake_fd`` is readable and ``check`` raises."""

    def __init__(self, fd: int, wake_fd: int, check: Callable[[], None]) -> None:
        self._fd = fd
        self._check = check
        self._received = bytearray()
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._poll.register(wake_fd, select.POLLIN)
        os.set_blocking(fd, False)

    def read(self, timeout: float) -> StepReport:
        """Wait for the next report. Raises `TimeoutError` after ``timeout`` seconds, and what ``check`` raises."""
        deadline = time.monotonic() + timeout
        while (report := self.read_nowait()) is None:
            self._check()
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no answer within {timeout:g} s")
            beat()  # the driver may itself be a child, which must not seem to hang
            self._poll.poll(1e3 * min(left, BEAT_INTERVAL))
        return report

    def read_nowait(self) -> StepReport | None:
        """Return the next report, or None if it has not arrived."""
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
        os.close(self._fd)


if __name__ == "__main__":
    main()
