"""Structured output: a request's tokens are constrained to a JSON Schema or a regular expression.

A grammar describes bytes, and a token may be any piece of the output. llguidance (Guidance AI) walks a parser along the
tree of all tokens' bytes on the host and finds which tokens may come next, one bit each; the sampler sets the others'
logits to −inf (Willard & Louf 2023).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import cast

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

from minisgl.errors import InvalidRequest
from minisgl.request import Int32Array, TokenConstraint
from minisgl.sampling_params import SamplingParams
from minisgl.tokenizer import Tokenizer

_MAX_CACHED = 64  # grammars that are kept compiled
# A schema takes some hundreds of states. An expression can be written to take any number, of two kilobytes each, and to
# make so many at one token that the step waits: the fuel is for some 20 ms.
_LIMITS = LLParserLimits(max_lexer_states=50_000, step_lexer_fuel=50_000, verbose_errors=False)
# Every way to spell the output in tokens is allowed. With forcing, llguidance tokenises what must come, and would take
# a text such as <s> for the special token of that name.
_RULE = '%llguidance {{"no_forcing": true}}\nstart: {}'
# A space, or a new line and its indentation. Otherwise a model could write white space for ever.
_WHITE_SPACE = " |\n[ \t]{0,32}"


class Grammar:
    """A `TokenConstraint`: one request's position in its grammar, which ``matcher`` holds.

    ``field`` is the request's field for errors; ``on_error`` is called when the output cannot go on.
    """

    def __init__(self, matcher: LLMatcher, field: str, on_error: Callable[[], None]) -> None:
        self.matcher = matcher
        self._field = field
        self._on_error = on_error

    @property
    def finished(self) -> bool:
        return self.matcher.is_stopped()

    @property
    def error(self) -> str | None:
        if not self.matcher.is_error():
            return None
        return (
            f"{self._field}: the output cannot go on ({_reason(self.matcher)}); simplify the grammar, or lower "
            "min_tokens if it forbids what the grammar demands"
        )

    def accept(self, token: int) -> None:
        self.matcher.consume_token(token)
        if self.matcher.is_error():
            self._on_error()

    def fork(self) -> Grammar:
        return Grammar(self.matcher.deep_copy(), self._field, on_error=lambda: None)


class Grammars:
    """Makes the constraints of requests, and the masks of steps.

    The first request with a grammar takes some tenths of a second, to gather all tokens' bytes. The model's
    ``vocab_size`` may exceed the tokenizer's; tokens without bytes are never allowed, ``eos_ids`` only where a grammar
    may end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._compiled = lru_cache(maxsize=_MAX_CACHED)(self._compile)

    def constraint(self, params: SamplingParams) -> TokenConstraint | None:
        """Make the constraint of one request; None if its parameters ask for none.

        Raises `InvalidRequest` for a grammar that is malformed, too large, not supported or fits no output.
        """
        if params.grammar is None:
            return None
        field, text = params.grammar
        # Copies share parser states, which makes masks cheap. Once these have grown too large for one request they have
        # for all, so an error clears the cache and the next request compiles its grammar anew.
        return Grammar(self._compiled(field, text).deep_copy(), field, on_error=self._compiled.cache_clear)

    def compile(self, params: SamplingParams) -> None:
        """Compile a grammar for `constraint` to find; may be called in another thread. Raises `InvalidRequest`."""
        if params.grammar is not None:
            self._compiled(*params.grammar)

    def masks(self, constraints: Sequence[TokenConstraint]) -> Int32Array:
        """A `MaskMaker` for `Grammar`s. It runs on several cores, without Python's lock."""
        masks: Int32Array = allocate_token_bitmask(len(constraints), self._tokens.vocab_size)
        matchers = [(cast(Grammar, constraint).matcher, row) for row, constraint in enumerate(constraints)]
        fill_next_token_bitmask_par(self._executor, matchers, masks)
        return masks

    def _compile(self, field: str, text: str) -> LLMatcher:
        if not self._tokenizer.available:
            raise InvalidRequest(field, "needs a tokenizer and this model has none")
        return compile_grammar(self._tokens, field, text)

    @cached_property
    def _tokens(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer  # here, since it imports transformers

        backend = self._tokenizer.backend
        return from_tokenizer(backend, max(self._vocab_size, len(backend)), self._eos_ids or None)

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()


def compile_grammar(tokens: LLTokenizer, field: str, text: str) -> LLMatcher:
    """Compile the schema or expression ``text`` for a vocabulary, without Python's lock.

    Raises `InvalidRequest` as `Grammars.constraint` does.
    """
    try:
        rule = _regex_rule(text) if field == "regex" else _json_rule(text)
        matcher = LLMatcher(tokens, _RULE.format(rule), limits=_LIMITS, log_level=0)
    except ValueError as error:
        raise InvalidRequest(field, f"cannot be used with this model: {error}") from error
    matcher.compute_bitmask()  # some errors are found where the first token is
    if matcher.is_error():
        raise InvalidRequest(field, f"cannot be used: {_reason(matcher)}")
    return matcher


def _regex_rule(pattern: str) -> str:
    return f"/{regex_to_lark(pattern, use_ascii='dws')}/"


def _json_rule(schema: str) -> str:
    # Unless lenient, llguidance refuses what it does not support.
    grammar = LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_pattern": _WHITE_SPACE, "lenient": False}
    )
    return "%json " + json.dumps(json.loads(grammar)["grammars"][0]["json_schema"])


def _reason(matcher: LLMatcher) -> str:
    """The matcher's error message without our rule's line and the parser's states."""
    noise = r"^at \d+\(\d+\): |\n +1 \|.*|<(state|non-verbose/)>.*"
    reason = re.sub(noise, "", matcher.get_error(), flags=re.DOTALL).strip()
    if reason == "NoExtensionBias":
        return "no output fits it"
    return reason if len(reason) <= 300 else f"{reason[:150]} … {reason[-150:]}"
