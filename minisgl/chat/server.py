"""A server that answers."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import httpx

from minisgl.chat.partner import Messages, NoAnswer, NoServer

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
