"""Structured output through the offline API: a model of random weights says what its grammar lets it say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from llguidance import LLParserLimits

from minisgl import LLM, InvalidRequest, SamplingParams
from minisgl.outputs import RequestOutput
from tests.model_zoo import tiny_checkpoint
from tests.structured import CAT, DATE, PERSON, SCHEMA, make
from tests.tiny_text_model import assert_idle_and_clean, text_checkpoint
from tests.tokenizer.tiny import KINDS, save


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("grammar"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def shared_llm(path: Path) -> LLM:
    return make(path, overlap=True)


@pytest.fixture
def llm(shared_llm: LLM) -> LLM:
    assert_idle_and_clean(shared_llm)
    return shared_llm


# -- valid, whatever the weights say -------------------------------------------------------------------------------


def test_a_hundred_seeds_give_a_hundred_valid_objects(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=400, temperature=1.5, json_schema=SCHEMA, seed=seed) for seed in range(100)]
    outputs = llm.generate([CAT] * 100, params)
    assert_idle_and_clean(llm)
    for output in outputs:
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), PERSON)
    assert len({output.text for output in outputs}) == 100


@pytest.mark.parametrize(
    "pattern", [DATE, r"[a-f]{3,9}(, (你好|naïve)){1,4}!", r"\w{4}\n.{5}", r"(?i)ja|nein", "🙂{2}é"]
)
def test_a_hundred_seeds_match_the_whole_expression(llm: LLM, pattern: str) -> None:
    outputs = llm.generate([CAT] * 100, [SamplingParams(regex=pattern, seed=seed) for seed in range(100)])
    assert_idle_and_clean(llm)
    for output in outputs:
        assert output.finish_reason == "stop"
        assert re.fullmatch(pattern, output.text, re.ASCII), output.text


def _objects(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def schema(properties: dict[str, Any], optional: set[str]) -> dict[str, Any]:
        required = [name for name in properties if name not in optional]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    names = st.sampled_from(["a", "name", "ключ", "the dog", 'q"', "<s>", "</s>", "0"])
    return st.builds(schema, st.dictionaries(names, values, max_size=3), st.sets(names))


SCALARS = st.one_of(
    st.builds(
        lambda low, width: {"type": "integer", "minimum": low, "maximum": low + width},
        st.integers(-1000, 1000),
        st.integers(0, 500),
    ),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 3),
        st.integers(0, 9),
    ),
    st.builds(lambda values: {"enum": values}, st.lists(st.text(max_size=6), min_size=1, max_size=4, unique=True)),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": "</s>"}, {"type": "string", "format": "date"}]),
    st.just({"type": "string", "pattern": "^[a-c]{2,5}$"}),
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: (
        _objects(inner)
        | st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3))
        | st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))
    ),
    max_leaves=5,
)


@given(schema=SCHEMAS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_what_any_schema_describes(llm: LLM, schema: dict[str, Any]) -> None:
    text = json.dumps(schema)
    params = [SamplingParams(max_tokens=None, temperature=1.5, json_schema=text, seed=seed) for seed in range(4)]
    for output in llm.generate([CAT] * 4, params):
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), schema)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_more_tokens_than_its_tokenizer(tmp_path: Path, kind: str) -> None:
    """As vocabularies are padded; here with more than there are tokens, so that most of the weights say padding."""
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM", vocab_size=700)
    save(KINDS[kind](), path)
    llm = make(path)
    params = [SamplingParams(max_tokens=400, json_schema=SCHEMA, seed=seed) for seed in range(20)]
    for output in llm.generate([[5, 6, 7]] * 20, params):
        jsonschema.validate(json.loads(output.text), PERSON)


def test_any_object_and_any_value(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=60, json_schema='{"type": "object"}', seed=seed) for seed in range(30)]
    outputs = llm.generate([CAT] * 30, params)
    assert all(output.text.startswith("{") for output in outputs)
    assert all(isinstance(json.loads(o.text), dict) for o in outputs if o.finish_reason == "stop")
    values = llm.generate([CAT] * 60, [SamplingParams(max_tokens=8, json_schema="{}", seed=seed) for seed in range(60)])
    assert len({type(json.loads(o.text)) for o in values if o.finish_reason == "stop"}) > 2


# -- where it ends -------------------------------------------------------------------------------------------------


def test_the_end_token_comes_where_the_output_may_end_and_nowhere_else(llm: LLM) -> None:
    (eos,) = llm.core.input_processor.eos_ids
    eager: dict[str, Any] = {"temperature": 0.0, "logit_bias": {eos: 100.0}}
    word = llm.generate(CAT, SamplingParams(regex="[a-z]{3,}", **eager))[0]
    assert re.fullmatch("[a-z]{3,}", word.text)
    assert word.token_ids[-1] == eos
    assert word.finish_reason == "stop"
    shy = SamplingParams(regex="[a-z]{3,}", temperature=0.0, logit_bias={eos: -100.0}, max_tokens=9)
    assert llm.generate(CAT, shy)[0].finish_reason == "length"
    exact = llm.generate(CAT, SamplingParams(regex="12 of them", **eager))[0]
    assert (exact.text, exact.finish_reason) == ("12 of them", "stop")
    assert eos not in exact.token_ids, "nothing can follow, so nobody has to say so"


def test_min_tokens_delays_the_end_as_far_as_the_grammar_goes(llm: LLM) -> None:
    (eos,) = llm.core.input_processor.eos_ids
    eager: dict[str, Any] = {"temperature": 0.0, "logit_bias": {eos: 100.0}, "min_tokens": 6}
    assert len(llm.generate(CAT, SamplingParams(regex="[a-z]*", **eager))[0].token_ids) == 7
    short = llm.generate(CAT, SamplingParams(regex="[a-z]|[a-z][0-9]", **eager))[0]
    assert re.fullmatch("[a-z][0-9]", short.text)
    assert short.finish_reason == "stop"


def test_max_tokens_cuts_off(llm: LLM) -> None:
    whole = llm.generate(CAT, SamplingParams(max_tokens=400, json_schema=SCHEMA, seed=1))[0]
    cut = llm.generate(CAT, SamplingParams(max_tokens=7, json_schema=SCHEMA, seed=1))[0]
    assert cut.finish_reason == "length"
    assert cut.token_ids == whole.token_ids[:7]
    exact = SamplingParams(max_tokens=len(whole.token_ids), json_schema=SCHEMA, seed=1)
    assert llm.generate(CAT, exact)[0].finish_reason == "stop"


def test_stop_strings_and_stop_tokens_end_the_output_early(llm: LLM) -> None:
    by_text = llm.generate(CAT, SamplingParams(max_tokens=400, json_schema=SCHEMA, seed=1, stop='"age"'))[0]
    assert by_text.finish_reason == "stop"
    assert '"name"' in by_text.text
    assert '"age"' not in by_text.text
    comma = llm.tokenizer.backend.convert_tokens_to_ids(",")
    by_token = llm.generate(CAT, SamplingParams(regex="[a-z]{2,4},[a-z]+", stop_token_ids=[comma], seed=1))[0]
    assert re.fullmatch("[a-z]{2,4},", by_token.text)
    assert_idle_and_clean(llm)


def test_where_nothing_is_left_to_sample_the_request_ends_with_an_error(llm: LLM) -> None:
    """The grammar demands the token that min_tokens forbids."""
    letter = llm.tokenizer.backend.convert_tokens_to_ids("x")
    dead_end = SamplingParams(regex="abx+", stop_token_ids=[letter], min_tokens=5, temperature=0.0)
    output, other = llm.generate([CAT] * 2, [dead_end, SamplingParams(regex=DATE, seed=1)])
    assert output.finish_reason == "error"
    assert "lower min_tokens" in (output.error or "")
    assert other.finish_reason == "stop"
    assert_idle_and_clean(llm)


def test_a_grammar_that_takes_too_much_ends_in_an_error_and_never_in_a_stop(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.grammar._LIMITS", LLParserLimits(max_lexer_states=500, verbose_errors=False))
    pattern = "(.*a.{200}){30}"
    outputs = llm.generate([CAT] * 6, [SamplingParams(regex=pattern, max_tokens=300, seed=s) for s in range(6)])
    assert {output.finish_reason for output in outputs} == {"error"}
    assert all("too many states" in (output.error or "") for output in outputs)
    assert_idle_and_clean(llm)


# -- at the edge ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"), [("regex", "[a-"), ("json_schema", '{"type": "text"}'), ("json_schema", '{"not": {}}')]
)
def test_a_grammar_that_cannot_be_used_is_refused_before_anything_runs(llm: LLM, field: str, value: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be used") as caught:
        llm.generate([CAT, CAT], [SamplingParams(), SamplingParams(**{field: value})])
    assert caught.value.field == field
    assert_idle_and_clean(llm)


def test_a_model_without_a_tokenizer_has_no_grammars(tmp_path: Path) -> None:
    llm = make(tiny_checkpoint(tmp_path, "LlamaForCausalLM")[0])
    with pytest.raises(InvalidRequest, match="json_schema: needs a tokenizer"):
        llm.generate([[1, 2]], SamplingParams(json_schema="{}"))


@pytest.mark.slow
def test_the_default_model_answers_in_its_schema(default_model_dir: Path) -> None:
    llm = LLM(default_model_dir, device="cpu", num_pages=64)
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"enum": ["Italy", "France", "Spain"]}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    question = [{"role": "user", "content": "What is the capital of France? Answer in JSON with city and country."}]
    params = SamplingParams(temperature=0.0, max_tokens=60, json_schema=json.dumps(schema))
    output = llm.chat(question, params)
    assert isinstance(output, RequestOutput)
    assert output.finish_reason == "stop"
    assert json.loads(output.text) == {"city": "Paris", "country": "France"}
