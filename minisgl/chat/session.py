"""A conversation at the keyboard: lines in, answers out, and commands."""

from __future__ import annotations

import select
import sys

from minisgl.chat.partner import Messages, Partner
from minisgl.errors import MiniSGLError

HELP = "/reset starts over · /system TEXT sets the system prompt · /exit, or Ctrl-D, ends · Ctrl-C stops an answer"
_PASTE_PAUSE = 0.03
"""Seconds within which the next line has come if it was pasted together with this one."""


class Session:
    """What was said, and the terminal that it was said in.

    Args:
        partner: answers.
    """

    def __init__(self, partner: Partner) -> None:
        self._partner = partner
        self._system: Messages = []
        self._messages: Messages = []

    def run(self) -> None:
        """Read and answer until the input ends."""
        prompt = "> " if sys.stdin.isatty() else ""
        while True:
            try:
                text = _read(prompt)
            except EOFError:
                return
            except KeyboardInterrupt:
                print("\n(/exit or Ctrl-D ends)")
                continue
            if text == "/exit":
                return
            if text.startswith("/"):
                self._obey(text)
            elif text:
                self._say(text)

    def _obey(self, text: str) -> None:
        command, _, rest = text.partition(" ")
        if text == "/reset":
            self._messages = []
            print("(a new conversation)")
        elif command == "/system":
            self._system = [{"role": "system", "content": rest.strip()}] if rest.strip() else []
            print("(the system prompt is set)" if self._system else "(the system prompt is the model's own)")
        else:
            print(HELP)

    def _say(self, text: str) -> None:
        """Send a message and show the answer. Of an answer that fails, nothing is remembered, not even the question."""
        messages = [*self._messages, {"role": "user", "content": text}]
        answer, note = "", ""
        pieces = self._partner.answer([*self._system, *messages])
        try:
            while True:
                piece = next(pieces)
                answer += piece
                print(printable(piece), end="", flush=True)
        except StopIteration as end:
            note = "(cut off: the context is full; /reset starts over)" if end.value == "length" else ""
        except KeyboardInterrupt:
            note = "(stopped)"
        except MiniSGLError as error:
            answer, note = "", f"error: {printable(str(error))}"
        finally:
            pieces.close()
        print(f"\n{note}" if note else "")
        if answer:
            self._messages = [*messages, {"role": "assistant", "content": answer}]


def _read(prompt: str) -> str:
    """A message: a line, or all lines that were pasted together."""
    lines = [input(prompt)]
    while sys.stdin.isatty() and select.select([sys.stdin], [], [], _PASTE_PAUSE)[0]:
        lines.append(input())
    return "\n".join(lines).strip()


def printable(text: str) -> str:
    """The text without what would command the terminal instead of being shown."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in text)
