"""Encoding texts and chats, the bound of characters a token, and end-of-sequence ids."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from minisgl.errors import ContextExceeded, InvalidRequest, ModelLoadError
from minisgl.tokenizer import Tokenizer, characters_per_token, load_eos_ids
from tests.tiny_tokenizer import KINDS, byte_level, save, tiny_tokenizer

USER = {"role": "user", "content": "the dog"}


@pytest.mark.parametrize("kind", KINDS)
def test_text_round_trip(kind: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    text = "the dog, 你好 🦊  and more"
    ids = tokenizer.encode(text)
    assert ids[0] == 0  # BOS
    assert max(ids) < tokenizer.vocab_size
    assert tokenizer.decode(ids) == text
    assert tokenizer.special_ids == {0, 1, 2, 3}


def test_a_tokenizer_without_a_class_of_its_own_needs_no_pytorch(tmp_path: Path) -> None:
    path = save(byte_level(), tmp_path)
    code = "import pathlib, sys; from minisgl.tokenizer import Tokenizer; Tokenizer(pathlib.Path(sys.argv[1])); "
    code += "print('torch' in sys.modules, 'transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "True"]


def test_a_class_that_writes_text_its_own_way_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loud(PreTrainedTokenizerFast):
        def _decode(self, *arguments: Any, **options: Any) -> str:
            return super()._decode(*arguments, **options).upper()

    path = save(byte_level(), tmp_path)
    plain = Tokenizer(path)
    ids = plain.encode("the dog")
    assert plain.decode(memoryview(np.array(ids, dtype=np.int32))) == "the dog"
    monkeypatch.setattr("minisgl.tokenizer._load", Loud.from_pretrained)
    assert Tokenizer(path).decode(ids) == "THE DOG"


def test_a_chat_prompt_has_one_bos() -> None:
    tokenizer = tiny_tokenizer("byte-level")
    ids = tokenizer.encode_chat([USER])
    assert ids.count(0) == 1
    assert ids[0] == 0
    assert tokenizer.decode(ids) == "user the dogassistant "
    assert tokenizer.decode(tokenizer.encode_chat([USER], add_generation_prompt=False)) == "user the dog"


def test_content_may_come_in_text_parts() -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "dog"}]
    tokenizer = tiny_tokenizer("byte-level")
    assert tokenizer.encode_chat([{"role": "user", "content": parts}]) == tokenizer.encode_chat([USER])


@pytest.mark.parametrize(
    ("messages", "field", "says"),
    [
        ([], "messages", "at least one"),
        ("hello", "messages", "a list of messages"),
        (["hello"], "messages[0]", "role and content"),
        ([USER, {"role": "robot", "content": "x"}], "messages[1].role", "'robot'"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role", "must be one of"),
        ([{"role": "user"}], "messages[0].content", "a string or a list of text parts"),
        ([{"role": "user", "content": 5}], "messages[0].content", "a string or a list of text parts"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content", "parts must be"),
        ([{"role": "tool", "content": "x"}], "messages", "no tools here"),
        ([{"role": "user", "content": "\ud800"}], "messages", "surrogate"),
    ],
)
def test_bad_messages_name_the_field(messages: Any, field: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tiny_tokenizer("byte-level").encode_chat(messages)
    assert caught.value.field == field
    assert says in caught.value.message


@pytest.mark.parametrize(("prompt", "says"), [(5, "a string"), (None, "a string"), ("a\udfff", "surrogate")])
def test_bad_prompts_name_the_field(prompt: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        tiny_tokenizer("byte-level").encode(prompt)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize("template", ["{% for", "{{ messages | nonsense }}", "{{ 1 / 0 }}"])
def test_a_broken_template_is_a_typed_error(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer(save(byte_level(), tmp_path, template))
    with pytest.raises(InvalidRequest, match="chat template rejects"):
        tokenizer.encode_chat([USER])
    assert tokenizer.encode("the dog")


def test_a_base_model_has_no_chat(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(byte_level(), tmp_path, template=None))
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.encode_chat([USER])


def test_without_tokenizer_files_text_is_refused_and_eos_is_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    tokenizer = Tokenizer(tmp_path)
    assert not tokenizer.available
    assert tokenizer.eos_ids == (7,)
    with pytest.raises(InvalidRequest, match="use token ids instead"):
        tokenizer.encode("hello")
    with pytest.raises(InvalidRequest, match="use token ids instead"):
        tokenizer.encode_chat([USER])
    with pytest.raises(InvalidRequest, match="use token ids instead"):
        tokenizer.decode([1])


@pytest.mark.parametrize("content", ["", "{}", '{"model": ', "[1, 2]"])
def test_damaged_tokenizer_files_are_a_load_error(tmp_path: Path, content: str) -> None:
    save(byte_level(), tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match="tokenizer"):
        Tokenizer(tmp_path)


def test_default_model_chat(default_model_dir: Path) -> None:
    """SmolLM2 brings its own system prompt, ends a turn with <|im_end|> and splits numbers into digits."""
    tokenizer = Tokenizer(default_model_dir)
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    raw = Path(default_model_dir / "tokenizer.json").read_text(encoding="utf-8")
    words = {token_id: word for word, token_id in json.loads(raw)["model"]["vocab"].items()}
    assert [words[token_id] for token_id in ids[:3]] == ["<|im_start|>", "system", "Ċ"]
    assert "You are a helpful AI assistant named SmolLM, trained by Hugging Face" in tokenizer.decode(ids)
    assert [words[token_id] for token_id in tokenizer.eos_ids] == ["<|im_end|>"]
    assert [words[token_id] for token_id in tokenizer.encode("x   2026")] == ["x", "ĠĠĠ", "2", "0", "2", "6"]
    assert tokenizer.vocab_size == 49_152


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_one_token_names_special_ones(kind: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    assert [tokenizer.token_text(token_id) for token_id in (0, 1, 3)] == ["<s>", "</s>", "<|im_end|>"]
    word, half = tokenizer.encode("the")[-1], tokenizer.encode("€")[-1]
    assert (tokenizer.token_text(word), tokenizer.token_text(half)) == ("the", "\ufffd")


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


def test_of_a_text_that_is_far_too_long_only_the_beginning_is_read(default_model_dir: Path) -> None:
    tokenizer, read = Tokenizer(default_model_dir), []
    encode = tokenizer.backend.encode
    tokenizer.backend.encode = lambda text, **options: read.append(len(text)) or encode(text, **options)
    text, says = "the quick brown fox " * 5_000, "its first 16000 characters are [0-9]+ tokens, and 2000 fit"
    with pytest.raises(ContextExceeded, match=says):
        tokenizer.encode(text, limit=2000)
    with pytest.raises(ContextExceeded, match=says):
        tokenizer.encode_chat([{"role": "user", "content": text}], limit=2000)
    assert read == [16_000, 16_000]
    assert len(tokenizer.encode(" " * 9_000 + "the quick", limit=1000)) <= 1000, "few tokens, though many characters"


def write(directory: Path, **files: object) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def test_generation_config_lists_all_of_them(tmp_path: Path) -> None:
    path = write(tmp_path, generation_config={"eos_token_id": [2, 7, 9]}, config={"eos_token_id": 1})
    assert load_eos_ids(path) == (2, 7, 9)


def test_a_single_id(tmp_path: Path) -> None:
    assert load_eos_ids(write(tmp_path, generation_config={"eos_token_id": 2})) == (2,)


def test_config_where_generation_config_is_silent(tmp_path: Path) -> None:
    assert load_eos_ids(write(tmp_path, generation_config={}, config={"eos_token_id": [0]})) == (0,)


@pytest.mark.parametrize("eos_token", ["</s>", {"content": "</s>"}])
def test_the_tokenizers_own_token_comes_last(tmp_path: Path, eos_token: object) -> None:
    added = [{"id": 1, "content": "<s>"}, {"id": 5, "content": "</s>"}]
    path = write(
        tmp_path,
        config={"eos_token_id": None},
        tokenizer_config={"eos_token": eos_token},
        tokenizer={"added_tokens": added},
    )
    assert load_eos_ids(path) == (5,)


def test_no_file_names_one(tmp_path: Path) -> None:
    assert load_eos_ids(tmp_path) == ()


@pytest.mark.parametrize("value", ["2", [2, "3"], True, 1.5])
def test_nonsense_names_the_file(tmp_path: Path, value: object) -> None:
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: eos_token_id must be"):
        load_eos_ids(write(tmp_path, generation_config={"eos_token_id": value}))


@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_json_names_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelLoadError, match="generation_config"):
        load_eos_ids(tmp_path)
