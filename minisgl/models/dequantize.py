"""SmolLM2 out of a GGUF file, as the hub has it: safetensors, JSON configs, tokenizer, chat template."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def dequantize(gguf: Path, target: Path) -> None:
    """Write the model in ``gguf`` to the directory ``target``, its weights in bfloat16, as they were before.

    transformers unpacks the blocks and undoes the reordering of q and k rows that GGUF makes for its rotary embedding.
    """
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer = _tokenizer(gguf)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """SmolLM2's byte-level BPE (Sennrich et al. 2016) from the vocabulary and merges in the file.

    Built here and not by transformers, because GGUF only names the rule that splits digits ("smollm"): without the
    rule, spaces before a number become other tokens than the model was trained on.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    fields = {name: field.contents() for name, field in GGUFReader(gguf).fields.items()}
    words = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE({word: token_id for token_id, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(words, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(word, normalized=False, special=True) for word, kind in kinds if kind == TokenType.CONTROL]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=words[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=words[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=words[fields["tokenizer.ggml.padding_token_id"]],
        unk_token=words[fields["tokenizer.ggml.unknown_token_id"]],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        chat_template=fields["tokenizer.chat_template"],
    )
