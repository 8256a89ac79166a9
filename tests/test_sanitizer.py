"""Our kernels under NVIDIA's compute-sanitizer: no access out of bounds, no race in shared memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.kernels.sanitize import CASES

# cuda-bindings asks the driver for functions that an older one doesn't have, and does without them.
_LOOKUP = "on CUDA API call to cuGetProcAddress"


def errors_in(output: str) -> int:
    """Errors or hazards that the tool has counted, without failed look-ups of cuda-bindings."""
    summary = re.search(r"ERROR SUMMARY: (\d+) error|(\d+) hazards? displayed", output)
    assert summary is not None, "the tool has not come to its summary"
    return int(summary[1] or summary[2]) - output.count(_LOOKUP)


@pytest.mark.parametrize(
    ("output", "errors"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0),
        (f"========= Program hit CUDA_ERROR_INVALID_VALUE {_LOOKUP}_v2.\n========= ERROR SUMMARY: 1 error", 0),
        (f"========= Program hit CUDA_ERROR_INVALID_VALUE {_LOOKUP}_v2.\n========= ERROR SUMMARY: 2 errors", 1),
        (
            "========= Program hit cudaErrorInvalidValue on CUDA API call to cudaLaunchKernel.\nERROR SUMMARY: 1 error",
            1,
        ),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)", 3),
    ],
)
def test_only_look_ups_are_no_errors(output: str, errors: int) -> None:
    assert errors_in(output) == errors


@pytest.mark.gpu
@pytest.mark.needs("compute-sanitizer")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("script", ["tests.attention.sanitize", *(f"tests.kernels.sanitize {name}" for name in CASES)])
def test_kernels_are_clean(script: str, tool: str) -> None:
    python = [sys.executable, "-m", *script.split()]
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *python]
    # Without PyTorch's caching an access past the end of a tensor does not land in another one.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    told = result.stdout[-4000:] + result.stderr[-4000:]
    assert result.returncode == (9 if _LOOKUP in result.stdout else 0), told  # else the script itself has failed
    assert errors_in(result.stdout) == 0, told
