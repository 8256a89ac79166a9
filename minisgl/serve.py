"""``python -m minisgl.serve``: an OpenAI-compatible server on the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from minisgl.config import EngineConfig
from minisgl.errors import ConfigError, MiniSGLError
from minisgl.logs import configure_logs
from minisgl.server.config import ServerConfig, add_options, given_options
from minisgl.server.launch import serve

_KEY = "MINISGL_API_KEY"  # environment variable of `ServerConfig.api_key`


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal ends it. Returns the exit code: 0 after draining, 1 if the engine died or cannot start."""
    parser = argparse.ArgumentParser("python -m minisgl.serve", description="Serve a model over HTTP, as OpenAI's API.")
    add_options(parser, ServerConfig)
    add_options(parser, EngineConfig, {"tensor_parallel_size": "--tp"})
    arguments = parser.parse_args(argv)
    try:
        engine_config = EngineConfig(**given_options(arguments, EngineConfig))
        config = ServerConfig(**{**_from_environment(), **given_options(arguments, ServerConfig)})
    except ConfigError as error:
        parser.error(str(error))
    configure_logs("api", config.log_format)
    try:
        return serve(engine_config, config)
    except MiniSGLError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1


def _from_environment() -> dict[str, str]:
    return {"api_key": os.environ[_KEY]} if _KEY in os.environ else {}


if __name__ == "__main__":
    sys.exit(main())
