"""The command line of the terminal chat."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from minisgl.chat.partner import NoServer, Partner
from minisgl.chat.server import ServerPartner
from minisgl.chat.session import HELP, Session
from minisgl.errors import MiniSGLError

LOCAL = "http://127.0.0.1:1919"
"""Where ``python -m minisgl.serve`` listens unless it is told otherwise."""


def main(argv: Sequence[str] | None = None) -> int:
    """Chat until the input ends. Returns the exit code: 1 if there is nobody to chat with."""
    parser = argparse.ArgumentParser(
        "python -m minisgl.chat",
        description="Chat in the terminal. A server that wants a key finds it in the environment variable "
        "MINISGL_API_KEY.",
    )
    partner = parser.add_mutually_exclusive_group()
    partner.add_argument("--url", help=f"server to talk to. Default: {LOCAL}, if one answers there.")
    partner.add_argument("--model", help="model to load in this process, with no server. Default: default.")
    arguments = parser.parse_args(argv)
    try:
        chosen = _partner(arguments.url, arguments.model)
    except MiniSGLError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    with contextlib.suppress(ImportError):
        import_module("readline")  # gives `input` arrow keys and a history of lines
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # neither a stray byte nor an old terminal ends the chat
    print(f"{chosen.name}\n{HELP}", file=sys.stderr)
    Session(chosen).run()
    return 0


def _partner(url: str | None, model: str | None) -> Partner:
    """The server that was named or that is there, else an engine."""
    key = os.environ.get("MINISGL_API_KEY")
    if url is not None:
        return ServerPartner(url, key)
    if model is None:
        with contextlib.suppress(NoServer):
            return ServerPartner(LOCAL, key)
    from minisgl.chat.engine import EnginePartner  # here, because a chat with a server needs no engine to load

    return EnginePartner(model or "default")


if __name__ == "__main__":
    sys.exit(main())
