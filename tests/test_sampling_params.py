"""Every field of `SamplingParams`: what it takes, and that anything else is refused by name."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from minisgl.errors import InvalidRequest
from minisgl.sampling_params import SamplingParams

NAN, INF = float("nan"), float("inf")


GOOD: dict[str, list[Any]] = {
    "max_tokens": [1, 128, 10**9, None],
    "min_tokens": [0, 1, 128],
    "temperature": [0, 0.0, 1e-9, 1, 0.7, 100.0],
    "top_k": [0, 1, 50, 2**31 - 1],
    "top_p": [1e-300, 0.5, 1, 1.0],
    "min_p": [0, 0.0, 0.3, 1.0],
    "presence_penalty": [-2, -2.0, 0, 2.0],
    "frequency_penalty": [-2, -2.0, 0, 2.0],
    "repetition_penalty": [1e-9, 1, 1.2, 10.0],
    "logit_bias": [None, {}, {0: 1}, {5: -100.0, 7: 100}],
    "stop": ["end", [], ["a", "b"], ("a",), "x" * 256, ["x"] * 64],
    "num_draft_tokens": [None, 0, 64],
    "stop_token_ids": [[], [0, 1], (2,), {3}],
    "ignore_eos": [True, False],
    "seed": [None, 0, 2**63 - 1],
    "logprobs": [None, 0, 20],
    "n": [1, 128],
    "json_schema": [None, "{}", '{"type": "object"}', "{" + " " * 65534 + "}"],
    "regex": [None, "a", "[0-9]+", "a" * 8192],
}


NOT_A_NUMBER: list[Any] = [None, True, False, "1", [1], NAN, INF, -INF, 1j]
NOT_AN_INTEGER: list[Any] = [True, False, "1", [1], 1.0, NAN, INF]
NOT_IDS: list[Any] = [None, 3, "12", [1.0], [True], ["1"], [None], [-1]]


BAD: dict[str, list[Any]] = {
    "max_tokens": [*NOT_AN_INTEGER, 0, -5],
    "min_tokens": [*NOT_AN_INTEGER, None, -1, 129],
    "temperature": [*NOT_A_NUMBER, -0.1, 100.1],
    "top_k": [*NOT_AN_INTEGER, None, -1],
    "top_p": [*NOT_A_NUMBER, 0, 0.0, -0.1, 1.1],
    "min_p": [*NOT_A_NUMBER, -0.1, 1.1],
    "presence_penalty": [*NOT_A_NUMBER, -2.1, 2.1],
    "frequency_penalty": [*NOT_A_NUMBER, -2.1, 2.1],
    "repetition_penalty": [*NOT_A_NUMBER, 0, 0.0, -1.0, 10.1],
    "logit_bias": [
        3,
        "x",
        [1],
        [(1, 2.0)],
        *({token: 1.0} for token in (-1, 1.0, "1", True, None)),
        *({1: bias} for bias in (NAN, INF, 100.1, -100.1, "1", None, True)),
    ],
    "stop": [None, 3, True, [3], [None], "", ["a", ""], b"x", "x" * 257, ["x"] * 65],
    "num_draft_tokens": [-1, 65, 1.5, True, "3"],
    "stop_token_ids": NOT_IDS,
    "ignore_eos": [None, 0, 1, "true"],
    "seed": [*NOT_AN_INTEGER, -1, 2**63],
    "logprobs": [*NOT_AN_INTEGER, -1, 21],
    "n": [*NOT_AN_INTEGER, None, 0, -1, 129],
    "json_schema": [
        *(3, True, b"{}", {}, {"type": "object"}, "", "{" + " " * 65535 + "}", '{"\ud800": 1}'),
        *("object", "[]", "true", "3", "null", '"{}"', "{}{}", '{"a": ' + "[" * 50_000, '{"a": ' + "9" * 5000 + "}"),
    ],
    "regex": [3, True, b"a", ["a"], "", "a" * 8193, "\udfff"],
}


def test_no_field_is_forgotten_here() -> None:
    names = {field.name for field in fields(SamplingParams)}
    assert set(GOOD) == names
    assert set(BAD) == names


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in GOOD.items() for value in values])
def test_good_values(field: str, value: Any) -> None:
    params = SamplingParams(**{field: value})
    if field == "stop":
        assert params.stop == ((value,) if isinstance(value, str) else tuple(value))
    elif field == "stop_token_ids":
        assert params.stop_token_ids == tuple(value)
    else:
        assert getattr(params, field) == value


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_bad_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: must ")


def test_a_refused_stop_string_tells_the_limit() -> None:
    for value, limit in (["x"] * 65, "at most 64 strings, got 65"), ("x" * 257, "1 to 256 characters, got 257"):
        with pytest.raises(InvalidRequest, match=limit):
            SamplingParams(stop=value)


def test_an_unknown_field_is_refused_by_name() -> None:
    fields_of_a_request: dict[str, Any] = {"top_k": 3, "temprature": 1.0}
    with pytest.raises(InvalidRequest, match=r"known fields are .*temperature") as caught:
        SamplingParams(**fields_of_a_request)
    assert caught.value.field == "temprature"


def test_min_tokens_may_be_anything_without_max_tokens() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=10**6).min_tokens == 10**6


def test_the_callers_objects_are_copied() -> None:
    bias, stop, ids = {1: 1.0}, ["a"], [1]
    params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids=ids)
    bias[2] = NAN
    stop.append("")
    ids.append(-1)
    assert (params.logit_bias, params.stop, params.stop_token_ids) == ({1: 1.0}, ("a",), (1,))


def test_parameters_do_not_change() -> None:
    params = SamplingParams()
    for field in fields(params):
        with pytest.raises(FrozenInstanceError):
            setattr(params, field.name, 1)


def test_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-9).greedy


@pytest.mark.parametrize(
    "field", ["max_tokens", "min_tokens", "temperature", "top_k", "top_p", "seed", "logprobs", "n"]
)
def test_an_astronomical_number_is_refused_like_any_other(field: str) -> None:
    """Python neither converts 10**5000 to a float nor writes it out; the error must survive both."""
    for value in (10**400, 10**5000):
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{field: value})
        assert caught.value.field == field
        assert len(str(caught.value)) < 250


def test_an_output_has_one_constraint_and_ends_where_it_is_complete() -> None:
    with pytest.raises(InvalidRequest, match="regex: must not be given together with json_schema"):
        SamplingParams(json_schema="{}", regex="a")
    for field, text in (("json_schema", "{}"), ("regex", "a")):
        with pytest.raises(InvalidRequest, match=f"ignore_eos: must be false with {field}"):
            SamplingParams(**{field: text, "ignore_eos": True})
