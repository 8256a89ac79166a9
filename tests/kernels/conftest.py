from __future__ import annotations

from typing import Any

import pytest
import torch

with torch.device("cpu"):  # the first time, it notes which functions make tensors: they had better be PyTorch's own
    torch.empty(0)


@pytest.fixture(autouse=True)
def _outputs_start_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` gives NaN, or the lowest integer, so that an element that a kernel does not write shows."""
    empty: Any = torch.empty

    def poisoned(*shape: Any, **options: Any) -> torch.Tensor:
        memory: torch.Tensor = empty(*shape, **options)
        return memory.fill_(torch.nan if memory.is_floating_point() else torch.iinfo(memory.dtype).min)

    monkeypatch.setattr(torch, "empty", poisoned)
