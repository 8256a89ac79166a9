"""A rank: ``python -m minisgl.distributed.worker``, started by `RankGroup` and by nobody else."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import traceback
from collections import deque
from pathlib import Path

import msgspec
import torch
import xxhash

from minisgl.core.batch import StepResult
from minisgl.core.heap import freeze_heap
from minisgl.core.registry import resolve
from minisgl.distributed.communicator import choose_communicator, peers_of
from minisgl.distributed.control_plane import CONTROL_PLANES, StepReceiver
from minisgl.distributed.messages import Failed, Ready, Setup, Stepped, decode_batch
from minisgl.distributed.rendezvous import join_group
from minisgl.distributed.reports import send_report
from minisgl.engine import Engine, PendingStep
from minisgl.engine.build import build_engine, rank_device

_PR_SET_PDEATHSIG = 1
_LOOK = 1.0
"""Seconds after which a rank that hears of no step looks whether its last sums were complete."""


def main() -> int:
    """Build this rank's engine, then run steps until the driver is gone. Returns the exit code."""
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=Setup)
    die_with(setup.driver)
    try:
        steps = resolve("control_plane", setup.config.control_plane, CONTROL_PLANES).receiver(setup.endpoint)
        engine = start(setup)
        freeze_heap()
        send_report(setup.reports, ready(engine))
        Rank(engine, steps, setup).run()
    except EOFError:
        return 0
    except BaseException as error:
        traceback.print_exc()
        send_report(setup.reports, Failed(type(error).__name__, str(error)))
    return 1


def die_with(driver: int) -> None:
    """End this process when its driver ends, whatever it is doing. On Linux the kernel sees to it; everywhere, the
    driver's end of standard input closes then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver:
        os._exit(1)

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=wait, name="minisgl-driver-watch", daemon=True).start()


def start(setup: Setup) -> Engine:
    """Meet the other ranks, and build the engine."""
    config = setup.config
    device = rank_device(config, setup.rank)
    torch.set_num_threads(setup.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    size, timeout = config.tensor_parallel_size, config.distributed_timeout
    group = join_group(setup.store_port, setup.rank, size, device, timeout)
    communicator = choose_communicator(config.all_reduce, device, timeout)(group, device)
    engine = build_engine(config, Path(setup.path), communicator)
    if (peers := peers_of(communicator)) is not None:
        peers.finish()
    return engine


def ready(engine: Engine) -> Ready:
    """What the driver has to know of the engine."""
    return Ready(
        num_pages=engine.num_pages,
        page_bytes=engine.page_bytes,
        model_bytes=engine.model_bytes,
        runner_bytes=engine.runner_bytes,
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
        setup: of this rank.
    """

    def __init__(self, engine: Engine, steps: StepReceiver, setup: Setup) -> None:
        self._engine = engine
        self._steps = steps
        self._setup = setup
        self._peers = peers_of(engine.communicator)
        self._pending: deque[tuple[int, bytes, PendingStep]] = deque()

    def run(self) -> None:
        """Until the control plane ends."""
        reports = self._setup.rank == 0 or self._setup.config.verify_ranks
        idle = None if self._peers is None else _LOOK
        step = 0
        while True:
            message = self._steps.receive(timeout=0.0 if self._pending else idle)
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

    def _report(self, step: int, message: bytes, pending: PendingStep) -> None:
        result = pending.wait()
        self._check()
        digest = digest_of(message, result) if self._setup.config.verify_ranks else 0
        send_report(self._setup.reports, Stepped(step, result.tokens.tobytes(), result.logprobs, digest))


def digest_of(message: bytes, result: StepResult) -> int:
    """64 bits that differ if ranks were told different things, or sampled different tokens."""
    return xxhash.xxh3_64_intdigest(message + result.tokens.tobytes())


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # not in the polite way, which waits for connections to ranks that may be gone
