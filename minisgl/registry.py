"""Look up an implementation that an option names: in the table of its protocol, or by its import path."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, TypeVar

from minisgl.errors import ConfigError

T = TypeVar("T")


Table = Mapping[str, T | str]
"""Name → implementation (a class or another factory), or → ``"module:Class"``, which is imported when it is chosen.

Each protocol has one such table, written in one place. An import path keeps the table below the modules that it names,
and Triton or FlashInfer out of a process that does not use them."""


def resolve(field: str, name: str, table: Table[T]) -> T:
    """Load the implementation that ``name`` selects.

    Args:
        field: the option that gave the name, for error messages.
        name: a key of ``table``, or the ``"module:Class"`` of an implementation from outside.
        table: of the protocol.

    Raises:
        ConfigError: the name is unknown, or its module or class cannot be imported.
    """
    if name in table:
        found = table[name]
    elif ":" in name:
        found = name
    else:
        known = ", ".join(sorted(table))
        raise ConfigError(f"{field}: unknown name {name!r}; choose from {known}, or give module:Class of your own")
    implementation: T = import_path(field, found) if isinstance(found, str) else found
    return implementation


def import_path(field: str, path: str) -> Any:
    """Import what ``path`` (``"module:Class"``) names.

    Raises:
        ConfigError: there is no such module, or nothing of that name in it.
    """
    module, colon, attribute = path.partition(":")
    if not colon:
        raise ConfigError(f"{field}: must have the form module:Class, got {path!r}")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{field}: cannot import {path!r}: {error}") from error
