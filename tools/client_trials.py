"""What other programs' clients do with the server; run by `tools.try_clients` in an environment that has them.

Arguments: the URLs of two servers, of which the second one always answers with a call of ``weather``, their model's
name, and whether the engine can hold answers to a form (``yes`` or ``no``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

TEXT_URL, CALL_URL, MODEL, FORMS = sys.argv[1:]
HELLO = [{"role": "user", "content": "the quick brown fox"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
os.environ |= {"OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def try_openai() -> None:
    """The ``openai`` client: chat, stream, tools and their results, errors, forms."""
    import openai

    text, calls = (openai.OpenAI(base_url=f"{url}/v1", max_retries=0) for url in (TEXT_URL, CALL_URL))
    ask: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 8}
    assert text.chat.completions.create(**ask).usage.completion_tokens <= 8
    assert list(text.chat.completions.create(**ask, stream=True))[-1].choices[0].finish_reason
    first = calls.chat.completions.create(**{**ask, "tools": [WEATHER], "max_tokens": 100})
    call = first.choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    answer = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    again = [*HELLO, first.choices[0].message.model_dump(), answer]
    assert text.chat.completions.create(**{**ask, "messages": again}).choices
    _expect(openai.NotFoundError, lambda: text.chat.completions.create(**{**ask, "model": "gpt-5"}))
    _expect(openai.BadRequestError, lambda: text.chat.completions.create(**ask, temperature=-1))
    if FORMS == "yes":
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
        held = text.chat.completions.create(**{**ask, "max_tokens": 200}, response_format=form)
        assert held.choices[0].finish_reason == "length" or "ok" in json.loads(held.choices[0].message.content)


def try_litellm() -> None:
    """``litellm``: chat, stream with usage, tools, errors."""
    import litellm

    def ask(url: str, **fields: Any) -> Any:
        fields = {"model": f"openai/{MODEL}", "messages": HELLO, "max_tokens": 8, **fields}
        return litellm.completion(api_base=f"{url}/v1", **fields)

    assert ask(TEXT_URL).choices[0].finish_reason
    streamed = list(ask(TEXT_URL, stream=True, stream_options={"include_usage": True}))
    assert any(getattr(chunk, "usage", None) for chunk in streamed)
    call = ask(CALL_URL, tools=[WEATHER], max_tokens=100).choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    _expect(litellm.NotFoundError, lambda: ask(TEXT_URL, model="openai/gpt-unknown"))
    _expect(litellm.BadRequestError, lambda: ask(TEXT_URL, temperature=-1))


def try_langchain() -> None:
    """LangChain's ``ChatOpenAI``: chat, stream with usage, tools and their results, forms."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    def chat(url: str, **fields: Any) -> ChatOpenAI:
        return ChatOpenAI(model=MODEL, base_url=f"{url}/v1", max_retries=0, **{"max_tokens": 8, **fields})

    text, calls = chat(TEXT_URL), chat(CALL_URL, max_tokens=100)
    assert text.invoke("the quick brown fox").response_metadata["finish_reason"]
    assert any(chunk.usage_metadata for chunk in text.stream("the quick brown fox", stream_usage=True))
    first = calls.bind_tools([WEATHER]).invoke("how is the weather in Paris?")
    assert first.tool_calls[0]["args"] == {"city": "Paris"}
    streamed = list(calls.bind_tools([WEATHER]).stream("how is the weather in Paris?"))
    assert sum(streamed[1:], streamed[0]).tool_calls[0]["args"] == {"city": "Paris"}
    answer = ToolMessage("rain", tool_call_id=first.tool_calls[0]["id"])
    assert text.bind_tools([WEATHER]).invoke([HumanMessage("how is the weather?"), first, answer]).id
    if FORMS == "yes":
        form = {"title": "answer", "description": "whether it is so", **SCHEMA}
        for method in ("json_schema", "function_calling"):
            held = chat(TEXT_URL, max_tokens=200).with_structured_output(form, method=method, include_raw=True)
            assert held.invoke("is it so?")["raw"]


def try_llm() -> None:
    """The ``llm`` command with the server in its ``extra-openai-models.yaml``: stream and not."""
    with tempfile.TemporaryDirectory() as folder:
        entry = {"model_id": "tiny", "model_name": MODEL, "api_base": f"{TEXT_URL}/v1", "can_stream": True}
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps([entry]))
        for extra in ([], ["--no-stream"]):
            command = [
                sys.executable,
                "-m",
                "llm",
                "-m",
                "tiny",
                "-o",
                "max_tokens",
                "8",
                *extra,
                "the quick brown fox",
            ]
            environment = {**os.environ, "LLM_USER_PATH": folder}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
            assert done.returncode == 0, done.stderr


def _expect(kind: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"expected {kind.__name__}")


if __name__ == "__main__":
    trials = {"openai": try_openai, "litellm": try_litellm, "langchain-openai": try_langchain, "llm": try_llm}
    for name, trial in trials.items():
        trial()
        print(f"{name} {version(name)}: ok", flush=True)
