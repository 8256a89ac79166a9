"""``python -m tools.try_clients PYTHON``: other programs' clients against a served tiny model.

PYTHON is the interpreter of an environment with ``openai``, ``litellm``, ``llm`` and ``langchain-openai``, which want
other versions of what this project is tested with: ``python -m venv clients && clients/bin/pip install ...``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import fields
from pathlib import Path

from minisgl.sampling_params import SamplingParams
from tests.server.harness import RunningServer, chat_checkpoint
from tests.server.templates import QWEN
from tests.tiny_text_model import Scripted

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


def main(python: str) -> int:
    """Returns the exit code of the trials: 0 if every client could do everything."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = chat_checkpoint(Path(directory), QWEN)
        with RunningServer(checkpoint, num_pages=512) as texts, RunningServer(checkpoint, num_pages=512) as calls:
            say(calls, CALL)
            forms = "yes" if "json_schema" in {field.name for field in fields(SamplingParams)} else "no"
            trials = Path(__file__).with_name("client_trials.py")
            return subprocess.run(
                [python, str(trials), texts.url, calls.url, texts.model, forms], check=False
            ).returncode


def say(server: RunningServer, text: str) -> None:
    """Let a server's model answer everything with ``text``."""
    tokenizer = server.core.tokenizer
    _, *tokens = tokenizer.encode(text)  # the first one is BOS
    server.core.executor.launcher = Scripted([*tokens, *tokenizer.eos_ids[:1]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
