"""Find the implementation that an option names: in the registry of its protocol, or by its import path."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, TypeVar

from minisgl.errors import ConfigError

T = TypeVar("T")

# Name → implementation (a class or another factory), or → "module:Class", imported when it is chosen. A path lets a
# registry name modules that import it, and keeps Triton or FlashInfer out of processes that do not use them.
Registry = Mapping[str, T | str]


def resolve(field: str, name: str, registry: Registry[T]) -> T:
    """Load the implementation that ``name`` selects: a key of ``registry``, or ``"module:Class"``.

    Raises `ConfigError`, which names the option ``field``, if it is unknown or cannot be imported.
    """
    if name in registry:
        found = registry[name]
    elif ":" in name:
        found = name
    else:
        known = ", ".join(sorted(registry))
        raise ConfigError(f"{field}: unknown name {name!r}; choose from {known}, or give module:Class of your own")
    implementation: T = import_path(field, found) if isinstance(found, str) else found
    return implementation


def import_path(field: str, path: str) -> Any:
    """Import the class or function of ``path``, ``"module:Class"``. Raises `ConfigError` if that fails."""
    module, colon, attribute = path.partition(":")
    if not colon:
        raise ConfigError(f"{field}: must have the form module:Class, got {path!r}")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{field}: cannot import {path!r}: {error}") from error
