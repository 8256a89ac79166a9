"""A chat in the terminal, with a server or with an engine in this process: ``python -m minisgl.chat``."""

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
from types import FrameType
from typing import Any, Protocol, Self

import httpx

from minisgl.errors import MiniSGLError
from minisgl.sampling_params import SamplingParams

History = list[dict[str, str]]  # messages with a role and a content

DEFAULT_URL = "http://127.0.0.1:1919"  # where `python -m minisgl.serve` listens by default
CONNECT_TIMEOUT = 5.0
READ_TIMEOUT = 300.0  # seconds that a server may be silent, as requests can wait in its queue
HELP = "/reset starts over · /system TEXT sets the system prompt · /exit, or Ctrl-D, ends · Ctrl-C stops an answer"
_PASTE_PAUSE = 0.03  # seconds within which the next line follows if both were pasted together


def main(argv: Sequence[str] | None = None) -> int:
    """Chat until the input ends. Returns the exit code: 1 if there is neither a server nor a model."""
    parser = argparse.ArgumentParser(
        "python -m minisgl.chat",
        description="Chat in the terminal. The key of a server that wants one is read from the environment variable "
        "MINISGL_API_KEY.",
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--url", help=f"server to talk to. Default: {DEFAULT_URL}, if one answers there.")
    choice.add_argument("--model", help="model to load in this process, with no server. Default: default.")
    arguments = parser.parse_args(argv)
    try:
        partner = _choose_partner(arguments.url, arguments.model)
    except MiniSGLError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    with contextlib.suppress(ImportError):
        import_module("readline")  # gives `input` arrow keys and a history of lines
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a stray byte or an old terminal must not end the chat
    print(f"{partner.name}\n{HELP}", file=sys.stderr)
    ChatSession(partner).run()
    return 0


def _choose_partner(url: str | None, model: str | None) -> ChatPartner:
    """The server that was named or that answers at the default address, else an engine in this process."""
    key = os.environ.get("MINISGL_API_KEY")
    if url is not None:
        return ServerPartner(url, key)
    if model is None:
        with contextlib.suppress(NoServer):
            return ServerPartner(DEFAULT_URL, key)
    return EnginePartner(model or "default")


class ChatSession:
    """A conversation with a partner, read from standard input and printed."""

    def __init__(self, partner: ChatPartner) -> None:
        self._partner = partner
        self._system: History = []
        self._history: History = []

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
                self._run_command(text)
            elif text:
                self._say(text)

    def _run_command(self, text: str) -> None:
        command, _, rest = text.partition(" ")
        if text == "/reset":
            self._history = []
            print("(a new conversation)")
        elif command == "/system":
            self._system = [{"role": "system", "content": rest.strip()}] if rest.strip() else []
            print("(the system prompt is set)" if self._system else "(the system prompt is the model's own)")
        else:
            print(HELP)

    def _say(self, text: str) -> None:
        """Send a message and print the answer. A question whose answer fails is not remembered."""
        history = [*self._history, {"role": "user", "content": text}]
        answer, note = "", ""
        pieces = self._partner.answer([*self._system, *history])
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
            self._history = [*history, {"role": "assistant", "content": answer}]


def _read(prompt: str) -> str:
    """Read a message: a line, or all lines that were pasted together."""
    lines = [input(prompt)]
    while sys.stdin.isatty() and select.select([sys.stdin], [], [], _PASTE_PAUSE)[0]:
        lines.append(input())
    return "\n".join(lines).strip()


def printable(text: str) -> str:
    """Replace control characters, which would command the terminal, by U+FFFD."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in text)


class NoAnswer(MiniSGLError):
    """The partner cannot be reached, or refuses; the message says why."""


class NoServer(NoAnswer):
    """No server listens at the address."""


class ChatPartner(Protocol):
    """Answers a conversation."""

    name: str

    def answer(self, history: History) -> Generator[str, None, str]:
        """Yield text as it comes, and return the API's ``finish_reason``. Closing the generator ends the answer.

        Raises `MiniSGLError` if there is no answer, or no more of it.
        """
        ...


class EnginePartner:
    """An engine in this process. ``model`` is as for `minisgl.llm.LLM`."""

    def __init__(self, model: str) -> None:
        from minisgl.llm import LLM  # here, because a chat with a server must not load the engine

        self._llm = LLM(model)
        self.name = f"{model}, in this process"

    def answer(self, history: History) -> Generator[str, None, str]:
        prompt = self._llm.tokenizer.encode_chat(history)
        reason = None
        params = SamplingParams(max_tokens=None)
        with DeferredInterrupt() as interrupt, closing(self._llm.stream(prompt, params)) as deltas:
            for delta in deltas:
                interrupt.raise_pending()
                yield delta.text
                reason = delta.finish_reason
                if delta.error is not None:
                    raise NoAnswer(delta.error)
        return reason or ""


class DeferredInterrupt:
    """Inside a ``with`` block of the main thread, a first Ctrl-C waits for `raise_pending`; a second comes at once.

    An engine that is interrupted within a step loses all requests of the step; between two steps it aborts only one.
    """

    def __init__(self) -> None:
        self._pending = False

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def raise_pending(self) -> None:
        """Raise the `KeyboardInterrupt` that waits, if there is one."""
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            raise KeyboardInterrupt
        self._pending = True


class ServerPartner:
    """A server that speaks OpenAI's API, at ``url``, with or without ``/v1``.

    Raises:
        NoServer: no server listens there.
        NoAnswer: the server does not speak OpenAI's API, or wants another key.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        with self._converted_errors(), self._client() as http, http.stream("GET", "models") as response:
            self._model: str = json.loads(_checked(response).read())["data"][0]["id"]
        self.name = f"{self._model} at {self.url}"

    def answer(self, history: History) -> Generator[str, None, str]:
        body = {"model": self._model, "messages": history, "stream": True}
        reason = ""
        with (
            self._converted_errors(),
            self._client() as http,
            http.stream("POST", "chat/completions", json=body) as response,
        ):
            for chunk in _events(_checked(response)):
                choice = chunk["choices"][0]
                yield choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
        return reason

    def _client(self) -> httpx.Client:
        # One for each answer: only closing the client closes the connection of an interrupted answer.
        timeout = httpx.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT)
        return httpx.Client(base_url=f"{self.url}/v1/", headers=self._headers, timeout=timeout)

    @contextmanager
    def _converted_errors(self) -> Generator[None, None, None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise NoServer(f"no server answers at {self.url}; start one with python -m minisgl.serve") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NoAnswer(f"the connection to {self.url} failed ({error or type(error).__name__})") from error
        except (ValueError, LookupError, TypeError) as error:
            raise NoAnswer(f"what answers at {self.url} does not speak OpenAI's API") from error


def _checked(response: httpx.Response) -> httpx.Response:
    """Return a successful response; raise `NoAnswer` for an error."""
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
    """Parse server-sent events until ``[DONE]``."""
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


if __name__ == "__main__":
    sys.exit(main())
