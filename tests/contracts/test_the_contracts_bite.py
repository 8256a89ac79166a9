"""The suite for prefix caches passes for a right one given from outside, and fails for each of three wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

SUITE = Path(__file__).with_name("test_prefix_cache.py")


class Verdict:
    """Pytest plugin that collects which tests passed and which failed, by name."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2].partition("[")[0]
        if report.failed:
            self.failed.add(name)
        elif report.when == "call":
            self.passed.add(name)


def grade(path: str) -> tuple[int, Verdict]:
    verdict = Verdict()
    return pytest.main([str(SUITE), "--impl", path, "-q", "-p", "no:cacheprovider"], plugins=[verdict]), verdict


def test_the_real_cache_passes() -> None:
    status, verdict = grade("minisgl.kvcache.radix:RadixCache")
    assert status == pytest.ExitCode.OK
    assert len(verdict.passed) > 20
    assert not verdict.failed


@pytest.mark.parametrize(
    ("mutant", "broken"),
    [
        ("LosesLocksOnSplit", "test_lock_survives_the_division_of_its_prefix"),
        ("ClaimsDuplicates", "test_duplicates_are_answered_with_the_canonical_pages"),
        ("EvictsLocked", "test_lock_protects_the_whole_prefix"),
    ],
)
def test_a_broken_cache_fails(mutant: str, broken: str) -> None:
    status, verdict = grade(f"tests.contracts.mutants:{mutant}")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert broken in verdict.failed
    assert "test_starts_empty" in verdict.passed, "the suite did run"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no.such.module:Cache", "No module named 'no'"),
        ("minisgl.kvcache.radix:NoSuchCache", "has no attribute 'NoSuchCache'"),
        ("tests.contracts.mutants:__doc__", "is not a class"),
        ("minisgl.kvcache.pages:PagePool", "make_cache: lacks evict, held_pages, insert, lock, match, unlock"),
    ],
)
def test_what_cannot_be_graded_is_a_usage_error(path: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert grade(path)[0] == pytest.ExitCode.USAGE_ERROR
    assert message in capsys.readouterr().err
