"""minisgl: an engine for serving large language models that is also a textbook.

Public names are imported when they are first used, so that importing one module does not load the whole engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl.errors import ConfigError, EngineDead, InvalidRequest, MiniSGLError, ModelLoadError, QueueFull
    from minisgl.llm import LLM
    from minisgl.outputs import Completion, Delta, RequestMetrics, RequestOutput
    from minisgl.sampling_params import SamplingParams

_HOMES = {
    "sampling_params": ("SamplingParams",),
    "errors": ("ConfigError", "EngineDead", "InvalidRequest", "MiniSGLError", "ModelLoadError", "QueueFull"),
    "llm": ("LLM",),
    "outputs": ("Completion", "Delta", "RequestMetrics", "RequestOutput"),
}

__all__ = [
    "LLM",
    "Completion",
    "ConfigError",
    "Delta",
    "EngineDead",
    "InvalidRequest",
    "MiniSGLError",
    "ModelLoadError",
    "QueueFull",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"minisgl.{home}"), name)
    raise AttributeError(f"module 'minisgl' has no attribute {name!r}")
