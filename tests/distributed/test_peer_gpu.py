"""The all-reduce over peer memory between GPUs. Run with ``pytest -m gpu`` where there are two or four."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.peer_ranks import CHECKS
from tests.distributed.peer_runs import Outcomes, assert_passed, run_ranks

pytestmark = pytest.mark.gpu

SIZES = [size for size in (2, 4) if size <= torch.cuda.device_count()]


@pytest.fixture(scope="module", params=SIZES, ids=[f"{size}-ranks" for size in SIZES])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_ranks(request.param, "cuda", tmp_path_factory.mktemp("ranks"), seconds=90)


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_between_gpus(outcomes: Outcomes, check: str) -> None:
    assert_passed(outcomes, check)
