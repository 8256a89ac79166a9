"""The three places where a name is looked up, and what a wrong one is told."""

from __future__ import annotations

import pytest

from minisgl.core import Registry, RunningTable
from minisgl.errors import ConfigError


def test_a_registered_name_is_found_and_listed() -> None:
    registry: Registry[type] = Registry("toy")
    assert registry.register("b")(int) is int
    registry.register("a")(str)
    assert (registry.names(), registry.get("b")) == (["a", "b"], int)


def test_a_name_is_taken_once() -> None:
    registry: Registry[type] = Registry("toy")
    registry.register("a")(int)
    with pytest.raises(ConfigError, match="toy 'a' is registered already"):
        registry.register("a")(str)
    assert registry.get("a") is int


def test_a_path_needs_no_registration() -> None:
    registry: Registry[type] = Registry("toy")
    assert registry.get("minisgl.core:RunningTable") is RunningTable
    for path in ("minisgl.core:Nothing", "no_such_module:Nothing"):
        with pytest.raises(ConfigError, match=f"cannot import toy '{path}'"):
            registry.get(path)


def test_an_unknown_name_is_told_the_known_ones() -> None:
    registry: Registry[type] = Registry("toy")
    registry.register("a")(int)
    with pytest.raises(ConfigError, match="unknown toy 'c'; choose from a or give module:Class"):
        registry.get("c")
