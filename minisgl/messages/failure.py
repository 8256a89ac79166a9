"""An error of this package as a message: its class by name, and what it says."""

from __future__ import annotations

import msgspec

from minisgl import errors
from minisgl.errors import InvalidRequest, MiniSGLError


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """What went wrong.

    Args:
        kind: name of a class in `minisgl.errors`.
        message: for people.
        field: the request's field that is to blame, if ``kind`` names a kind of `InvalidRequest`.
    """

    kind: str
    message: str
    field: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """``error`` as a message; what is no error of this package is named in the text."""
        kind = type(error).__name__
        if isinstance(error, InvalidRequest):
            return cls(kind, error.message, error.field)
        if isinstance(error, MiniSGLError) and getattr(errors, kind, None) is type(error):
            return cls(kind, str(error))
        return cls("MiniSGLError", f"{kind}: {error}")

    def error(self) -> MiniSGLError:
        """The error again, to be raised on this side."""
        kind: type[MiniSGLError] = getattr(errors, self.kind)
        return kind(self.field, self.message) if self.field else kind(self.message)
