"""``PYTHON -m tools.lm_eval_trial``: lm-eval asks the default model a quiz, through the server and in Python.

PYTHON is the interpreter of an environment with this package and EleutherAI's ``lm-eval[api]`` 0.4.13, which brings
fifty packages that nothing else here needs. For each setting of the engine, both ways must give the same score. The
result is ``benchmarks/results/lm-eval.json``.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from minisgl import LLM, SamplingParams
from minisgl.bench.report import Report
from minisgl.models.hub import resolve_model

ROOT = Path(__file__).parent.parent
TASK, TASKS = "minisgl_quiz", ROOT / "benchmarks" / "lm_eval"
SETTINGS: dict[str, dict[str, str]] = {
    "float32": {"quantization": "none"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "fp8": {"quantization": "fp8"},
    "float32, KV in fp8": {"quantization": "none", "kv_dtype": "fp8"},
    "int8, KV in fp8": {"quantization": "int8", "kv_dtype": "fp8"},
    "bfloat16": {"quantization": "none", "dtype": "bfloat16"},
    "int4-zero-point": {"quantization": "int4-zero-point"},
}
_FORCING_BIAS = 100.0  # makes the engine choose a token; its log-probability is reported without the bias
_START_SECONDS = 300


def main() -> None:
    """Ask in every setting both ways, and write the table."""
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    os.chdir(TASKS)  # the task names its file by a relative path
    report = Report("lm-eval", {"task": TASK, "lm_eval": _version()})
    table = report.table("default, quiz of lm-eval", "weights", "right, served", "right, offline", "questions")
    for name, options in SETTINGS.items():
        served, count = _served(options)
        offline, _ = _offline(options)
        table.add(name, f"{served:.1%}", f"{offline:.1%}", count)
        print(name, served, offline, flush=True)
        # Batches differ, so sums do in their last bits; at most one question may be that close.
        assert abs(served - offline) <= 1.01 / count, name
        # Each time, because a run of all settings takes half an hour.
        results = ROOT / "benchmarks" / "results" / "lm-eval.json"
        report.write(results, "python -m tools.lm_eval_trial", psutil.getloadavg()[0])


def _version() -> str:
    from importlib.metadata import version

    return version("lm-eval")


def _evaluate(model: Any, arguments: dict[str, Any]) -> tuple[float, int]:
    """Share of right answers, and how many questions there were."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    found = simple_evaluate(model, model_args=arguments, tasks=[TASK], task_manager=manager, bootstrap_iters=0)
    return float(found["results"][TASK]["acc,none"]), int(found["n-samples"][TASK]["effective"])


def _served(options: dict[str, str]) -> tuple[float, int]:
    with _server(options) as url:
        tokenizer = str(resolve_model("default"))
        arguments = {"base_url": f"{url}/v1/completions", "model": "default", "tokenizer": tokenizer}
        return _evaluate("local-completions", {**arguments, "num_concurrent": 4, "max_retries": 1, "batch_size": 4})


@contextmanager
def _server(options: dict[str, str]) -> Iterator[str]:
    """The URL of a server that is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    command = [sys.executable, "-m", "minisgl.serve", "--model", "default", "--port", str(port), *flags]
    process = subprocess.Popen([*command, "--dtype", "float32"] if "dtype" not in options else command)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                break
            time.sleep(1.0)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _offline(options: dict[str, str]) -> tuple[float, int]:
    from lm_eval.api.model import TemplateLM

    class Offline(TemplateLM):  # type: ignore[misc]
        """An engine in this process. lm-eval hands over tokens of contexts and of their continuations."""

        def __init__(self, llm: LLM) -> None:
            super().__init__()
            self.llm = llm

        @property
        def eot_token_id(self) -> int:
            return int(self.llm.tokenizer.eos_ids[0])

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return self.llm.tokenizer.encode(string)

        def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            """For each continuation its log-probability, and whether each of its tokens is the likeliest."""
            prompts, forced = [], []
            for _, context, continuation in requests:
                for place, token in enumerate(continuation):
                    prompts.append(context + continuation[:place])
                    bias = {token: _FORCING_BIAS}
                    forced.append(SamplingParams(max_tokens=1, temperature=0.0, logit_bias=bias, logprobs=1))
            entries = iter([output.logprobs[0] for output in self.llm.generate(prompts, forced) if output.logprobs])
            scores = ([next(entries) for _ in continuation] for *_, continuation in requests)
            return [
                (sum(each.logprob for each in score), all(each.top[0][0] == each.token_id for each in score))
                for score in scores
            ]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            raise NotImplementedError

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            raise NotImplementedError

    with LLM("default", **{"dtype": "float32", "max_seq_len": 512, **options}) as llm:
        return _evaluate(Offline(llm), {})


if __name__ == "__main__":
    main()
