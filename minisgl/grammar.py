"""Structured output: what a request generates is held to a JSON Schema or a regular expression. Told in chapter 15.

A grammar describes bytes, a model writes tokens, and a token may be any piece of the output: half of a word, several
brackets, a part of a character. llguidance (Guidance AI) walks a parser along the tree of all tokens' bytes and so
finds which tokens may come next, one bit each. The sampler of chapter 5 turns the others' logits into −inf (Willard &
Louf 2023). All of that is the host's work; chapter 12 hides what it can of it, see `minisgl.scheduler.constraints`.
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

_CACHED = 64
"""Grammars that are kept compiled."""
_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""A schema takes some hundreds of states. An expression can be written to take any number, of two kilobytes each."""
_RULE = '%llguidance {{"no_forcing": true}}\nstart: {}'
"""Every way to spell the output in tokens is allowed. The library's other mode tokenises what must come and allows that
alone, but takes a text such as ``<s>`` for the special token of that name."""
_WHITE_SPACE = " |\n[ \t]{0,32}"
"""A space, or a new line and its indentation. A model that likes white space could otherwise write it for ever."""


class Grammar:
    """A `TokenConstraint`: one request's place in its grammar.

    Args:
        matcher: at the beginning of the grammar; belongs to this object from now on.
        field: of the request that the grammar came in, for errors.
        on_error: called when the output cannot go on.
    """

    def __init__(self, matcher: LLMatcher, field: str, on_error: Callable[[], None]) -> None:
        self.matcher = matcher
        self._field = field
        self._on_error = on_error

    @property
    def finished(self) -> bool:
        """See `TokenConstraint.finished`."""
        return self.matcher.is_stopped()

    @property
    def error(self) -> str | None:
        """See `TokenConstraint.error`."""
        if not self.matcher.is_error():
            return None
        return (
            f"{self._field}: the output cannot go on ({_reason(self.matcher)}); simplify the grammar, or lower "
            "min_tokens if it forbids what the grammar demands"
        )

    def accept(self, token: int) -> None:
        """See `TokenConstraint.accept`."""
        self.matcher.consume_token(token)
        if self.matcher.is_error():
            self._on_error()


class Grammars:
    """Makes the constraints of requests, and the masks of steps.

    The tokens' bytes are gathered for the first request that has a grammar; that takes some tenths of a second.

    Args:
        tokenizer: the model's.
        vocab_size: the model's, which may be padded beyond the tokenizer's. What has no bytes is never allowed.
        eos_ids: tokens that end an output, allowed exactly where a grammar may end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._compiled = lru_cache(maxsize=_CACHED)(self._compile)

    def constraint(self, params: SamplingParams) -> TokenConstraint | None:
        """A new constraint of one request; None if its parameters ask for none.

        Raises:
            InvalidRequest: naming the field whose grammar is malformed, too large, not supported or fits no output.
        """
        field, text = ("regex", params.regex) if params.json_schema is None else ("json_schema", params.json_schema)
        if text is None:
            return None
        # Copies share what they find out about their grammar. It makes masks cheap, but where it has grown too large
        # for one request it has for all: the next request begins anew.
        return Grammar(self._compiled(field, text).deep_copy(), field, on_error=self._compiled.cache_clear)

    def masks(self, constraints: Sequence[TokenConstraint]) -> Int32Array:
        """A `MaskMaker`, for constraints that were made here. It works on several cores, and without Python's lock."""
        masks: Int32Array = allocate_token_bitmask(len(constraints), self._tokens.vocab_size)
        matchers = [(cast(Grammar, constraint).matcher, row) for row, constraint in enumerate(constraints)]
        fill_next_token_bitmask_par(self._executor, matchers, masks)
        return masks

    def _compile(self, field: str, text: str) -> LLMatcher:
        """A matcher at the beginning of the grammar, to be copied."""
        if not self._tokenizer.available:
            raise InvalidRequest(field, "needs a tokenizer and this model has none")
        try:
            rule = _regex_rule(text) if field == "regex" else _json_rule(text)
            matcher = LLMatcher(self._tokens, _RULE.format(rule), limits=_LIMITS, log_level=0)
        except ValueError as error:
            raise InvalidRequest(field, f"cannot be used with this model: {error}") from error
        matcher.compute_bitmask()  # some errors are found where the first token is
        if matcher.is_error():
            raise InvalidRequest(field, f"cannot be used: {_reason(matcher)}")
        return matcher

    @cached_property
    def _tokens(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer  # here, since it imports transformers

        backend = self._tokenizer.backend
        return from_tokenizer(backend, max(self._vocab_size, len(backend)), self._eos_ids or None)

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()


def _regex_rule(pattern: str) -> str:
    return f"/{regex_to_lark(pattern, use_ascii='dws')}/"


def _json_rule(schema: str) -> str:
    """Unless lenient, llguidance refuses what it does not support."""
    grammar = LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_pattern": _WHITE_SPACE, "lenient": False}
    )
    return "%json " + json.dumps(json.loads(grammar)["grammars"][0]["json_schema"])


def _reason(matcher: LLMatcher) -> str:
    """What a matcher complains of, without the line of our rule and the states of its parser."""
    noise = r"^at \d+\(\d+\): |\n +1 \|.*|<(state|non-verbose/)>.*"
    reason = re.sub(noise, "", matcher.get_error(), flags=re.DOTALL).strip()
    if reason == "NoExtensionBias":
        return "no output fits it"
    return reason if len(reason) <= 300 else f"{reason[:150]} … {reason[-150:]}"
