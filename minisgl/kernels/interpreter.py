"""Triton's interpreter, which runs kernels in Python on the CPU, without the work that it does again and again.

Before it calls a function it looks through the whole of `triton.language` for what it has to replace. Not only for a
kernel, whose end puts everything back, but for each function that a kernel calls, `tl.sum` and `tl.cdiv` among them,
where there is nothing left to replace: a millisecond of searching, for microseconds of arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import triton.language as tl

Function = Callable[..., Any]


def prepare_once_a_launch(interpreter: Any) -> None:
    """Have a launch prepare each part of the language for its first function that sees it, and not for each call.

    Args:
        interpreter: the module ``triton.runtime.interpreter``. One that works in another way is left as it is.
    """
    prepare = getattr(interpreter, "_patch_lang", None)
    if prepare is None:
        return
    launch = interpreter.GridExecutor.__call__
    prepared: set[tuple[bool, bool]] = set()

    @cache
    def sees(function: Function) -> tuple[bool, bool]:
        known = list(map(id, function.__globals__.values()))
        return id(tl) in known, id(tl.core) in known

    def first_prepare(function: Function) -> Any:
        if sees(function) in prepared:
            return None  # which nobody asks for: only a launch does, for its kernel, and that comes first
        prepared.add(sees(function))
        return prepare(function)

    def fresh_launch(executor: Any, *arguments: Any, **options: Any) -> None:
        prepared.clear()
        launch(executor, *arguments, **options)

    interpreter._patch_lang = first_prepare
    interpreter.GridExecutor.__call__ = fresh_launch
