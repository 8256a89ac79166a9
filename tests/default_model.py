"""The real default model for tests that need real weights or the real tokenizer. Everything else uses tiny configs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """Directory of SmolLM2-135M-Instruct, fetched once; a failure to fetch it fails the test."""
    from minisgl.models.hub import resolve_model  # here, because chapter 1 can be tested without chapter 3

    return resolve_model("default")
