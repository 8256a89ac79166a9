"""The options of the server, beside those of the engine: one immutable record, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the server needs to know beside `minisgl.core.EngineConfig`.

    Args:
        in_process: run the engine in a thread of the server's process, without other processes: starts faster and needs
            less memory, but tokenizing and detokenizing take turns with the engine.
        tokenizer_workers: processes that turn text into tokens.
        restart: when a process of the engine dies, start it anew and go on, instead of stopping the server. The
            requests that it had end with an error all the same.
        start_timeout: seconds in which the engine's processes must be ready, the model loaded.
        drain_timeout: seconds that running requests have to finish after the first SIGTERM or SIGINT. A second signal
            stops the server at once.
    """

    in_process: bool = False
    tokenizer_workers: int = 1
    restart: bool = False
    start_timeout: float = 600.0
    drain_timeout: float = 20.0

    def __post_init__(self) -> None:
        if self.tokenizer_workers < 1:
            raise ConfigError(f"tokenizer_workers: must be at least 1, got {self.tokenizer_workers}")
        if not self.start_timeout > 0:
            raise ConfigError(f"start_timeout: must be a positive number of seconds, got {self.start_timeout}")
        if not self.drain_timeout >= 0:
            raise ConfigError(f"drain_timeout: must be a number of seconds, at least 0, got {self.drain_timeout}")
