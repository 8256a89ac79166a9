from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.book import make


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A repository with a book of one chapter, whose notebook has the outputs that a run would leave."""
    make(tmp_path)
    return tmp_path
