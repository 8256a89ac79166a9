"""Named ranges for NVIDIA's profilers: `nsys profile` shows the phases of every step, and the layers within them.

Ranges are pushed by the host when it launches work. A step replayed from a CUDA graph is one launch, so its layers have
no ranges: use ``enforce_eager`` to see them, or ``nsys --cuda-graph-trace=node`` to see the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from minisgl.batch import Batch, StepPhase
from minisgl.errors import ConfigError
from minisgl.request import Request

_LAYER_PARTS = ("self_attn", "mlp")


class NvtxObserver:
    """A `StepObserver` that pushes a range for each phase, and pops it. A loop and its engine share one."""

    def __init__(self) -> None:
        self._open: list[StepPhase] = []

    def begin(self, phase: StepPhase, batch: Batch | None) -> None:
        """Push the phase, with the numbers of tokens and decode rows of the step if it has a batch yet."""
        self._open.append(phase)
        size = "" if batch is None else f" {batch.num_tokens} tokens, {batch.num_decode} decode rows"
        torch.cuda.nvtx.range_push(f"{phase}{size}")

    def end(self, phase: StepPhase, batch: Batch | None) -> None:
        """Pop the phase, and what lies in it and did not end, such as a ``compute`` that raised."""
        while self._open and self._open.pop() != phase:
            torch.cuda.nvtx.range_pop()
        torch.cuda.nvtx.range_pop()

    def finish(self, requests: Sequence[Request]) -> None:
        """Do nothing: a request is no range."""


def check_nvtx() -> None:
    """Raise `ConfigError` if this PyTorch has no NVTX, because it was built without CUDA."""
    try:
        torch.cuda.nvtx.mark("minisgl")
    except RuntimeError as error:
        raise ConfigError(f"nvtx: ranges need a CUDA build of PyTorch ({error}); leave it off") from None


def add_layer_ranges(model: torch.nn.Module) -> None:
    """Push a range around every decoder layer, and around attention and the MLP in it."""
    for name, module in model.named_modules():
        parts = name.split(".")
        if "layers" in parts and (parts[-2] == "layers" or parts[-1] in _LAYER_PARTS):
            _add_range(module, ".".join(parts[parts.index("layers") :]))


def _add_range(module: torch.nn.Module, name: str) -> None:
    def push(module: torch.nn.Module, inputs: Any) -> None:
        torch.cuda.nvtx.range_push(name)

    def pop(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        torch.cuda.nvtx.range_pop()

    module.register_forward_pre_hook(push)
    module.register_forward_hook(pop, always_call=True)
