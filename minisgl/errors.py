"""All errors that this package raises, below `MiniSGLError`, and checks that raise them."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec


class MiniSGLError(Exception):
    """Base class of all errors that this package raises on purpose."""


class ConfigError(MiniSGLError, ValueError):
    """An engine option, or a combination of options, cannot work on this machine or for this model."""


class NotEnoughMemory(ConfigError):
    """The model leaves too little memory for keys and values: not one page fits."""


class ModelLoadError(MiniSGLError):
    """A checkpoint cannot be turned into a model: unknown architecture, wrong or missing tensors, bad files."""


class InvalidRequest(MiniSGLError, ValueError):
    """One request is malformed: ``field`` names what is wrong. The engine has allocated nothing for it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def __reduce__(self) -> tuple[type[InvalidRequest], tuple[str, str]]:
        return type(self), (self.field, self.message)


class ContextExceeded(InvalidRequest):
    """A prompt, or a prompt and the output it asks for, has more tokens than the model or the KV cache can hold."""


class QueueFull(MiniSGLError):
    """The queue of waiting requests is at its limit; nothing was enqueued. Retry later."""


class EngineDead(MiniSGLError):
    """The engine loop has stopped after an error; no request can be answered any more."""


class InvariantError(MiniSGLError, AssertionError):
    """A ``check()`` found that a pool, a cache or a table is inconsistent. Always a bug in the engine."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An error of this package as a message to another process."""

    kind: str  # name of a class of this module
    message: str
    field: str = ""  # the request's field at fault, if ``kind`` names an `InvalidRequest`

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Convert an error. One of another package becomes a `MiniSGLError` whose text names its class."""
        kind = type(error).__name__
        if isinstance(error, InvalidRequest):
            return cls(kind, error.message, error.field)
        if isinstance(error, MiniSGLError) and globals().get(kind) is type(error):
            return cls(kind, str(error))
        return cls("MiniSGLError", f"{kind}: {error}")

    def error(self) -> MiniSGLError:
        """The error that this message describes, to be raised in this process."""
        kind: type[MiniSGLError] = globals()[self.kind]
        return kind(self.field, self.message) if self.field else kind(self.message)


def short_repr(value: object) -> str:
    """``repr(value)`` for an error message, cut to 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write out integers of thousands of digits
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= 80 else text[:77] + "..."


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise as a `ConfigError` what code from outside of this package raises: ``what`` failed, why, and where.

    A module that exits is such an error too. Errors of this package pass, as an interrupt does.
    """
    try:
        yield
    except MiniSGLError:
        raise
    except (Exception, SystemExit) as error:
        name = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        frames = traceback.extract_tb(error.__traceback__)[2:]  # behind this one and the one with the call
        places = [
            f"{Path(each.filename).name}, line {each.lineno}" for each in frames if "importlib" not in each.filename
        ]
        where = f" ({places[-1]})" if places else ""
        raise ConfigError(f"{what}: {name}{error}{where}") from error


def check_type(field: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raise `InvalidRequest` unless ``value`` is one of ``kinds``; a bool never passes for a number."""
    if isinstance(value, bool) and bool not in (kinds if isinstance(kinds, tuple) else (kinds,)):
        raise InvalidRequest(field, f"must be {expected}, got {short_repr(value)}")
    if not isinstance(value, kinds):
        raise InvalidRequest(field, f"must be {expected}, got {type(value).__name__} {short_repr(value)}")


def reject_unknown(given: Mapping[str, object], allowed: set[str], what: str) -> None:
    """Raise `InvalidRequest` naming the first key of ``given`` that is not in ``allowed``."""
    for name in given:
        if name not in allowed:
            raise InvalidRequest(name, f"unknown field of {what}; known fields are {', '.join(sorted(allowed))}")


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int, limit: int) -> None:
    """Raise `InvalidRequest` if an id is outside of the vocabulary, or there are more than ``limit``."""
    ids = list(token_ids)
    if len(ids) > limit:
        raise InvalidRequest(field, f"has {len(ids)} token ids; at most {limit} are allowed")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(field, f"token id {token} is outside of the vocabulary of {vocab_size} tokens")
