"""Find the implementation that an option names: in the registry of its protocol, or by its import path."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from minisgl.errors import ConfigError, explained, short_repr

T = TypeVar("T")

# Name → implementation (a class or another factory), or → "module:Class", imported when it is chosen. A path lets a
# registry name modules that import it, and keeps Triton or FlashInfer out of processes that do not use them.
Registry = Mapping[str, T | str]


def resolve(field: str, name: str, registry: Registry[T]) -> T:
    """Load the implementation that ``name`` selects: a key of ``registry``, or ``"module:Class"``.

    Raises `ConfigError`, which names the option ``field``, if it is unknown, cannot be imported, or cannot be called.
    """
    if name in registry:
        found = registry[name]
    elif ":" in name:
        found = name
    else:
        known = ", ".join(sorted(registry))
        raise ConfigError(f"{field}: unknown name {name!r}; choose from {known}, or give module:Class of your own")
    implementation: T = import_path(field, found) if isinstance(found, str) else found
    if not callable(implementation):
        raise ConfigError(
            f"{field}: {name!r} is {short_repr(implementation)}; give a class, or a function that makes one"
        )
    return implementation


def build(
    field: str, name: str, registry: Registry[Callable[..., T]], protocol: type, *arguments: Any, **options: Any
) -> T:
    """Make an object of what `resolve` finds, with these arguments.

    Raises `ConfigError`, which names the option ``field``, if a ``module:Class`` cannot be made with them, or
    lacks a method or an attribute of ``protocol``. What a class in ``registry`` raises is left as it is.
    """
    make = resolve(field, name, registry)
    if name in registry:
        return make(*arguments, **options)
    with explained(f"{field}: {name!r} cannot be made"):
        made = make(*arguments, **options)
    for member in (*vars(protocol), *vars(protocol).get("__annotations__", ())):
        if not member.startswith("_") and not hasattr(made, member):
            kind = "method" if callable(vars(protocol).get(member)) else "attribute"
            raise ConfigError(f"{field}: {name!r} has no {kind} {member!r}; is it a class for another option?")
    return made


def import_path(field: str, path: str) -> Any:
    """Import the class or function of ``path``, ``"module:Class"``. Raises `ConfigError` if that fails."""
    module, colon, attribute = path.partition(":")
    if not colon:
        raise ConfigError(f"{field}: must have the form module:Class, got {path!r}")
    with explained(f"{field}: cannot import {path!r}"):
        return getattr(importlib.import_module(module), attribute)
