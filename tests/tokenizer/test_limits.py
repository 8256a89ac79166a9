from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from minisgl.errors import InvalidRequest
from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer.limits import characters_per_token
from tests.tokenizer.tiny import KINDS, byte_level, tiny_tokenizer


def bound(change: Callable[[RawTokenizer], object]) -> int | None:
    raw = byte_level()
    change(raw)
    return characters_per_token(PreTrainedTokenizerFast(tokenizer_object=raw))


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(st.characters(exclude_categories=("Cs",))), times=st.integers(1, 50))
def test_no_text_has_fewer_tokens_than_that(kind: str, text: str, times: int) -> None:
    tokenizer = tiny_tokenizer(kind)
    assert tokenizer._characters_per_token is not None
    assert len(text * times) <= len(tokenizer.encode(text * times)) * tokenizer._characters_per_token


def test_the_bound_is_the_longest_token() -> None:
    plain = bound(lambda raw: None)
    assert plain == len("<|im_start|>")
    assert bound(lambda raw: raw.add_tokens(["x" * 40])) == 40
    assert bound(lambda raw: setattr(raw, "normalizer", normalizers.NFC())) == 4 * plain


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: setattr(raw, "normalizer", normalizers.Strip()),
        lambda raw: setattr(raw, "normalizer", normalizers.Replace("ab", "a")),
        lambda raw: setattr(raw, "normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])),
        lambda raw: setattr(raw, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda raw: setattr(raw, "pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
        lambda raw: raw.add_tokens([AddedToken("<sep>", lstrip=True)]),
    ],
)
def test_a_tokenizer_that_drops_characters_has_no_bound(change: Callable[[RawTokenizer], object]) -> None:
    assert bound(change) is None


def test_the_default_model_has_a_bound(default_model_dir: Path) -> None:
    tokenizer = Tokenizer(default_model_dir)
    with pytest.raises(InvalidRequest, match=r"^prompt: 1000000 characters are at least \d+ tokens, and 100 fit"):
        tokenizer.encode("x" * 1_000_000, limit=100)
    with pytest.raises(InvalidRequest, match=r"^messages: \d+ characters"):
        tokenizer.encode_chat([{"role": "user", "content": "x" * 1_000_000}], limit=100)
    assert len(tokenizer.encode("x" * 1000, limit=1000)) < 1000
