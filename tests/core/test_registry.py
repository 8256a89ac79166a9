"""The three places where a name is looked up, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

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


def test_an_installed_package_brings_a_name_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "somebodys_toys-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-toys\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[minisgl.toy]\nbear = somebodys_toys:Bear\n")
    (tmp_path / "somebodys_toys.py").write_text("class Bear:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[type] = Registry("toy")
    registry.register("a")(int)
    assert registry.names() == ["a", "bear"]
    assert (registry.get("bear").__module__, registry.get("bear").__name__) == ("somebodys_toys", "Bear")
    other: Registry[type] = Registry("tool")
    assert other.names() == []
    with pytest.raises(ConfigError, match="unknown tool 'bear'"):
        other.get("bear")


def test_an_unknown_name_is_told_the_known_ones() -> None:
    registry: Registry[type] = Registry("toy")
    registry.register("a")(int)
    with pytest.raises(ConfigError, match="unknown toy 'c'; choose from a or give module:Class"):
        registry.get("c")
