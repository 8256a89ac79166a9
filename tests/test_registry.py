"""The two places where a name is looked up, and the errors for a wrong one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from minisgl.errors import ConfigError
from minisgl.registry import Registry, resolve
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
    for path in ("minisgl.core:Nothing", "no_such_module:Nothing", ":Nothing", "minisgl.core:"):
        with pytest.raises(ConfigError, match=f"toy: cannot import '{path}'"):
            resolve("toy", path, TOYS)


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="toy: unknown name 'c'; choose from a, b, gone, lazy, or give module:Class"):
        resolve("toy", "c", TOYS)


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
