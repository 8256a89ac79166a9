"""The two places where a name is looked up, and the errors for a wrong one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Protocol

import pytest

from minisgl.errors import ConfigError
from minisgl.registry import Registry, build, resolve
from minisgl.table import RunningTable

TOYS: Registry[type] = {"b": int, "a": str, "lazy": "minisgl.table:RunningTable", "gone": "no_such_module:Toy"}


def test_a_name_in_the_table_is_found() -> None:
    assert resolve("toy", "b", TOYS) is int


def test_a_path_in_the_table_is_imported_when_it_is_chosen() -> None:
    assert resolve("toy", "lazy", TOYS) is RunningTable
    with pytest.raises(ConfigError, match="toy: cannot import 'no_such_module:Toy': No module named 'no_such_module'"):
        resolve("toy", "gone", TOYS)


def test_a_path_needs_no_table() -> None:
    assert resolve("toy", "minisgl.table:RunningTable", TOYS) is RunningTable
    for path in ("minisgl.core:Nothing", "no_such_module:Nothing", ":Nothing", "minisgl.core:", "..:Nothing"):
        with pytest.raises(ConfigError, match=f"toy: cannot import '{path}'"):
            resolve("toy", path, TOYS)


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="toy: unknown name 'c'; choose from a, b, gone, lazy, or give module:Class"):
        resolve("toy", "c", TOYS)


class Greeter(Protocol):
    polite: bool

    def greet(self) -> str: ...


class Polite:
    polite = True

    def greet(self) -> str:
        return "good morning"


class Raises(Polite):
    def __init__(self) -> None:
        raise ValueError("boom")


class NeedsAName(Polite):
    def __init__(self, name: str) -> None: ...


class Mute:
    polite = True


class Rude:
    def greet(self) -> str:
        return "what?"


POLITE = Polite()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", r"'{}' cannot be made: ValueError: boom \(test_registry.py, line [0-9]+\)"),
        ("NeedsAName", "'{}' cannot be made: TypeError: .*missing 1 required positional argument: 'name'$"),
        ("Mute", "'{}' has no method 'greet'; is it a class for another option"),
        ("Rude", "'{}' has no attribute 'polite'; is it a class for another option"),
        ("POLITE", "'{}' is <tests.test_registry.Polite .*; give a class"),
    ],
)
def test_an_object_that_cannot_be_made_or_used(name: str, message: str) -> None:
    path = f"{__name__}:{name}"
    with pytest.raises(ConfigError, match=f"^toy: {message.format(path)}"):
        build("toy", path, {}, Greeter)


def test_what_is_made_is_returned() -> None:
    assert build("toy", f"{__name__}:Polite", {}, Greeter).greet() == "good morning"
    with pytest.raises(ValueError, match=r"^boom$"):  # of ours: an error as any other
        build("toy", "raises", {"raises": Raises}, Greeter)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Toy", "SyntaxError: "),
        ("raise RuntimeError('no luck')", r"RuntimeError: no luck \(broken_toy.py, line 1\)"),
        ("import sys\nsys.exit(3)", r"SystemExit: 3 \(broken_toy.py, line 2\)"),
    ],
)
def test_a_module_that_breaks_while_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    (tmp_path / "broken_toy.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"toy: cannot import 'broken_toy:Toy': {message}"):
        resolve("toy", "broken_toy:Toy", TOYS)


def test_what_is_not_chosen_is_not_imported() -> None:
    """Tables name what lies above them, and packages that may be missing, by path."""
    tables = "attention.select engine.sampler kvcache.prefix models.config scheduler.policy distributed.control_plane"
    code = f"""
import importlib, sys
for name in "{tables}".split():
    importlib.import_module("minisgl." + name)
heavy = {{"flashinfer", "triton", "zmq", "minisgl.kvcache.block_hash", "minisgl.models.architectures"}}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
