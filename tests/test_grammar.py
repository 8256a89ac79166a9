"""Grammars without a model: what may follow a piece of output, for both kinds of tokenizers, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from llguidance import LLParserLimits

from minisgl.errors import InvalidRequest
from minisgl.grammar import Grammars
from minisgl.request import TokenConstraint
from minisgl.sampling_params import SamplingParams
from minisgl.tokenizer import Tokenizer
from tests.rule import allowed_by
from tests.tiny_tokenizer import KINDS, tiny_tokenizer

EOS = (1, 3)
"""`</s>` and `<|im_end|>`: both end an output."""
PADDING = 40
"""Token ids that the model has, and the tokenizer has not."""


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return tiny_tokenizer(request.param)


@pytest.fixture
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size + PADDING, EOS)


def regex(grammars: Grammars, pattern: str) -> TokenConstraint:
    constraint = grammars.constraint(SamplingParams(regex=pattern))
    assert constraint is not None
    return constraint


def allowed(grammars: Grammars, constraint: TokenConstraint) -> list[int]:
    return allowed_by(grammars.masks([constraint])[0])


def test_no_field_no_constraint(grammars: Grammars) -> None:
    assert grammars.constraint(SamplingParams()) is None


WORDS = [
    "the dog",
    "the the dog",
    "do",
    "dog",
    "dodo",
    "你好",
    "你",
    "好你",
    "naïve",
    "é",
    "🙂",
    " dog",
    "a\nb",
    "<s>",
    "</s>x",
]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60)
def test_any_walk_along_the_masks_spells_a_word(kind: str, data: st.DataObject) -> None:
    """Byte by byte where it must be, and never along a special token, whatever the words look like."""
    tokenizer = tiny_tokenizer(kind)
    grammars = Grammars(tokenizer, tokenizer.vocab_size + PADDING, EOS)
    words = data.draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=5, unique=True))
    constraint = regex(grammars, "|".join(map(re.escape, words)))
    spelled = bytes_by_token(tokenizer)
    walk = b""
    while not constraint.finished:
        choices = allowed(grammars, constraint)
        complete = walk in [word.encode() for word in words]
        assert (set(EOS) & set(choices) == set(EOS)) == complete
        assert set(choices) - set(EOS) == {token for token, text in spelled.items() if fits(walk, text, words)}
        token = data.draw(st.sampled_from(choices))
        constraint.accept(token)
        assert constraint.error is None
        if token in EOS:
            break
        walk += spelled[token]
    assert walk.decode() in words


def fits(walk: bytes, text: bytes, words: list[str]) -> bool:
    return any(word.encode().startswith(walk + text) for word in words)


def bytes_by_token(tokenizer: Tokenizer) -> dict[int, bytes]:
    """What each token that is text spells, by the rules of either kind of tokenizer."""
    vocab = {name: token for name, token in tokenizer.backend.get_vocab().items() if token not in tokenizer.special_ids}
    if "▁" in vocab:
        whole = {token: name.replace("▁", " ").encode() for name, token in vocab.items()}
        single = {token: bytes([int(name[3:5], 16)]) for name, token in vocab.items() if re.fullmatch("<0x..>", name)}
        return whole | single
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_at = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return {token: bytes(byte_at[character] for character in name) for name, token in vocab.items()}


def test_masks_are_rows_of_whole_words_for_the_models_vocabulary(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraints = [regex(grammars, pattern) for pattern in ("a", "b", "[ab]")]
    masks = grammars.masks(constraints)
    assert masks.dtype == np.int32
    assert masks.shape == (3, -(-(tokenizer.vocab_size + PADDING) // 32))
    one, other, both = (allowed_by(mask) for mask in masks)
    assert sorted(one + other) == both


def test_a_model_may_have_fewer_tokens_than_its_tokenizer(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, tokenizer.vocab_size - 5, EOS)
    spelled = bytes_by_token(tokenizer)
    assert {spelled[token] for token in allowed(grammars, regex(grammars, "do"))} <= {b"d", b"do"}


def test_special_tokens_are_no_text(grammars: Grammars, tokenizer: Tokenizer) -> None:
    spelled = bytes_by_token(tokenizer)
    for name in ("<s>", "</s>", "<|im_end|>"):
        schema = json.dumps({"const": name})
        for params in (SamplingParams(regex=re.escape(name)), SamplingParams(json_schema=schema)):
            constraint = grammars.constraint(params)
            assert constraint is not None
            text = b""
            while not constraint.finished:
                token = allowed(grammars, constraint)[0]
                constraint.accept(token)
                text += spelled[token]
            assert text.decode() == (name if params.regex else f'"{name}"')
    anything = allowed(grammars, regex(grammars, "(?s:.*)"))
    assert set(anything) & set(tokenizer.special_ids) == set(EOS)
    assert max(anything) < tokenizer.vocab_size


def test_finished_once_nothing_may_follow(grammars: Grammars, tokenizer: Tokenizer) -> None:
    open_end, closed_end = regex(grammars, "do(g)?"), regex(grammars, "do")
    for letter in "do":
        assert not open_end.finished
        assert not closed_end.finished
        for constraint in (open_end, closed_end):
            constraint.accept(next(t for t in allowed(grammars, regex(grammars, letter))))
    assert not open_end.finished
    assert closed_end.finished
    assert set(EOS) < set(allowed(grammars, open_end))
    open_end.accept(EOS[1])
    assert open_end.finished
    assert open_end.error is closed_end.error is None


def test_a_token_that_was_not_allowed_is_an_error(grammars: Grammars) -> None:
    constraint = regex(grammars, "do")
    constraint.accept(EOS[0])
    assert constraint.error is not None
    assert constraint.error.startswith("regex: the output cannot go on (")
    assert "state" not in constraint.error, "what the parser looks like inside is nobody's business"
    assert grammars.masks([constraint, regex(grammars, "do")]).shape[0] == 2, "others are not affected"


def test_requests_share_a_compiled_grammar_and_nothing_else(grammars: Grammars) -> None:
    params = SamplingParams(json_schema='{"enum": ["a", "b"]}')
    first, second = grammars.constraint(params), grammars.constraint(params)
    assert grammars._compiled.cache_info().misses == 1
    assert first is not None
    assert second is not None
    before = allowed(grammars, second)
    first.accept(before[0])
    assert allowed(grammars, first) != before
    assert allowed(grammars, second) == before
    same_text_as_regex = grammars.constraint(SamplingParams(regex='{"enum": \\["a", "b"\\]}'.replace("{", "\\{")))
    assert same_text_as_regex is not None


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "text"}, "Invalid type: text"),
        ({"type": "object", "properties": 3}, "properties must be an object"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
        ({"enum": []}, "Unsatisfiable"),
        ({"not": {"type": "string"}}, '"not"'),
        ({"type": "array", "uniqueItems": True}, '"uniqueItems"'),
        ({"type": "string", "format": "phone"}, "Unknown format: phone"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "array", "items": {"if": {}, "then": {}}}, '"if"'),
        ({"not": {}, "x-guidance": {"lenient": True}}, '"not"'),
        ({"$ref": "#/$defs/nowhere"}, "/$defs/nowhere"),
        ({"$ref": "file:///etc/passwd"}, "does not fetch"),
        ({"$ref": "https://example.com/schema.json"}, "does not fetch"),
        ({"$ref": "#"}, "no output fits it"),
    ],
)
def test_schemas_that_are_refused(schema: dict[str, object], reason: str) -> None:
    grammars = Grammars(tiny_tokenizer("byte-level"), 300, EOS)
    with pytest.raises(InvalidRequest, match=re.escape(reason)) as caught:
        grammars.constraint(SamplingParams(json_schema=json.dumps(schema)))
    assert caught.value.field == "json_schema"
    assert len(caught.value.message) < 400


def test_a_schema_may_be_as_deep_as_it_likes_and_is_answered() -> None:
    grammars = Grammars(tiny_tokenizer("byte-level"), 300, EOS)
    deep = '{"properties": {"a": ' * 250 + "{}" + "}}" * 250
    with pytest.raises(InvalidRequest, match="json_schema: cannot be used"):
        grammars.constraint(SamplingParams(json_schema=deep))


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("[a-", "unclosed character class"),
        ("(?=a)b", "look-around"),
        ("(a)\\1", "backreferences"),
        ("\\bdog", "lookarounds"),
        ("[^\\s\\S]", "no output fits it"),
        ("</s>(", "unclosed group"),
        ("a" * 8000 + "(", "unclosed group"),
    ],
)
def test_expressions_that_are_refused(pattern: str, reason: str) -> None:
    grammars = Grammars(tiny_tokenizer("byte-level"), 300, EOS)
    with pytest.raises(InvalidRequest, match=re.escape(reason)) as caught:
        grammars.constraint(SamplingParams(regex=pattern))
    assert caught.value.field == "regex"
    assert len(caught.value.message) < 400


def test_an_expression_that_takes_too_much_to_follow_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each letter makes a new state. A large vocabulary, in which all tokens are tried, gets there within seconds."""
    monkeypatch.setattr("minisgl.grammar._LIMITS", LLParserLimits(max_lexer_states=500, verbose_errors=False))
    grammars = Grammars(tiny_tokenizer("byte-level"), 300, EOS)
    constraint = regex(grammars, "(.*a.{200}){30}")
    random = np.random.default_rng(0)
    steps = 0
    while constraint.error is None and steps < 1000:
        constraint.accept(int(random.choice(allowed(grammars, constraint))))
        steps += 1
    assert constraint.error is not None
    assert "too many states" in constraint.error
    again = regex(grammars, "(.*a.{200}){30}")
    for _ in range(20):
        again.accept(allowed(grammars, again)[0])
    assert again.error is None, "a new request does not inherit what another has used up"
    assert "simplify the grammar" in constraint.error


def test_without_a_tokenizer_there_is_no_grammar(tmp_path: Path) -> None:
    grammars = Grammars(Tokenizer(tmp_path), 300, EOS)
    with pytest.raises(InvalidRequest, match="regex: needs a tokenizer"):
        grammars.constraint(SamplingParams(regex="a"))
