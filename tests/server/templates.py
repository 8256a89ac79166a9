"""Chat templates that describe tools, as short as they can be, in the manner of two families of models."""

from __future__ import annotations

QWEN = (
    "{% if tools %}<|im_start|>system <tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    " answer <tool_call>...</tool_call><|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
LLAMA3 = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
    "{% endfor %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
)


def _turns(turn: str, start: str = "", end: str = "") -> str:
    prompt = f"{{% if add_generation_prompt %}}{end}{{% endif %}}"
    return f"{start}{{% for m in messages %}}{turn}{{% endfor %}}{prompt}"


# How families of models write messages, as short as can be: a template, its special tokens, and its added tokens that
# are not special.
FAMILIES: dict[str, tuple[str, list[str], list[str]]] = {
    "Qwen, SmolLM": (
        QWEN,
        ["<|im_start|>", "<|im_end|>"],
        ["<tool_call>", "</tool_call>", "<tools>", "</tools>", "<think>", "</think>"],
    ),
    "Llama 3": (LLAMA3, ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], []),
    "Mistral": (
        _turns(
            "{% if m.role == 'assistant' %}{{ m.content }}</s>{% else %}[INST]{{ m.content }}[/INST]{% endif %}", "<s>"
        ),
        ["[INST]", "[/INST]"],
        [],
    ),
    "Gemma": (
        _turns(
            "{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
            "<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n",
            "<bos>",
            "<start_of_turn>model\n",
        ),
        ["<bos>", "<start_of_turn>", "<end_of_turn>"],
        ["\n", "\n\n", "<h1>"],
    ),
    "Phi": (
        _turns("<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>", end="<|im_start|>assistant<|im_sep|>"),
        ["<|im_start|>", "<|im_sep|>", "<|im_end|>"],
        [],
    ),
    "DeepSeek": (
        _turns(
            "{% if m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}</s>"
            "{% else %}<｜User｜>{{ m.content }}{% endif %}",
            "<s>",
            "<｜Assistant｜><think>\n",
        ),
        [],
        ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"],
    ),
    "GLM": (
        _turns("<|{{ m.role }}|>\n{{ m.content }}", "[gMASK]<sop>", "<|assistant|>"),
        ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        [],
    ),
    "Granite": (
        _turns("<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n"),
        ["<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"],
        ["<|tool_call|>"],
    ),
    "gpt-oss": (
        _turns("<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>", end="<|start|>assistant"),
        ["<|start|>", "<|message|>", "<|end|>", "<|channel|>"],
        [],
    ),
    # Of these two, only what begins a text and ends an answer is a token: the marks of roles are plain letters.
    "OLMo": (
        _turns(
            "<|{{ m.role }}|>\n{{ m.content }}{% if m.role == 'assistant' %}<|endoftext|>{% endif %}{{ '\n' }}",
            "<|endoftext|>",
            "<|assistant|>\n",
        ),
        ["<|endoftext|>"],
        [],
    ),
    "Llama 2": (
        _turns(
            "{% if m.role == 'assistant' %} {{ m.content | trim }} </s>"
            "{% elif m.role == 'system' %}<<SYS>>\n{{ m.content }}\n<</SYS>>\n\n"
            "{% else %}<s>[INST] {{ m.content | trim }} [/INST]{% endif %}"
        ),
        ["<s>", "</s>"],
        [],
    ),
}
