"""Runs a contract suite over every implementation in a table, or over the class that ``--impl`` names.

A suite is a module with ``CONTRACTS``: for each protocol that it grades, the name of a fixture and ``(table,
protocol)``. Tests that use the fixture run once an implementation; the fixture finds its name in ``request.param``
and gets the implementation with `resolve`. The suite's ``MARKS`` are the marks of some names, such as ``gpu``. Its
``INTERPRETED`` are the names of those that Triton's interpreter runs where there is no GPU: it takes a thousand times
as long, so they are given only the tests marked ``interpreted`` there. See README.md beside this file.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.registry import Registry, resolve

Contracts = dict[str, tuple[Registry[Any], type]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    path = metafunc.config.getoption("--impl")
    left_out = [name for marker in metafunc.definition.iter_markers("not_for") for name in marker.args]
    if not torch.cuda.is_available() and metafunc.definition.get_closest_marker("interpreted") is None:
        left_out += getattr(metafunc.module, "INTERPRETED", ())
    for fixture, (table, protocol) in _contracts(metafunc.module).items():
        if fixture in metafunc.fixturenames:
            given = path is not None and not _missing(resolve("--impl", path, table), protocol)
            names = [path] if given else [name for name in sorted(table) if name not in left_out]
            marks = getattr(metafunc.module, "MARKS", {})
            params = [pytest.param(name, marks=marks.get(name, ())) for name in names]
            metafunc.parametrize(fixture, params, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path = config.getoption("--impl")
    if path is None or not items:
        return
    graded = {fixture: entry for item in items for fixture, entry in _contracts(_module(item)).items()}
    missing = {
        fixture: _missing(resolve("--impl", path, table), protocol) for fixture, (table, protocol) in graded.items()
    }
    fitting = {fixture: _members(protocol) for fixture, (_, protocol) in graded.items() if not missing[fixture]}
    if not fitting:
        lacks = "".join(f"\n  {fixture}: lacks {', '.join(sorted(names))}" for fixture, names in missing.items())
        raise pytest.UsageError(f"--impl: {path} implements the protocol of no suite in this run{lacks}")
    # A protocol that asks for less than another that fits as well is not what the class was written for.
    chosen = {fixture for fixture, names in fitting.items() if not any(names < other for other in fitting.values())}
    kept = [item for item in items if chosen & set(_contracts(_module(item))) & set(getattr(item, "fixturenames", ()))]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _module(item: pytest.Item) -> object:
    return getattr(item, "module", None)


def _contracts(module: object) -> Contracts:
    return getattr(module, "CONTRACTS", {})


def _members(protocol: type) -> set[str]:
    """Public methods and properties that a protocol declares."""
    return {name for name in vars(protocol) if not name.startswith("_")}


def _missing(implementation: type, protocol: type) -> set[str]:
    """Those that a class lacks; attributes that only its constructor sets cannot be seen, and are not methods."""
    methods = {name for name in _members(protocol) if callable(vars(protocol)[name])}
    return {name for name in methods if not callable(getattr(implementation, name, None))}
