"""Named implementations of a protocol: how a chapter, a student or an installed package plugs a part in."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from minisgl.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps a name to an implementation (a class or a factory).

    A name is looked up in three places, in this order: what `register` added, the entry points of installed
    packages (group ``minisgl.<kind>``), and ``"module:Attribute"`` paths, which need no registration at all.

    Args:
        kind: what is registered, in the singular with underscores, e.g. ``"prefix_cache"``.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that adds an implementation under ``name``; a second one of the same name is an error."""

        def add(item: T) -> T:
            if name in self._items:
                raise ConfigError(f"{self.kind} {name!r} is registered already; choose another name")
            self._items[name] = item
            return item

        return add

    def names(self) -> list[str]:
        """Registered names and entry points, sorted."""
        return sorted({*self._items, *entry_points(group=f"minisgl.{self.kind}").names})

    def get(self, name: str) -> T:
        """The implementation called ``name``, or at the path ``"module:Attribute"``.

        Raises:
            ConfigError: no such name; the message lists the known ones.
        """
        if name in self._items:
            return self._items[name]
        for entry in entry_points(group=f"minisgl.{self.kind}", name=name):
            item: T = entry.load()
            return item
        if ":" in name:
            return self._import(name)
        raise ConfigError(f"unknown {self.kind} {name!r}; choose from {', '.join(self.names())} or give module:Class")

    def _import(self, path: str) -> T:
        module, _, attribute = path.partition(":")
        try:
            item: T = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"cannot import {self.kind} {path!r}: {error}") from error
        return item
