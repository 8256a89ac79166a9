"""Runs the tests of assignments as contract suites are run: over the class that ``--impl`` names."""

from __future__ import annotations

from tests.contracts.conftest import pytest_generate_tests

__all__ = ["pytest_generate_tests"]
