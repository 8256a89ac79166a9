"""Options of the test run. What ``--impl`` does is in ``tests/contracts``."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from minisgl.errors import ConfigError
from minisgl.registry import import_path

# Before anything imports Triton, which decides then: without a GPU its kernels are interpreted, on the CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Where these are set, pytest explains a failed comparison to the last line, for which it needs minutes if what is
# compared are lists of thousands of numbers: a wrong implementation would be a suite that hangs.
for name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(name, None)

# A machine that stands still for a moment is no error of what is tested: no example has a deadline, and examples may be
# slow to draw. Here, because ``--hypothesis-profile=long`` is looked up before any test module is imported.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
# For what must fail: the first example will do, and is not made smaller for minutes.
settings.register_profile("failing", settings.get_profile("patient"), phases=[Phase.explicit, Phase.generate])
settings.register_profile("long", max_examples=500, stateful_step_count=60)

LONGEST = (
    "distributed/test_faults",
    "layers/test_compiled",
    "bench/test_server_commands",
    "server/test_hangs",
    "tools/test_site",
    "bench/test_tensor_parallel",
    "server/test_chaos",
    "distributed/test_tokens",
    "course/test_grading",
    "test_metamorphic",
    "bench/test_simulation",
    "distributed/test_remote_executor",
    "distributed/test_server",
    "book/test_player_in_jupyterlab",
    "server/test_grammar_check",
    "server/test_connections",
)
"""Files that take more than a minute. They come first: one that came last would keep a worker busy, and no other."""


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """Undo what a command that a test runs in this process has set for the logs of the whole process."""
    root = logging.getLogger()
    handlers, level = root.handlers.copy(), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--impl",
        metavar="MODULE:CLASS",
        help="run the contract suite of the protocol that this class implements over this class alone",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "not_for(name, ...): leave these implementations out of the test")
    config.addinivalue_line("markers", "interpreted: run it in Triton's interpreter too, which is slow")
    path = config.getoption("--impl")
    if path is None:
        return
    sys.path.insert(0, str(config.invocation_params.dir))
    try:
        implementation: object = import_path("--impl", path)
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from error
    if not isinstance(implementation, type):
        raise pytest.UsageError(f"--impl: {path} is not a class")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / f"{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST)))
