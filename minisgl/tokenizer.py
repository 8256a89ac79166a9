"""Text to token ids and back: the checkpoint's tokenizer, its end-of-sequence ids and its chat template."""

from __future__ import annotations

import ctypes
import json
import re
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from minisgl.errors import ContextExceeded, InvalidRequest, ModelLoadError, check_type

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_ROLES = ("system", "developer", "user", "assistant", "tool")


class Tokenizer:
    """The tokenizer of the checkpoint in directory ``path``. `ModelLoadError` if its files cannot be read.

    With ``allow_control_tokens``, what a conversation's texts spell like a control token becomes one: see
    `encode_chat`. Without files, `available` is False, and all but `eos_ids` raise `InvalidRequest`: token ids alone
    still work.
    """

    def __init__(self, path: Path, allow_control_tokens: bool = False) -> None:
        self.path = path
        self._allow_control_tokens = allow_control_tokens
        self.eos_ids = load_eos_ids(path)
        self._backend: Any = _load(path) if any((path / name).is_file() for name in _FILES) else None
        self._raw = _raw_tokenizer(self._backend)
        self.special_ids = frozenset(self._find_special_ids())  # control tokens, which `decode` leaves out
        self.byte_tokens = {} if self._backend is None else find_byte_tokens(self._backend)
        # With byte fallback, a token that has text in any place: the byte of an A.
        self.anchor: list[int] = self._require("anchor").convert_tokens_to_ids(["<0x41>"]) if self.byte_tokens else []
        self._characters_per_token = characters_per_token(self._backend)
        self._texts: dict[int, str] = {}  # of single tokens, once they were asked for

    @property
    def available(self) -> bool:
        """True when the checkpoint has a tokenizer."""
        return self._backend is not None

    @property
    def backend(self) -> Any:
        """The transformers tokenizer, or None."""
        return self._backend

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return len(self._require("prompt"))

    def encode(self, text: str, limit: int | None = None, add_special_tokens: bool = True) -> list[int]:
        """Tokenize ``text``, by default with the special tokens (such as BOS) that the tokenizer adds to a text.

        Raises `InvalidRequest` without a tokenizer, or for a ``prompt`` that is no string, no valid Unicode or too
        long: a text that must exceed ``limit`` tokens is not tokenized.
        """
        check_type("prompt", text, str, "a string")
        return self._encode("prompt", text, add_special_tokens, limit)

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template; of several, all of them. None if there is none."""
        template = getattr(self._backend, "chat_template", None)
        return "\n".join(template.values()) if isinstance(template, dict) else template

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        limit: int | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokenize a conversation in the model's chat template, which writes all special tokens itself.

        A text of the conversation can write none. One that spells ``<|im_end|>`` gets the tokens of its letters, so
        that no user can end a message and begin another in the system's name.

        Args:
            messages: at least one, each with a ``role`` and a ``content``: a string, or a list of parts
                ``{"type": "text", "text": ...}``. Other keys reach the template as they are.
            add_generation_prompt: end with the beginning of the assistant's answer.
            tools: functions that the model may call, ``{"type": "function", "function": {...}}`` each.
            limit: as in `encode`.
            variables: what else the template can read, such as ``enable_thinking``; none may have a name that
                transformers' ``apply_chat_template`` gives a meaning of its own.

        Raises:
            InvalidRequest: ``messages`` is malformed or too long, or the template rejects it or is not there.
        """
        conversation = _check_messages(messages)
        if not self._require("messages").chat_template:
            raise InvalidRequest("messages", "this model has no chat template; send a prompt instead")
        variables = variables or {}
        if self._allow_control_tokens:
            text = self._render(conversation, tools, add_generation_prompt, variables)
            return self._encode("messages", text, False, limit)
        # A mark after the first letter of such a text passes through the template, and is where the text is cut then:
        # neither part spells a control token. Clients cannot guess the mark.
        mark = secrets.token_hex(16)
        quoted = [_quoted(message, self._control_texts[message["role"] == "tool"], mark) for message in conversation]
        quoted_tools = _quoted(tools, self._control_texts[False], mark)
        variables = {name: _quoted(value, self._control_texts[True], mark) for name, value in variables.items()}
        text = self._render(quoted, quoted_tools, add_generation_prompt, variables)
        return self._encode_parts(text.split(mark), limit)

    def _render(
        self, conversation: list[dict[str, Any]], tools: Any, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        try:
            text: str = self._backend.apply_chat_template(
                conversation, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
            )
        except Exception as error:  # a template is a program of the checkpoint's authors and may raise anything
            raise InvalidRequest("messages", f"the model's chat template rejects them: {error}") from error
        return text

    @cached_property
    def _control_texts(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """What looks like a control token in a message, and in a tool's result.

        These are all special tokens, and the other added tokens that the template writes around messages or results.
        """
        patterns = []
        for sample, tools in ((_PLAIN_SAMPLE, None), (_TOOL_SAMPLE, [_SAMPLE_TOOL])):
            try:
                around = self._render(sample, tools, True, {})
            except InvalidRequest:
                around = ""  # a template without tools, or that wants something else first
            added = self._backend.added_tokens_decoder.values()
            texts = {token.content for token in added if token.special or token.content in around}
            patterns.append({text for text in texts if len(text.strip("\u2581 \t\n")) > 1})
        plain, of_tools = patterns
        return _any_of(plain), _any_of(plain | of_tools)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids`` without special tokens; bytes that are no valid UTF-8 become U+FFFD."""
        backend, ids = self._require("token_ids"), list(token_ids)
        if self._raw is not None:
            return str(self._raw.decode(ids, skip_special_tokens=True))
        return str(backend.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def token_text(self, token_id: int) -> str:
        """Text of one token on its own, special tokens by name; bytes that are no whole character become U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.spell([token_id])
        return text

    def spell(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids`` with special tokens by name, to show what the model reads."""
        text: str = self._require("token_ids").decode(list(token_ids), clean_up_tokenization_spaces=False)
        return text

    def _encode(self, field: str, text: str, add_special_tokens: bool, limit: int | None) -> list[int]:
        backend = self._require(field)
        self._check_length(field, len(text), limit)
        _check_unicode(field, text)
        self._check_beginning(field, text, limit)
        ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens)
        if len(text) > _LARGE:
            _return_memory()
        return ids

    def _check_beginning(self, field: str, text: str, limit: int | None) -> None:
        """Raise `ContextExceeded` if the beginning of a long text is too long already: the rest is left alone."""
        if limit is None or len(text) <= _BEGINNING * limit:
            return
        beginning = text[: _BEGINNING * limit]
        least = len(self._backend.encode(beginning, add_special_tokens=False)) - _CUT
        if least > limit:
            raise ContextExceeded(
                field,
                f"its first {len(beginning)} characters are {least} tokens, and {limit} fit the context; shorten it",
            )

    def _encode_parts(self, parts: list[str], limit: int | None) -> list[int]:
        if len(parts) == 1:
            return self._encode("messages", parts[0], False, limit)
        if limit is not None and len(parts) > limit:  # each has a token at least
            raise ContextExceeded("messages", f"are at least {len(parts)} tokens, and {limit} fit the context")
        text = "".join(parts)
        self._check_length("messages", len(text), limit)
        _check_unicode("messages", text)
        self._check_beginning("messages", text, limit)
        return [token for ids in self._backend(parts, add_special_tokens=False)["input_ids"] for token in ids]

    def _check_length(self, field: str, characters: int, limit: int | None) -> None:
        per_token = self._characters_per_token
        if limit is None or per_token is None or characters <= limit * per_token:
            return
        least = -(-characters // per_token)
        raise ContextExceeded(
            field, f"{characters} characters are at least {least} tokens, and {limit} fit the context; shorten it"
        )

    def _require(self, field: str) -> Any:
        if self._backend is None:
            raise InvalidRequest(field, f"text needs a tokenizer and {self.path} has none; use token ids instead")
        return self._backend

    def _find_special_ids(self) -> list[int]:
        if self._backend is None:
            return []
        return [token_id for token_id, token in self._backend.added_tokens_decoder.items() if token.special]


_BEGINNING = 8  # characters that are more than a token in almost any text
_CUT = 64  # tokens that a beginning may have in excess, since a word is cut at its end
_LARGE = 2**18  # characters whose tokens take tens of megabytes while the library makes them


def _return_memory() -> None:
    """Give back what the allocator keeps of a large text: for 8 MB, it was more than a gigabyte."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _check_unicode(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"must be valid Unicode, but has a lone surrogate ({error})") from error


_PLAIN_SAMPLE: list[dict[str, Any]] = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
_SAMPLE_TOOL = {"type": "function", "function": {"name": "a", "description": "a", "parameters": {"type": "object"}}}
_SAMPLE_CALL = {"id": "a", "type": "function", "function": {"name": "a", "arguments": {}}}
_TOOL_SAMPLE: list[dict[str, Any]] = [
    *({"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [_SAMPLE_CALL]}),
    *({"role": "tool", "content": "a", "tool_call_id": "a", "name": "a"}, {"role": "user", "content": "a"}),
]


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern of all ``texts``, the longest first; without any, one that never matches."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _quoted(value: Any, pattern: re.Pattern[str], mark: str) -> Any:
    """A copy of a JSON value in which ``mark`` stands after the first character of what matches ``pattern``."""
    if isinstance(value, str):
        return pattern.sub(lambda match: match[0][0] + mark + match[0][1:], value)
    if isinstance(value, Mapping):
        return {_quoted(name, pattern, mark): _quoted(item, pattern, mark) for name, item in value.items()}
    return [_quoted(item, pattern, mark) for item in value] if isinstance(value, (list, tuple)) else value


def _load(path: Path) -> Any:
    import transformers  # which imports what is asked for: AutoTokenizer brings PyTorch, the general class does not

    loader = transformers.PreTrainedTokenizerFast if _wants_general_class(path) else transformers.AutoTokenizer
    try:
        return loader.from_pretrained(path, local_files_only=True)
    except Exception as error:  # depending on the file that is broken: OSError, ValueError, KeyError, a bare Exception
        raise ModelLoadError(f"cannot read the tokenizer in {path} ({error}); download the model again") from error


def _raw_tokenizer(backend: Any) -> Any:
    """What transformers' tokenizer passes tokens on to, unless it changes the text; its checks of types are slow."""
    if backend is None:
        return None
    from transformers import PreTrainedTokenizerFast

    general, kind = PreTrainedTokenizerFast, type(backend)
    passes_on = issubclass(kind, general) and (kind.decode, kind._decode) == (general.decode, general._decode)
    return backend.backend_tokenizer if passes_on else None


def _wants_general_class(path: Path) -> bool:
    config = path / "tokenizer_config.json"
    if not config.is_file() or not (path / "tokenizer.json").is_file() or (path / "tekken.json").is_file():
        return False
    try:
        fields = json.loads(config.read_bytes())
    except ValueError:  # the loader says what is wrong with the file
        return False
    general = ("TokenizersBackend", "PreTrainedTokenizerFast")
    return isinstance(fields, dict) and fields.get("tokenizer_class") in general and "auto_map" not in fields


def _check_messages(messages: object) -> list[dict[str, Any]]:
    check_type("messages", messages, (list, tuple), "a list of messages")
    assert isinstance(messages, (list, tuple))
    if not messages:
        raise InvalidRequest("messages", "must hold at least one message")
    return [_check_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _check_message(field: str, message: object) -> dict[str, Any]:
    check_type(field, message, Mapping, "an object with role and content")
    assert isinstance(message, Mapping)
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidRequest(f"{field}.role", f"must be one of {', '.join(_ROLES)}, got {role!r}")
    return {**message, "content": _check_content(f"{field}.content", message.get("content"))}


def _check_content(field: str, content: object) -> str:
    if not isinstance(content, list):
        check_type(field, content, str, "a string or a list of text parts")
        return str(content)
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(field, f'parts must be {{"type": "text", "text": "…"}}, got {part!r}')
    return "".join(part["text"] for part in content)


# How many times shorter a normalizer can make a text. NFC composes at most four characters into one, since no character
# decomposes into more (UAX #15, Unicode Normalization Forms).
_SHRINKING = {"Prepend": 1, "NFC": 4}


def characters_per_token(backend: Any) -> int | None:
    """Most characters of a text that one token of a transformers tokenizer can stand for; None if unknown.

    Known for BPE without dropped characters: each string of the vocabulary has a character for each byte or character.
    """
    raw = getattr(backend, "backend_tokenizer", None)
    if raw is None:
        return None
    parts = json.loads(raw.to_str())
    shrinking = _shrinking(parts["normalizer"])
    added = parts["added_tokens"]
    swallows = any(token["lstrip"] or token["rstrip"] for token in added)
    if parts["model"]["type"] != "BPE" or shrinking is None or swallows or not _keeps_all(parts["pre_tokenizer"]):
        return None
    return shrinking * max(map(len, (*parts["model"]["vocab"], *(token["content"] for token in added))))


def _shrinking(normalizer: dict[str, Any] | None) -> int | None:
    """How many times shorter a normalizer can make a text; None if unknown."""
    match normalizer:
        case None:
            return 1
        case {"type": "Sequence", "normalizers": steps}:
            factors = [_shrinking(step) for step in steps]
            known = [factor for factor in factors if factor is not None]
            return max(known, default=1) if len(known) == len(factors) and sum(f > 1 for f in known) <= 1 else None
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if len(content) >= len(pattern):
            return 1
        case {"type": kind}:
            return _SHRINKING.get(kind)
    return None


def _keeps_all(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether a pre-tokenizer only cuts the text, without dropping any of it."""
    match pre_tokenizer:
        case None | {"type": "ByteLevel" | "Digits" | "Metaspace"}:
            return True
        case {"type": "Split", "behavior": str(behavior)}:
            return behavior != "Removed"
        case {"type": "Sequence", "pretokenizers": steps}:
            return all(map(_keeps_all, steps))
    return False


def load_eos_ids(path: Path) -> tuple[int, ...]:
    """Read the end-of-sequence ids of the checkpoint in directory ``path``; empty if it names none.

    From ``generation_config.json`` (chat models list several there), else ``config.json``, else the tokenizer. Raises
    `ModelLoadError` for a file that is no JSON object, or ids that are neither an integer nor a list of them.
    """
    for name in ("generation_config.json", "config.json"):
        value = _read(path / name).get("eos_token_id")
        if value is not None:
            return _ids(value, path / name)
    return _tokenizer_eos(path)


def _ids(value: object, file: Path) -> tuple[int, ...]:
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        raise ModelLoadError(f"{file}: eos_token_id must be an integer or a list of integers, got {value!r}")
    return tuple(items)


def _tokenizer_eos(path: Path) -> tuple[int, ...]:
    token = _read(path / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = _read(path / "tokenizer.json").get("added_tokens", [])
    return tuple(entry["id"] for entry in added if entry["content"] == text)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{file} is not valid JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} must hold a JSON object, got {type(content).__name__}; download it again")
    return content


_PROBE = "🦊"  # a character of four bytes, to test whether byte tokens are decoded as bytes


def find_byte_tokens(backend: Any) -> dict[int, int]:
    """Map token id → byte above ASCII, for tokenizers with byte fallback; empty for others."""
    values = range(0x80, 0x100)
    ids = backend.convert_tokens_to_ids([f"<0x{value:02X}>" for value in values])
    tokens = dict(zip(ids, values, strict=True))
    if None in tokens or len(tokens) < len(values):
        return {}
    by_value = {value: token_id for token_id, value in tokens.items()}
    spelled: str = backend.decode([by_value[value] for value in _PROBE.encode()])
    return tokens if spelled.strip() == _PROBE else {}
