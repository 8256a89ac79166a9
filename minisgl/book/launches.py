"""What a piece of work launches: operators and kernels in order, done again from a tape, drawn with what each needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture
from minisgl.kernels import has_triton


class Call(NamedTuple):
    """A function that was launched, with everything that it takes to launch it again."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class Launches(TorchDispatchMode):
    """Notes in ``calls`` what is launched inside the ``with`` block: PyTorch's operators, and kernels of Triton's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self._in_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        launched = func._schema.is_mutable or not storages(result) <= storages((args, kwargs))  # else it is a view
        if launched and "empty" not in name and not self._in_kernel:
            self.calls.append(Call(name, func, args, kwargs or {}, result))
        return result

    def __enter__(self) -> Self:
        if has_triton():  # its kernels pass PyTorch by, so they are noted where Triton launches them
            from minisgl.kernels.norm import _add_and_norm_kernel

            kind: Any = type(_add_and_norm_kernel)
            run = kind.run

            def noted(kernel: Any, *args: Any, **kwargs: Any) -> None:
                self._in_kernel = True  # the interpreter itself calls operators
                run(kernel, *args, **kwargs)
                self._in_kernel = False
                self.calls.append(Call(kernel.fn.__name__, run, (kernel, *args), kwargs, None))

            self._patch = patch.object(kind, "run", noted)
            self._patch.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        if has_triton():
            self._patch.stop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]


class Tape:
    """Does again what ``work`` did, in the same memory: a CUDA graph, in Python."""

    def __init__(self, work: Callable[[], tuple[torch.Tensor, ...]]) -> None:
        with Launches() as launches:
            self.outputs = work()
        self.calls = launches.calls

    def replay(self) -> None:
        """Do all calls again, and leave each result where the first one lay."""
        for call in self.calls:
            again = call.function(*call.args, **call.kwargs)
            for kept, new in zip(tensors(call.result), tensors(again), strict=True):
                if kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)


def tensors(tree: object) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists and dictionaries."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storages(tree: object) -> set[int]:
    """Addresses of the memory that the tensors of ``tree`` are in."""
    return {each.untyped_storage().data_ptr() for each in tensors(tree)}


def bytes_moved(calls: Sequence[Call]) -> int:
    """Count each argument and each result of the calls once; of an indexed write, only what is written."""
    total = 0
    for call in calls:
        read, written = tensors((call.args, call.kwargs)), tensors(call.result)
        if call.name.startswith("index_copy"):
            read, written = read[1:], read[-1:]
        total += sum(each.nbytes for each in [*read, *written])
    return total


def needs(calls: Sequence[Call]) -> list[set[int]]:
    """For each call the earlier ones whose results it reads or writes over, without those that they need themselves."""
    writer: dict[int, int] = {}
    direct: list[set[int]] = []
    behind: list[set[int]] = []  # everything that has to be done before
    for number, call in enumerate(calls):
        read, written = storages((call.args, call.kwargs)), storages(call.result)
        schema = getattr(call.function, "_schema", None)
        if not written or (schema is not None and schema.is_mutable):  # it works in place
            written = read | written
        before = {writer[each] for each in read | written if each in writer}
        indirect = set().union(*(behind[each] for each in before))
        direct.append(before - indirect)
        behind.append(before | indirect)
        writer |= dict.fromkeys(written, number)
    return direct


def launch_graph(calls: Sequence[Call], title: str) -> Picture:
    """Draw calls in the order in which they were launched; an arc goes from each to those that need its result."""
    step = min((WIDTH - 2 * MARGIN) / max(len(calls), 1), 120.0)
    needed = needs(calls)
    farthest = max((number - min(before) for number, before in enumerate(needed) if before), default=1)
    line = 60.0 + 22.0 * min(farthest, 5)
    legend = "arcs: needs the result of  ·  dashed: merely launched one after the other"
    canvas = Canvas(title, legend=legend, says=f"{title}.")
    for number, (call, before) in enumerate(zip(calls, needed, strict=True)):
        x, middle = MARGIN + number * step, (step - 16) / 2
        if number and number - 1 not in before:
            canvas.path(f"M{x - 14:g} {line + 12:g}h12", "line dashed")
        canvas.cell(x, line, step - 16, 24, (call.name.removesuffix("_"), "small"), color=number)
        for first in before:
            start, end = MARGIN + first * step + middle + 6, x + middle - 6
            rise = 22.0 * min(number - first, 5)
            canvas.path(f"M{start:g} {line:g}Q{(start + end) / 2:g} {line - rise:g} {end:g} {line:g}")
        others = ", ".join(str(each + 1) for each in sorted(before)) or "none of them"
        canvas.says.append(f"{number + 1}. {call.name} needs {others}.")
    return canvas.picture(line + 40)
