"""The all-reduce over peer memory between processes: its kernels in Triton's interpreter, its memory in shared files.

What this proves: the sums, who writes what where, that the counting of calls, turns and signals lets no rank run away
with what another still reads, and that a missing peer is given up. The processes really run at the same time and meet
in nothing but the shared memory. What it cannot prove is what a GPU adds: several programs of a kernel at once, and
memory that orders accesses less strictly. That is ``test_peer_gpu.py``.
"""

from __future__ import annotations

import pytest

from tests.distributed.peer_ranks import CHECKS
from tests.distributed.peer_runs import Outcomes, assert_passed, run_ranks


@pytest.fixture(scope="module", params=[2, 3], ids=["2-ranks", "3-ranks"])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_ranks(request.param, "cpu", tmp_path_factory.mktemp("ranks"), seconds=240)


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_between_processes(outcomes: Outcomes, check: str) -> None:
    assert_passed(outcomes, check)
