"""A terminal chat with a server or with an engine of its own: ``python -m minisgl.chat``."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import select
import signal
import sys
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

import httpx

from minisgl.errors import MiniSGLError
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams

Messages = list[dict[str, str]]


class NoAnswer(MiniSGLError):
    """The partner cannot be reached, or refuses; the message says why."""


class NoServer(NoAnswer):
    """Nobody listens at the server's address."""


class Partner(Protocol):
    """Takes a conversation and goes on with it."""

    name: str

    def answer(self, messages: Messages) -> Generator[str, None, str]:
        """Text as it comes. Closing the generator ends the answer, wherever it is computed.

        Returns:
            Why it ended, as the API's ``finish_reason``.

        Raises:
            MiniSGLError: there is no answer, or no more of it.
        """
        ...


class Interrupt:
    """Inside a ``with`` block of the main thread, the first Ctrl-C waits for `look`; a second one comes at once.

    An engine that is interrupted in the middle of a step must end the step's requests and forget its prefix cache,
    because nobody knows what the step has written. Between two steps it only has to abort one request.
    """

    def __init__(self) -> None:
        self._waits = False

    def __enter__(self) -> Self:
        self._usual = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._usual)

    def look(self) -> None:
        """Raise the `KeyboardInterrupt` that waits, if one does."""
        if self._waits:
            self._waits = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._waits:
            raise KeyboardInterrupt
        self._waits = True


class EnginePartner:
    """An engine in this process.

    Args:
        model: as `LLM` takes it.
    """

    def __init__(self, model: str) -> None:
        self._llm = LLM(model)
        self.name = f"{model}, in this process"

    def answer(self, messages: Messages) -> Generator[str, None, str]:
        """See `Partner.answer`."""
        prompt = self._llm.tokenizer.encode_chat(messages)
        reason = None
        with Interrupt() as interrupt, closing(self._llm.stream(prompt, SamplingParams(max_tokens=None))) as deltas:
            for delta in deltas:
                interrupt.look()
                yield delta.text
                reason = delta.finish_reason
                if delta.error is not None:
                    raise NoAnswer(delta.error)
        return reason or ""


CONNECT_TIMEOUT = 5.0
READ_TIMEOUT = 300.0
"""Seconds that a server may be silent: it has a queue."""


class ServerPartner:
    """A server that speaks OpenAI's API.

    Args:
        url: of the server, with or without ``/v1``.
        api_key: if it wants one.

    Raises:
        NoServer: nobody listens there.
        NoAnswer: whoever does speaks otherwise, or wants another key.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        with self._in_words(), self._client() as http, http.stream("GET", "models") as response:
            self._model: str = json.loads(_checked(response).read())["data"][0]["id"]
        self.name = f"{self._model} at {self.url}"

    def answer(self, messages: Messages) -> Generator[str, None, str]:
        """See `Partner.answer`."""
        body = {"model": self._model, "messages": messages, "stream": True}
        reason = ""
        with self._in_words(), self._client() as http, http.stream("POST", "chat/completions", json=body) as response:
            for chunk in _events(_checked(response)):
                choice = chunk["choices"][0]
                yield choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
        return reason

    def _client(self) -> httpx.Client:
        """One for each answer: an interrupt inside of it leaves a connection that only closing the client closes."""
        timeout = httpx.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT)
        return httpx.Client(base_url=f"{self.url}/v1/", headers=self._headers, timeout=timeout)

    @contextmanager
    def _in_words(self) -> Generator[None, None, None]:
        """Turn what can go wrong on the way into `NoAnswer`."""
        try:
            yield
        except httpx.ConnectError as error:
            raise NoServer(f"no server answers at {self.url}; start one with python -m minisgl.serve") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NoAnswer(f"the connection to {self.url} failed ({error or type(error).__name__})") from error
        except (ValueError, LookupError, TypeError) as error:
            raise NoAnswer(f"what answers at {self.url} does not speak OpenAI's API") from error


def _checked(response: httpx.Response) -> httpx.Response:
    """The response, unless it is an error."""
    if response.is_success:
        return response
    response.read()
    if response.status_code == 401:
        raise NoAnswer("the server wants its API key; put it into the environment variable MINISGL_API_KEY")
    try:
        message = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = f"status {response.status_code}"
    raise NoAnswer(f"the server refuses: {message}")


def _events(response: httpx.Response) -> Generator[Any, None, None]:
    """Server-sent events, parsed, until ``[DONE]``."""
    rest = b""
    for piece in response.iter_bytes():
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            chunk = json.loads(data)
            if "error" in chunk:
                raise NoAnswer(chunk["error"]["message"])
            yield chunk
    raise NoAnswer("the server went away in the middle of the answer")


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

    return EnginePartner(model or "default")


if __name__ == "__main__":
    sys.exit(main())
