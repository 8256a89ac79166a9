"""``python -m minisgl COMMAND …``: the commands of the package; without one, list them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

# Name → module with a main(argv), and what it does.
COMMANDS = {
    "serve": ("minisgl.serve", "serve a model over HTTP, as OpenAI's API"),
    "chat": ("minisgl.chat", "chat in the terminal, with a server or a model in this process"),
    "demo": ("minisgl.demo", "answer eight chat prompts in one continuous batch"),
    "bench": ("minisgl.bench.__main__", "measure the engine, its parts, or a server"),
    "course": ("minisgl.book.__main__", "write the engine chapter by chapter, and grade assignments"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names. Returns its exit status, or 2 if there is no such command."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print("python -m minisgl COMMAND …, where COMMAND is one of")
        for name, (_, help_text) in COMMANDS.items():
            print(f"  {name:<8} {help_text}")
        print("Each explains its options: python -m minisgl COMMAND --help")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"error: no command {name!r}; choose one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return import_module(COMMANDS[name][0]).main(rest) or 0


if __name__ == "__main__":
    sys.exit(main())
