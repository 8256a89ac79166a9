"""How the tokens of a request are sampled, and when it stops."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from minisgl.errors import InvalidRequest, check_type, reject_unknown, short_repr

_MAX_SEED = 2**63 - 1
_MAX_COUNT = 2**31 - 1
_MAX_DRAFT = 64
_MAX_SCHEMA = 65536
_MAX_REGEX = 8192
MAX_STOPS, MAX_STOP_LENGTH = 64, 256  # they are looked for in every piece of text, before the next request's turn


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends; every field is checked on construction.

    Args:
        max_tokens: most tokens to generate, at least 1; None means as many as the context has room for.
        min_tokens: no end-of-sequence or stop token is sampled, and no stop string counts, before this many tokens.
        temperature: divides the logits; 0 is greedy, values in (0, 0.01) are raised to 0.01. Up to 100.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the fewest tokens that reach this probability, in (0, 1] (nucleus sampling, Holtzman et al. 2020).
        min_p: drop tokens less likely than this share of the likeliest one, in [0, 1] (Nguyen et al. 2024).
        presence_penalty: subtracted once from the logit of every token generated so far, in [-2, 2].
        frequency_penalty: subtracted from a token's logit once for every time it was generated, in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and output, in (0, 10]
            (CTRL, Keskar et al. 2019); 1 is off.
        logit_bias: token id → value in [-100, 100] added to its logit.
        stop: strings that end the text, up to 64 of up to 256 characters; the text is cut before the first one. A
            single string is allowed.
        stop_token_ids: token ids that end the request in addition to the model's end-of-sequence ids.
        ignore_eos: generate on past end-of-sequence ids (``stop_token_ids`` still count).
        seed: 0 to 2**63 − 1; the same seed, prompt and parameters give the same tokens in any batch. None draws one
            from the engine's seed.
        logprobs: report this many most likely tokens a step (0 to 20) beside the sampled one; None reports nothing.
        n: number of independent completions of the prompt, 1 to 128; completion i samples with ``seed + i``.
        json_schema: JSON Schema of the output, as a text of up to 65,536 characters; ``{"type": "object"}`` is any
            object, ``{}`` any value.
        regex: regular expression that all of the output matches, of up to 8,192 characters, without look-around and
            back-references; ``\\d``, ``\\w`` and ``\\s`` are ASCII.

        num_draft_tokens: most tokens that the engine's drafter guesses at a time, 0 to 64; 0 is none, and None is the
            engine's ``num_draft_tokens``, which is the most. The answer is the same.

    With a schema or an expression, end-of-sequence tokens are sampled only where the output may end, and the request
    ends where nothing can follow, even before ``min_tokens``. What ``max_tokens`` or ``stop`` cut off need not match.

    Raises:
        InvalidRequest: naming the field and its limit.
    """

    max_tokens: int | None = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    stop: str | Iterable[str] = ()
    stop_token_ids: Iterable[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    n: int = 1
    json_schema: str | None = None
    regex: str | None = None
    num_draft_tokens: int | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> SamplingParams:
        reject_unknown(kwargs, {f.name for f in fields(cls)}, "SamplingParams")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, _MAX_COUNT)
        _integer("min_tokens", self.min_tokens, 0, _MAX_COUNT if self.max_tokens is None else self.max_tokens)
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0, _MAX_COUNT)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        check_type("ignore_eos", self.ignore_eos, bool, "true or false")
        if self.seed is not None:
            _integer("seed", self.seed, 0, _MAX_SEED)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, 20)
        _integer("n", self.n, 1, 128)
        if self.num_draft_tokens is not None:
            _integer("num_draft_tokens", self.num_draft_tokens, 0, _MAX_DRAFT)
        self._check_constraint()
        object.__setattr__(self, "stop", _strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """True when the likeliest token is always taken."""
        return self.temperature == 0.0

    @property
    def grammar(self) -> tuple[str, str] | None:
        """The field that constrains the output's form, ``json_schema`` or ``regex``, and its text; None if neither."""
        if self.json_schema is not None:
            return "json_schema", self.json_schema
        return None if self.regex is None else ("regex", self.regex)

    def _check_constraint(self) -> None:
        if self.json_schema is not None:
            _text("json_schema", self.json_schema, _MAX_SCHEMA)
            _json_object("json_schema", self.json_schema)
        if self.regex is not None:
            _text("regex", self.regex, _MAX_REGEX)
            if self.json_schema is not None:
                raise InvalidRequest("regex", "must not be given together with json_schema; choose one")
        if self.ignore_eos and (self.json_schema or self.regex):
            field = "json_schema" if self.json_schema else "regex"
            raise InvalidRequest("ignore_eos", f"must be false with {field}, whose output ends where it is complete")


def _integer(field: str, value: object, low: int, high: int) -> None:
    limit = f"an integer from {low} to {high}"
    check_type(field, value, int, limit)
    assert isinstance(value, int)
    if not low <= value <= high:
        raise InvalidRequest(field, f"must be {limit}, got {short_repr(value)}")


def _number(field: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    limit = f"a number in {'(' if open_low else '['}{low:g}, {high:g}]"
    check_type(field, value, (int, float), limit)
    assert isinstance(value, (int, float))
    if not low <= value <= high or (open_low and value == low):
        raise InvalidRequest(field, f"must be {limit}, got {short_repr(value)}")


def _text(field: str, value: object, longest: int) -> None:
    limit = f"a text of 1 to {longest} characters"
    check_type(field, value, str, limit)
    assert isinstance(value, str)
    if not 0 < len(value) <= longest:
        raise InvalidRequest(field, f"must be {limit}, got {len(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"must be valid Unicode, but has a lone surrogate ({error})") from error


def _json_object(field: str, text: str) -> None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"must be the text of a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(field, f"must be the text of a JSON object, got {short_repr(value)}")


def _strings(value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    check_type("stop", items, Iterable, "a string or a list of strings")
    assert isinstance(items, Iterable)
    result = tuple(items)
    if len(result) > MAX_STOPS:
        raise InvalidRequest("stop", f"must be at most {MAX_STOPS} strings, got {len(result)}")
    for item in result:
        check_type("stop", item, str, "a string or a list of strings")
        if not 0 < len(item) <= MAX_STOP_LENGTH:
            raise InvalidRequest("stop", f"must be texts of 1 to {MAX_STOP_LENGTH} characters, got {len(item)}")
    return result


def _token_ids(value: object) -> tuple[int, ...]:
    check_type("stop_token_ids", value, Iterable, "a list of token ids")
    assert isinstance(value, Iterable)
    result = tuple(value)
    for item in result:
        _integer("stop_token_ids", item, 0, _MAX_COUNT)
    return result


def _bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    check_type("logit_bias", value, Mapping, "a mapping from token id to a number")
    assert isinstance(value, Mapping)
    for token, bias in value.items():
        _integer("logit_bias", token, 0, _MAX_COUNT)
        _number("logit_bias", bias, -100.0, 100.0)
    return {int(token): float(bias) for token, bias in value.items()}
