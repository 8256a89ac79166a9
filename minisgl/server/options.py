"""Command-line flags out of the fields and the docstring of a dataclass, so that an option is described once."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType, UnionType
from typing import Any, get_args, get_origin, get_type_hints


def add_options(
    parser: argparse.ArgumentParser, config: type[Any], short_forms: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Add ``--kebab-case`` flags for the fields of the dataclass ``config``.

    Types come from the annotations (of ``int | None``, the ``int``; a tuple is written ``1,2,4``, an empty one as an
    empty string; a flag without a value is true), help texts from the ``Args:`` section. A flag that is not given
    leaves no attribute behind, so that `given_options` passes on what was given and nothing else.

    Args:
        parser: to add to.
        config: dataclass.
        short_forms: another flag for some fields, by their names.
    """
    types = get_type_hints(config)
    texts = _described(inspect.getdoc(config) or "")
    for field in fields(config):
        default = "" if field.default in (None, MISSING) else f" Default: {field.default}."
        parse = _parser_of(types[field.name])
        alone: dict[str, Any] = {"nargs": "?", "const": True} if parse is _truth else {}
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            *([short_forms[field.name]] if field.name in short_forms else []),
            dest=field.name,
            type=parse,
            **alone,
            default=argparse.SUPPRESS,
            metavar=field.name.upper(),
            help=(texts[field.name] + default).replace("%", "%%"),
        )


def given_options(arguments: argparse.Namespace, config: type[Any]) -> dict[str, Any]:
    """The fields of ``config`` that were given on the command line, by name."""
    names = {field.name for field in fields(config)}
    return {name: value for name, value in vars(arguments).items() if name in names}


def _parser_of(kind: Any) -> Any:
    if isinstance(kind, UnionType):
        (kind,) = (member for member in get_args(kind) if member is not type(None))
    if get_origin(kind) is tuple:
        return _integers if get_args(kind)[0] is int else _words
    return _truth if kind is bool else kind


def _truth(word: str) -> bool:
    if word.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be true or false, got {word!r}")
    return word.lower() == "true"


def _integers(words: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers separated by commas, got {words!r}") from None


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def _described(docstring: str) -> dict[str, str]:
    """Texts of the ``Args:`` section by name, each on one line and without markup."""
    section = docstring.partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(text.replace("`", "").split()) for name, text in entries}
