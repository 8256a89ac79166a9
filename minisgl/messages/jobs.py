"""Messages on their way to the scheduler: jobs, first as text and then as tokens, and what may end them early."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import msgspec

from minisgl.core.sampling_params import SamplingParams
from minisgl.errors import InvalidRequest, shown


class Conversation(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A prompt to be written in the model's chat template.

    Args:
        messages: with ``role`` and ``content`` each.
        tools: functions that the model may call; None is not to be told of any.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None


class TokenIds(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A prompt of token ids, as the bytes of an int32 array: see `pack`."""

    data: bytes


Prompt = str | TokenIds | Conversation


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Generate.

    Args:
        job: names the job in all that follows; never reused.
        prompts: text, token ids or a conversation each.
        params: the fields of `SamplingParams` that are not at their defaults, for all prompts. Completion i of prompt p
            is the job's choice ``p * n + i``.
        streaming: whether updates are wanted while the generation runs, or a single one at its end.
        user: on whose behalf; the empty string where the client does not say.
    """

    job: int
    prompts: list[Prompt]
    params: dict[str, Any]
    streaming: bool
    user: str = ""


class Tokenized(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The same, with token ids for all prompts: int32 each."""

    job: int
    prompts: list[bytes]
    params: dict[str, Any]
    streaming: bool
    user: str = ""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forget a job that was accepted: nobody waits for it any more. It may have ended meanwhile."""

    job: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Requests whose text has ended with a stop string. They may have ended meanwhile."""

    uids: list[int]


class StatsRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Ask for the scheduler's state. The answer is a `StatsReply` of the same number.

    Args:
        number: never reused.
        topic: what to tell beside the number of states that each process holds.
    """

    number: int
    topic: str = ""


ToScheduler = Tokenized | Abort | Stop | StatsRequest


def submit(
    job: int,
    prompts: Sequence[str | Sequence[int] | Conversation],
    params: SamplingParams,
    streaming: bool,
    user: str,
) -> Submit:
    """A job as a message.

    Raises:
        InvalidRequest: a token id has more than 32 bits.
    """
    packed = [prompt if isinstance(prompt, (str, Conversation)) else TokenIds(pack(prompt)) for prompt in prompts]
    given = {field.name: value for field in fields(params) if (value := getattr(params, field.name)) != field.default}
    return Submit(job, packed, given, streaming, user)


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as the bytes of an int32 array.

    Raises:
        InvalidRequest: an id has more than 32 bits.
    """
    try:
        return array("i", token_ids).tobytes()
    except OverflowError:
        bad = next(token_id for token_id in token_ids if not -(2**31) <= token_id < 2**31)
        raise InvalidRequest("prompt", f"token id {shown(bad)} is outside of every vocabulary") from None


def encode(message: Submit) -> bytes:
    """A job for a socket.

    Raises:
        InvalidRequest: a text is no valid Unicode, or a number has more than 64 bits; names the field.
    """
    try:
        return msgspec.msgpack.encode(message)
    except (UnicodeEncodeError, OverflowError):
        parts = {"prompt": message.prompts, "user": message.user, **message.params}
        for field, value in parts.items():
            _check_encodable(field, value)
        raise


def _check_encodable(field: str, value: object) -> None:
    try:
        msgspec.msgpack.encode(value)
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"must be valid Unicode, but has a lone surrogate ({error})") from error
    except OverflowError as error:
        raise InvalidRequest(field, "has a number of more than 64 bits") from error
