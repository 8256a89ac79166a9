"""``python -m minisgl.serve``: an OpenAI-compatible server on the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from minisgl.core.config import EngineConfig
from minisgl.errors import ConfigError, MiniSGLError
from minisgl.server.config import ServerConfig
from minisgl.server.launch import serve
from minisgl.server.options import add_options, given_options


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal ends it. Returns the exit code: 0 after draining, 1 if the engine died or cannot start."""
    parser = argparse.ArgumentParser("python -m minisgl.serve", description="Serve a model over HTTP, as OpenAI's API.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on. Default: 127.0.0.1, loopback only.")
    parser.add_argument("--port", default=1919, type=int, help="port to listen on; 0 takes a free one. Default: 1919.")
    add_options(parser, ServerConfig)
    add_options(parser, EngineConfig)
    arguments = parser.parse_args(argv)
    try:
        config = EngineConfig(**given_options(arguments, EngineConfig))
        server = ServerConfig(**given_options(arguments, ServerConfig))
    except ConfigError as error:
        parser.error(str(error))
    try:
        return serve(config, server, arguments.host, arguments.port)
    except MiniSGLError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
