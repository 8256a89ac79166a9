"""What lives when the heap is frozen is not looked at again; what comes later is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from minisgl.core.heap import freeze_heap


class Node:
    """Something that keeps itself alive."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_garbage_is_collected_before() -> None:
    gone = weakref.ref(Node())
    freeze_heap()
    assert gone() is None


def test_what_lives_is_not_looked_at_again() -> None:
    living = Node()
    kept, looked_at = weakref.ref(living), len(gc.get_objects())
    freeze_heap()
    assert len(gc.get_objects()) < looked_at / 100
    del living
    gc.collect()
    assert kept() is not None


def test_later_garbage_is_collected() -> None:
    freeze_heap()
    gone = weakref.ref(Node())
    gc.collect()
    assert gone() is None
