"""Runs every path of our attention kernels once, for compute-sanitizer to watch. Needs a CUDA device.

export PYTORCH_NO_CUDA_MEMORY_CACHING=1   # else an access past the end of a tensor lands in another one
compute-sanitizer --tool memcheck  --error-exitcode 1 python -m tests.attention.sanitize
compute-sanitizer --tool racecheck --error-exitcode 1 python -m tests.attention.sanitize
"""

from __future__ import annotations

import torch

from minisgl.context import AttentionSpec
from tests.attention import PagedSequences
from tests.attention.test_cascade import EagerCascade


def main() -> None:
    """Rows in several programs, groups that share a prefix, prompts with short and long tiles, a window."""
    for head_dim, dtype in ((128, torch.bfloat16), (80, torch.float16)):
        specs = [AttentionSpec(i, 6, 2, head_dim, 0.1, window) for i, window in enumerate((None, 100))]
        lengths = [900, 700, 650, 40, 500, 1100, 30]
        sequences = PagedSequences(EagerCascade, torch.device("cuda"), specs, lengths, 16, dtype)
        for row in (1, 2, 4):
            sequences.share(row, 0, 20)
        sequences.fill([890, 690, 630, 20, 490, 0, 3])
        sequences.run({0: 1, 1: 1, 2: 1, 4: 1, 3: 1, 5: 1100, 6: 20})
        sequences.run({4: 1, 2: 1, 1: 1, 0: 1, 3: 1})
        sequences.run({0: 1})
    print("all outputs are right")


if __name__ == "__main__":
    main()
