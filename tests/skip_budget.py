"""pytest plugin: no test is green because it did not run.

Every skip is printed with its reason, and the run fails when there are more than ``tests/skip-budget.txt`` allows. A
test marked ``needs(name)`` is a skip where that package or program is not installed, unless ``--without name`` leaves
such tests out. Tests that want a GPU, or several, are left out where there are fewer. What is left out is counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import pytest

LEFT_OUT = "minisgl left out"
BUDGET_FILE = "tests/skip-budget.txt"
BY_HAND = ("ray",)
"""Packages that ``make`` does not install, since they are large: without them, their tests are left out and counted."""


def read_budget(file: Path) -> int:
    """The number on the file's first line; the lines after it say why it is not zero."""
    number, _, reason = file.read_text(encoding="utf-8").partition("\n")
    if int(number) > 0 and not reason.strip():
        raise pytest.UsageError(f"{file} allows {number} skips: give the reason below the number")
    return int(number)


class SkipBudget:
    """Collects what did not run.

    Args:
        budget: most skips and expected failures that one run may have.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.skips: dict[str, None] = {}
        """In order and without duplicates, which there would be of a file that two workers collect."""
        self.gpu_tests = 0
        self.without: Counter[str] = Counter()
        self.missing: Counter[str] = Counter()
        """Tests that are skipped, by what they need."""

    @pytest.hookimpl(trylast=True)  # after ``-k`` and ``-m``, so that what is counted would have run
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out the tests that need CUDA where there is none; skip those that need what is not installed."""
        kept, left_out = [], []
        for item in items:
            needs = _needs(item)
            unwanted = next((name for name in needs if name in config.getoption("--without")), None)
            missing = next((name for name in needs if not _is_present(name)), None)
            reason = unwanted or (missing if _wants_gpus(item) or missing in BY_HAND else None)
            if item.get_closest_marker("gpu") and not _cuda_is_available():
                self.gpu_tests += 1
                left_out.append(item)
            elif reason is not None:
                self.without[reason] += 1
                left_out.append(item)
            else:
                kept.append(item)
                if missing is not None:
                    self.missing[missing] += 1
                    item.add_marker(pytest.mark.skip(reason=f"{missing} is not installed"))
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = kept
        if (to_the_controller := getattr(config, "workeroutput", None)) is not None:
            to_the_controller[LEFT_OUT] = [self.gpu_tests, dict(self.without), dict(self.missing)]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Under pytest-xdist each worker leaves the same tests out, and this process, which prints, none."""
        if (left_out := getattr(node, "workeroutput", {}).get(LEFT_OUT)) is not None:
            self.gpu_tests, self.without, self.missing = left_out[0], Counter(left_out[1]), Counter(left_out[2])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that was skipped, or that failed as expected."""
        if report.skipped:
            self.skips[f"{report.nodeid}: {getattr(report, 'wasxfail', '') or _reason(report)}"] = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a whole file that was skipped."""
        if report.skipped:
            self.skips[f"{report.nodeid}: {_reason(report)}"] = None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run that would have passed."""
        if len(self.skips) > self.budget and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what did not run, and why."""
        over = len(self.skips) > self.budget
        terminalreporter.section("not run", red=over)
        for skip in self.skips:
            terminalreporter.write_line(f"skipped: {skip}")
        terminalreporter.write_line(
            f"{len(self.skips)} skipped; {BUDGET_FILE} allows {self.budget}{': FAILED' if over else ''}"
        )
        terminalreporter.write_line(f"{self.gpu_tests} tests marked gpu left out for want of a CUDA device")
        for name, count in self.without.items():
            terminalreporter.write_line(f"{count} tests left out for want of {name}")
        for name, count in self.missing.items():
            terminalreporter.write_line(
                f"{count} tests need {name}: install it, or leave them out with --without {name} "
                f"(make test WITHOUT={name})"
            )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Hook of pytest: the option of this plugin."""
    parser.addoption(
        "--without",
        metavar="NAME",
        action="append",
        default=[],
        help="leave out, and count, the tests that need this program or package; may be given several times",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hook of pytest: install the plugin for this run."""
    config.pluginmanager.register(SkipBudget(read_budget(config.rootpath / BUDGET_FILE)), "skip-budget")


def _needs(item: pytest.Item) -> list[str]:
    return [str(name) for marker in item.iter_markers("needs") for name in marker.args]


def _wants_gpus(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None or any(name.endswith(" GPUs") for name in _needs(item))


def _is_present(name: str) -> bool:
    """``"4 GPUs"``, or what can be installed."""
    count, _, unit = name.partition(" ")
    return _cuda_devices() >= int(count) if unit == "GPUs" else _is_installed(name)


def _is_installed(name: str) -> bool:
    """A package, or a program: on the path, or beside the interpreter, where pip puts those of packages."""
    beside = str(Path(sys.executable).parent)
    return find_spec(name) is not None or which(name) is not None or which(name, path=beside) is not None


def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()


def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count()


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
