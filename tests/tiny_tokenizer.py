"""Two tiny tokenizers of the kinds that models use: byte-level BPE (GPT-2 on) and BPE with byte fallback (Llama 2)."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from minisgl.tokenizer import Tokenizer

LINES = [
    "the quick brown fox jumps over the lazy dog",
    "the cat and the dog, 12 of them",
    "你好 世界 你好",
    "naïve café",
]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def save(raw: RawTokenizer, directory: Path, template: str | None = TEMPLATE) -> Path:
    """Write ``raw`` as a checkpoint's tokenizer. It adds a BOS to a text, as Llama's does, and so does the template."""
    bos = raw.token_to_id("<s>")
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", chat_template=template
    ).save_pretrained(directory)
    return directory


def byte_level() -> RawTokenizer:
    raw = RawTokenizer(BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return raw


def byte_fallback() -> RawTokenizer:
    words = ["▁", "▁the", "▁dog", "t", "h", "e", "d", "o", "g", "你", "好", ",", "th", "the", "do", "dog"]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("d", "o"), ("do", "g"), ("▁", "dog")]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    raw = RawTokenizer(BPE(vocab, merges, unk_token="<s>", fuse_unk=True, byte_fallback=True))
    raw.add_special_tokens(SPECIAL)
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return raw


KINDS = {"byte-level": byte_level, "byte-fallback": byte_fallback}


@functools.cache
def tiny_tokenizer(kind: str) -> Tokenizer:
    """The tokenizer of ``kind``, through the same files and the same class as a real one."""
    with tempfile.TemporaryDirectory() as directory:
        return Tokenizer(save(KINDS[kind](), Path(directory)))
