from __future__ import annotations

import msgspec
import pytest

from minisgl.errors import ConfigError, EngineDead, Failure, InvalidRequest, MiniSGLError, ModelLoadError, QueueFull

ERRORS = [QueueFull("full"), EngineDead("dead"), ConfigError("page_size: no"), ModelLoadError("gone")]


@pytest.mark.parametrize("error", [*ERRORS, InvalidRequest("stop", "no such thing")], ids=lambda e: type(e).__name__)
def test_an_error_of_ours_arrives_as_it_left(error: MiniSGLError) -> None:
    frame = msgspec.msgpack.encode(Failure.of(error))
    arrived = msgspec.msgpack.decode(frame, type=Failure).error()
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert getattr(arrived, "field", None) == getattr(error, "field", None)


def test_any_other_error_keeps_its_name() -> None:
    arrived = Failure.of(ZeroDivisionError("by nothing")).error()
    assert type(arrived) is MiniSGLError
    assert str(arrived) == "ZeroDivisionError: by nothing"
