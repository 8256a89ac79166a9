"""Structured output through the offline API: a model of random weights says what its grammar lets it say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import hypothesis.strategies as st
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from llguidance import LLParserLimits

from minisgl.engine.cuda_graph import CpuGraph, CudaGraphRunner
from minisgl.engine.sampler import DefaultSampler
from minisgl.errors import InvalidRequest
from minisgl.llm import LLM
from minisgl.outputs import RequestOutput
from minisgl.sampling_params import SamplingParams
from tests.model_zoo import tiny_checkpoint
from tests.structured import CAT, DATE, PERSON, SCHEMA, make, tokens
from tests.tiny_text_model import assert_idle_and_clean, text_checkpoint
from tests.tiny_tokenizer import KINDS, save


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


MIXED = [
    SamplingParams(max_tokens=90, json_schema=SCHEMA, seed=1, n=2),
    SamplingParams(max_tokens=25, temperature=0.8, top_p=0.9, seed=2),
    SamplingParams(max_tokens=30, regex=DATE, top_k=3, seed=3),
    SamplingParams(max_tokens=30, temperature=0.0, logprobs=2),
    SamplingParams(max_tokens=30, regex="[a-e]+(,[a-e]+){3}", repetition_penalty=1.5, logprobs=3, seed=4),
    SamplingParams(max_tokens=40, temperature=0.0, regex="[0-9 ]{8,}", presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(max_tokens=20, min_p=0.05, seed=5, stop=["e", " "]),
    SamplingParams(max_tokens=30, regex=".{2,}", min_tokens=4, logit_bias={20: 4.0}, min_p=0.02, seed=6),
    SamplingParams(max_tokens=12, json_schema='{"type": "array"}', seed=7),
]
PROMPTS = [[7, 8, 9] * 3 + [i] * (1 + i % 4) for i in range(len(MIXED))]
TIGHT: dict[str, Any] = {"num_pages": 32, "max_prefill_tokens": 8, "max_running_requests": 4}


def test_overlap_chunks_and_preemption_give_the_same_tokens(path: Path) -> None:
    """Every way to sample, with and without a grammar, in an engine that has too little of everything."""
    expected = None
    for options in ({}, {**TIGHT, "overlap": False}, {**TIGHT, "overlap": True}, {**TIGHT, "batch_policy": "mixed"}):
        llm = make(path, **options)
        outputs = llm.generate(PROMPTS, MIXED)
        assert_idle_and_clean(llm)
        answers = [(c.token_ids, c.text, c.finish_reason) for output in outputs for c in output.completions]
        expected = expected or answers
        assert answers == expected
        assert (sum(output.metrics.preemptions for output in outputs) > 0) == bool(options)
    first, second = (json.loads(completion.text) for completion in outputs[0].completions)
    assert first != second, "each completion follows the grammar by itself"


def test_requests_without_a_grammar_do_not_notice_those_with_one(path: Path) -> None:
    free = [i for i, params in enumerate(MIXED) if params.regex is None and params.json_schema is None]
    for overlap in (False, True):
        llm = make(path, overlap=overlap)
        alone = llm.generate([PROMPTS[i] for i in free], [MIXED[i] for i in free])
        together = llm.generate(PROMPTS, MIXED)
        assert tokens([together[i] for i in free]) == tokens(alone)


@pytest.mark.parametrize("sampler", ["default", "triton"])
def test_a_step_replayed_from_a_graph_obeys_its_masks(path: Path, sampler: str) -> None:
    """The graph has sampled without them already; the token table must hold what was sampled with them."""
    llm = make(path, sampler=sampler)
    replayed = make(path, sampler=sampler, overlap=True)
    replayed.engine.runner = CudaGraphRunner(replayed.engine.runner, (1, 2, 4), CpuGraph)
    params = [
        SamplingParams(max_tokens=7, seed=1),
        SamplingParams(regex=DATE, seed=2),
        SamplingParams(regex="x|[ab]+", seed=3),
    ]
    assert tokens(replayed.generate(PROMPTS[:3], params)) == tokens(llm.generate(PROMPTS[:3], params))


class Watching(DefaultSampler):
    sampled: ClassVar[list[bool]] = []

    def _adjust(self, logits: Any, inputs: Any, history: Any) -> Any:
        self.sampled.append(inputs.constraint is not None)
        return super()._adjust(logits, inputs, history)


def test_masks_are_made_for_the_steps_that_need_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled: list[bool] = []
    monkeypatch.setattr(Watching, "sampled", sampled)
    llm = make(path, sampler=f"{__name__}:Watching")
    llm.generate(CAT, SamplingParams(temperature=0.0, max_tokens=5))
    assert sampled == [False] * 5
    sampled.clear()
    llm.generate([CAT] * 2, [SamplingParams(temperature=0.0, max_tokens=9), SamplingParams(regex="x{3}", seed=1)])
    assert sampled == [True] * 3 + [False] * 6


def test_streamed_text_is_the_whole_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=400, json_schema=SCHEMA, seed=3)
    deltas = list(llm.stream(CAT, params))
    text = "".join(delta.text for delta in deltas)
    assert text == llm.generate(CAT, params)[0].text
    assert deltas[-1].finish_reason == "stop"
    jsonschema.validate(json.loads(text), PERSON)


def test_an_abort_in_the_middle_of_a_grammar(llm: LLM) -> None:
    params = SamplingParams(max_tokens=400, json_schema=SCHEMA, seed=3)
    expected = llm.generate(CAT, params)[0].token_ids
    for steps in (0, 1, 2, 5):
        (aborted,), (other,) = llm.prepare(CAT, params), llm.prepare(CAT, params)
        for generation in (aborted, other):
            llm.submit(generation)
        for _ in range(steps):
            llm.step()
        llm.abort(aborted)
        while llm.scheduler.has_work:
            llm.step()
        assert other.completion().token_ids == expected
        assert_idle_and_clean(llm)


def test_logprobs_are_of_the_model_and_not_of_the_grammar(llm: LLM) -> None:
    free = llm.generate(CAT, SamplingParams(temperature=0.0, max_tokens=1, logprobs=1))[0]
    forced = llm.generate(CAT, SamplingParams(temperature=0.0, regex="[0-9]", logprobs=1))[0]
    assert free.logprobs is not None
    assert forced.logprobs is not None
    assert forced.logprobs[0].top == free.logprobs[0].top
    assert forced.logprobs[0].logprob < free.logprobs[0].logprob
