"""Our kernels under NVIDIA's compute-sanitizer: no access out of bounds, no race in shared memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.kernels.sanitize import CASES

pytestmark = [pytest.mark.gpu, pytest.mark.needs("compute-sanitizer"), pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("script", ["tests.attention.sanitize", *(f"tests.kernels.sanitize {name}" for name in CASES)])
def test_kernels_are_clean(script: str, tool: str) -> None:
    python = [sys.executable, "-m", *script.split()]
    # Calls that return an error aren't ours: cuda-bindings looks up functions that an older driver doesn't have.
    options = ["--error-exitcode", "9", *(["--report-api-errors", "no"] if tool == "memcheck" else [])]
    command = ["compute-sanitizer", "--tool", tool, *options, *python]
    # Without PyTorch's caching an access past the end of a tensor does not land in another one.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert "ERROR SUMMARY: 0 errors" in result.stdout or "0 hazards" in result.stdout
