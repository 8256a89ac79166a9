"""Listings that cannot go stale: the source of a live object, from the file that Python runs."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import minisgl
from minisgl.viz.markdown import Markdown

_ROOT = Path(minisgl.__file__).parent.parent


def show(item: type | Callable[..., Any]) -> Markdown:
    """Source of a class, function, method or Triton kernel, under the file and the line where it begins.

    Paths in the package are given from its root, so that a listing looks the same on every machine.
    """
    target = inspect.unwrap(getattr(item, "fn", item))  # where Triton keeps the function that it compiles
    lines, first = inspect.getsourcelines(target)
    path = Path(inspect.getfile(target))
    name = path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else path.name
    code = textwrap.dedent("".join(lines)).rstrip()
    return Markdown(f"`{name}`, line {first}\n\n```python\n{code}\n```")
