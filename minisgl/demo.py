"""``python -m minisgl demo [MODEL]``: eight chat prompts in one continuous batch."""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from minisgl.llm import LLM
from minisgl.outputs import RequestOutput
from minisgl.sampling_params import SamplingParams

_NOTE = (
    "Read this note: 'The library will be closed on Friday because the heating is being repaired. It opens again on "
    "Monday at nine.'"
)
# All begin with the model's own system prompt, two of them with the same note as well.
QUESTIONS = (
    "What is the capital of France? Answer briefly.",
    "What does a compiler do? Answer in one sentence.",
    f"{_NOTE} Summarise it in one sentence.",
    f"{_NOTE} Rewrite it as a short, friendly message.",
    "How many legs does a spider have? Answer briefly.",
    "What is water made of? Answer in one sentence.",
    "Give me one tip for learning a new language. Answer in one sentence.",
    "What is photosynthesis? Answer in one sentence.",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Load a chat model, answer all questions together, and show where each request's time went."""
    parser = argparse.ArgumentParser("python -m minisgl demo", description="Answer eight prompts in one batch.")
    parser.add_argument("model", nargs="?", default="default", help="a directory or a hub id. Default: default.")
    console = Console(highlight=False)
    model = parser.parse_args(argv).model
    started = time.perf_counter()
    llm = LLM(model)
    console.print(f"model loaded in {time.perf_counter() - started:.1f} s")

    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(max_tokens=64, temperature=0.0)
    started = time.perf_counter()
    outputs = llm.chat(conversations, params, progress=sys.stderr.isatty())
    elapsed = time.perf_counter() - started
    assert isinstance(outputs, list)

    for number, (question, output) in enumerate(zip(QUESTIONS, outputs, strict=True), 1):
        console.print(f"\n[bold]{number}. {_filled(question, console.width)}[/]")
        console.print("   " + _filled(output.text.strip(), console.width), markup=False)
    console.print()
    console.print(_table(outputs))
    generated = sum(len(output.token_ids) for output in outputs)
    console.print(f"{generated} tokens in {elapsed:.1f} s: {generated / elapsed:.0f} tokens/s over all requests")


def _filled(text: str, width: int) -> str:
    return textwrap.fill(text, width - 1, initial_indent="   ", subsequent_indent="   ").strip()


def _table(outputs: Sequence[RequestOutput]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, caption="Cached prompt tokens were computed for another request.")
    for heading in ("request", "prompt\ntokens", "cached\ntokens", "output\ntokens", "first token\ns", "tokens/s"):
        table.add_column(heading, justify="right")
    for number, output in enumerate(outputs, 1):
        metrics, count = output.metrics, len(output.token_ids)
        table.add_row(
            str(number),
            str(len(output.prompt_token_ids)),
            str(output.cached_tokens),
            str(count),
            f"{metrics.ttft:.2f}",
            f"{count / metrics.latency:.1f}",
        )
    return table


if __name__ == "__main__":
    main()
