"""The options of the server, and how options become arguments of the command line."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import MappingProxyType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from minisgl.errors import ConfigError
from minisgl.sampling_params import MAX_STOP_LENGTH, MAX_STOPS
from minisgl.server.tools import TOOL_PARSERS


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the server needs to know beside `minisgl.config.EngineConfig`.

    Args:
        host: address to listen on; 127.0.0.1 is reached from this machine only.
        port: port to listen on; 0 takes a free one.
        api_key: what clients must send as ``Authorization: Bearer KEY``; None lets everybody in. Prefer the environment
            variable MINISGL_API_KEY: other users of the machine can read command lines.
        cors_origin: origins, such as ``https://example.org``, whose pages may call the server from a browser, separated
            by commas; ``*`` is all of them.
        max_body_size: most bytes of a request's body; a larger one is refused while it is being read.
        max_body_fields: most fields of a body's objects, and most objects and lists.
        max_body_values: most values in a body's objects and lists, such as token ids.
        max_connections: most connections at a time; one more is answered 503 and closed.
        header_timeout: seconds in which all headers of a request must come; the connection is closed otherwise.
        body_timeout: seconds in which a request's body must come.
        stall_timeout: seconds in which a client must read some of what waits for it; it is disconnected otherwise.
        max_unread: most tokens and log-probabilities of a stream that wait for a slow client; more end the stream.
        max_stop_strings: most stop strings of a request, from 1 to 64.
        max_stop_length: most characters of a stop string, from 1 to 256.
        max_tokenize_chars: most characters of a text for ``/tokenize``, or for an answer that repeats its prompt.
        grammar_timeout: seconds of processor time in which a new JSON schema or regular expression must compile.
        grammar_memory: bytes that this may take.
        health_timeout: seconds that ``/health/generate`` waits for its token.
        live_page: serve ``/ui``, which shows every client of the server the requests of all others; ``false``: don't.
        served_model_name: what clients call the model; None is its path or name.
        strict: refuse requests with fields that are not known, instead of ignoring these.
        allow_control_tokens: take what messages spell like a control token, such as ``<|im_end|>``, for that token, as
            chat templates need whose users write some. Anybody can then end their message and speak as the system.
            Where a template's marks of roles are plain letters, as Llama 2's ``[INST]``, they can do so anyway.
        tool_parser: how the model writes tool calls: ``"qwen"``, ``"llama3"`` or ``"none"``; ``"auto"`` tells by its
            chat template.
        log_format: ``"text"``, or ``"json"`` for one JSON object a line.
        trace: file for a record of the engine's last steps, in Chrome's trace format, written when the server stops.
        kv_events: ZeroMQ endpoint to bind, such as ``tcp://*:5557``, that tells routers which prefixes are cached, in
            vLLM's format. It asks for no key, and shows the token ids of requests. None: tell nobody.
        kv_events_replay: endpoint to bind where a router can ask for events that it has missed; None: there is none.
        kv_events_topic: topic of these messages.
        in_process: run the engine in a thread of the server's process: starts faster and needs less memory, but
            tokenizing and detokenizing take turns with the engine.
        tokenizer_workers: processes that turn text into tokens.
        restart: when a process of the engine dies or hangs, restart it instead of stopping the server. Its requests end
            with an error all the same.
        start_timeout: seconds in which the engine's processes must be ready, the model loaded.
        drain_timeout: seconds that running requests have to finish after the first SIGTERM or SIGINT. A second signal
            stops the server at once.
    """

    host: str = "127.0.0.1"
    port: int = 1919
    api_key: str | None = field(default=None, repr=False)
    cors_origin: tuple[str, ...] = ()
    max_body_size: int = 8 * 2**20
    max_body_fields: int = 50_000  # more of them, or of values, would hold up the event loop for seconds
    max_body_values: int = 2_000_000
    max_connections: int = 4096
    header_timeout: float = 20.0
    body_timeout: float = 60.0
    stall_timeout: float = 30.0
    max_unread: int = 4096
    max_stop_strings: int = MAX_STOPS
    max_stop_length: int = MAX_STOP_LENGTH
    max_tokenize_chars: int = 2**20  # a second's work, and 150 MB while it lasts
    grammar_timeout: float = 2.0
    grammar_memory: int = 512 * 2**20
    health_timeout: float = 10.0
    live_page: bool = True
    served_model_name: str | None = None
    strict: bool = False
    allow_control_tokens: bool = False
    tool_parser: str = "auto"
    log_format: str = "text"
    trace: str | None = None
    kv_events: str | None = None
    kv_events_replay: str | None = None
    kv_events_topic: str = ""
    in_process: bool = False
    tokenizer_workers: int = 1
    restart: bool = False
    start_timeout: float = 600.0
    drain_timeout: float = 20.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: must be from 0 to 65535, got {self.port}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ConfigError("api_key: must be one or more printable ASCII characters")
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name.startswith("max_") or option.name in ("tokenizer_workers", "grammar_memory"):
                if value < 1:
                    raise ConfigError(f"{option.name}: must be at least 1, got {value}")
            elif option.name.endswith("_timeout") and option.name != "drain_timeout" and not value > 0:
                raise ConfigError(f"{option.name}: must be a positive number of seconds, got {value}")
        for name, most in (("max_stop_strings", MAX_STOPS), ("max_stop_length", MAX_STOP_LENGTH)):
            if getattr(self, name) > most:
                raise ConfigError(f"{name}: must be at most {most}, the engine's own limit, got {getattr(self, name)}")
        if not self.drain_timeout >= 0:
            raise ConfigError(f"drain_timeout: must be a number of seconds, at least 0, got {self.drain_timeout}")
        if self.kv_events is None and self.kv_events_replay is not None:
            raise ConfigError("kv_events_replay: there is nothing to replay without kv_events; give both")
        self._one_of("tool_parser", "auto", "none", *TOOL_PARSERS)
        self._one_of("log_format", "text", "json")

    def _one_of(self, name: str, *choices: str) -> None:
        if getattr(self, name) not in choices:
            raise ConfigError(f"{name}: must be one of {', '.join(choices)}, got {getattr(self, name)!r}")


def add_options(
    parser: argparse.ArgumentParser, config: type[Any], short_forms: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Add ``--kebab-case`` flags for the fields of the dataclass ``config``, and the ``short_forms`` of some.

    Types come from the annotations (a tuple is written ``1,2,4``; a flag without a value is true), help texts from the
    ``Args:`` section. A flag that is not given leaves no attribute behind.
    """
    types = get_type_hints(config)
    texts = _help_texts(inspect.getdoc(config) or "")
    for option in fields(config):
        default = "" if option.default in (None, MISSING) else f" Default: {option.default}."
        parse = _parser_of(types[option.name])
        alone: dict[str, Any] = {"nargs": "?", "const": True} if parse is _truth else {}
        parser.add_argument(
            f"--{option.name.replace('_', '-')}",
            *([short_forms[option.name]] if option.name in short_forms else []),
            dest=option.name,
            type=parse,
            **alone,
            default=argparse.SUPPRESS,
            metavar=option.name.upper(),
            help=(texts[option.name] + default).replace("%", "%%"),
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


def _help_texts(docstring: str) -> dict[str, str]:
    """Texts of the ``Args:`` section by name, each on one line and without markup."""
    section = docstring.partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(text.replace("`", "").split()) for name, text in entries}
