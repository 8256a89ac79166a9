"""``python -m minisgl.bench``: every number in the book comes from one of these commands."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console

from minisgl.bench.load import LoadError
from minisgl.bench.report import Report
from minisgl.bench.server import VOCAB_SIZE, ServerFailed
from minisgl.bench.workloads import FOR_ONE_GPU, WORKLOADS

RESULTS = Path("benchmarks", "results")
_CHAPTER = Path("chapters", "04-paged-kv.md")
_NAMES = list(WORKLOADS)
_MS = (0.0, 0.5, 1.0, 2.0, 4.0, 16.0)
_SERVER = {"model": "tiny", "start_timeout": 600.0, "options": []}

# By command: "module:function", a line about it, and its options: the function's keywords with their defaults.
COMMANDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "cpu": (
        "cpu:run_cpu",
        "this engine against transformers' generate, both in float32 on this machine's CPU",
        {"model": "default", "repeat": 3, "requests": 16, "input_len": 128, "output_len": 64, "prefix_len": 1000},
    ),
    "host": (
        "host:run_host",
        "host time of the scheduler, with a model that computes nothing",
        {"running": (256, 512, 1024, 2048), "steps": 300, "prefix_len": 2048, "page_size": 16},
    ),
    "kernels": (
        "kernels:run_kernels",
        "the fused GPU kernels against memory speed, plain PyTorch and torch.compile",
        {"tokens": (1, 256, 8192), "repeat": 3},
    ),
    "batch-one": (
        "batch_one:run_batch_one",
        "one request alone: where each millisecond of a token goes",
        {"model": "Qwen3-0.6B", "lengths": (1, 640, 2000), "repeat": 5, "options": []},
    ),
    "all-reduce": (
        "tensor_parallel:run_all_reduce",
        "sums over the GPUs of one host: NCCL and peer memory, alone and with the norm after",
        {"ranks": (2, 4)},
    ),
    "attention": (
        "attention:run_attention",
        "attention alone: every backend on the same decode and prefill steps",
        {"backends": (), "repeat": 3},
    ),
    "attention-steps": (
        "attention:run_attention_steps",
        "decode attention from a program a head to equal shares: what each idea buys",
        {"repeat": 3},
    ),
    "offline": (
        "offline:run_offline",
        "whole workloads on one device, by default on random weights in public shapes",
        {"models": FOR_ONE_GPU, "start": False, "workloads": _NAMES, "repeat": 3, "options": []},
    ),
    "compare": (
        "offline:run_compare",
        "the same workloads with one optimisation switched on after another",
        {"model": "Qwen3-0.6B", "workloads": _NAMES, "repeat": 3},
    ),
    "profile": (
        "offline:run_profile",
        "where the time of a workload goes, step by step and kernel by kernel",
        {"model": "Qwen3-0.6B", "work": "mixed", "trace": None, "options": []},
    ),
    "overlap": (
        "overlap:run_overlap",
        "decode steps with and without overlap, and with a host that is made slower",
        {"model": "Qwen3-0.6B", "rows": (16, 256), "steps": 100, "added": _MS, "options": []},
    ),
    "preemption": (
        "preemption:run_preemption",
        "memory pressure, on the first model: reservation and optimism; to compute again and to copy back",
        {"models": FOR_ONE_GPU, "pool_tokens": 65536, "requests": 128, "lengths": (512, 2048, 8192), "options": []},
    ),
    "fp8": (
        "fp8:run_fp8",
        "keys and values of eight bits: what they buy in memory and time",
        {"model": "Qwen3-0.6B", "work": "mixed", "repeat": 1},
    ),
    "fp8-error": (
        "fp8:run_fp8_error",
        "keys and values of eight bits: what they cost in precision, on a text",
        {"model": "default", "text": _CHAPTER, "tokens": 2048, "window": 1024},
    ),
    "tp": (
        "tensor_parallel:run_tp",
        "tensor parallelism: the same workloads over more ranks, and the control planes",
        {"models": ["Qwen3-14B", "Qwen3-32B"], "ranks": (1, 2, 4), "runs": None, "planes": None, "steps": 300}
        | {"workloads": _NAMES, "repeat": 3, "options": []},
    ),
    "serve": (
        "serving:run_serve",
        "a server under load: latency, throughput, goodput, and what is left behind",
        {"url": None, "vocab_size": VOCAB_SIZE, "rate": None, "concurrency": None, "arrivals": ["poisson"]}
        | {"requests": None, "input_len": [128, 128], "output_len": [64, 64], "disconnects": 0.0, "malformed": 0.0}
        | {"ttft_limit": 1.0, "tpot_limit": 0.05, "timeout": 300.0, "seed": 0, **_SERVER},
    ),
    "faults": (
        "faults:run_faults",
        "kill each process of a server under load: what happens to each request",
        {"users": 32, "output_len": 1000, **_SERVER},
    ),
    "api": (
        "overhead:run_overhead",
        "what the server adds to the engine's time for a token batch",
        {"streams": (256, 1024), "output_len": 128, "repeat": 3, **_SERVER},
    ),
}
HELP = {
    "added": "ms added to the host's work",
    "arrivals": "poisson, constant, or trace FILE (Mooncake's or Qwen's format)",
    "backends": "names; all that can run here if there are none",
    "concurrency": "closed loop: users, a run for each number; by default 16",
    "disconnects": "share of clients that leave before the end",
    "input_len": "tokens in: one number, or for a server the least and the most",
    "lengths": "of sequences, in tokens",
    "malformed": "share of requests with a body that is wrong",
    "model": "a shape (with random weights), a directory, a hub id, or default; for a server also tiny",
    "models": "shapes (with random weights), directories, or hub ids",
    "options": "options of minisgl.llm.LLM, with values in JSON",
    "output_len": "tokens out: one number, or for a server the least and the most",
    "page_size": "tokens a page",
    "planes": "ranks told over control planes; by default, as many as run",
    "pool_tokens": "tokens that the KV cache holds",
    "prefix_len": "tokens of the cached prefix",
    "ranks": "numbers of GPUs",
    "rate": "open loop: requests a second, a run for each number",
    "repeat": "measurements of each: the median counts, of single kernels the fastest",
    "requests": "how many; for a server by default 100, or all of a trace",
    "rows": "numbers of running requests",
    "running": "numbers of running requests",
    "runs": "an engine of its own in place of --model and --ranks: model=M ranks=N, [repeat=N] [all_reduce=NAME]",
    "seed": "of lengths, arrivals, faults and prompts",
    "start": "also measure the time to the first token",
    "start_timeout": "seconds that a server has to start",
    "steps": "steps that are timed",
    "streams": "numbers of requests at a time",
    "text": "file to read",
    "timeout": "s after which a client gives up",
    "tokens": "tokens of a step, or of the text",
    "tpot_limit": "s a token after the first, for goodput",
    "trace": "also write a trace for Perfetto or chrome://tracing to this file",
    "ttft_limit": "s to the first token, for goodput",
    "url": "http://HOST:PORT of a server that runs already; without it one is started",
    "users": "requests in flight when a process is killed",
    "vocab_size": "of the model at --url, at most",
    "window": "tokens that are read in one go",
    "work": "workload",
    "workloads": "workloads",
}


def _name_and_value(text: str) -> tuple[str, Any]:
    """``name=value`` with a value in JSON; a value that is no JSON is a string."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


_FLAGS = {"backends": "backend", "models": "model", "options": "set", "runs": "run", "workloads": "work"}
_PAIRS: dict[str, Any] = {"nargs": "+", "type": _name_and_value, "metavar": "NAME=VALUE"}
_PARSING: dict[str, dict[str, Any]] = {
    "arrivals": {"metavar": ("KIND", "FILE")},
    "backends": {"nargs": "*"},
    "concurrency": {"nargs": "+", "type": int},
    "options": _PAIRS,
    "planes": {"nargs": "+", "type": int},
    "rate": {"nargs": "+", "type": float},
    "requests": {"type": int},
    "runs": {"action": "append", **_PAIRS},
    "start": {"action": "store_true"},
    "text": {"type": Path},
    "trace": {"type": Path},
    "work": {"choices": _NAMES},
    "workloads": {"choices": _NAMES},
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of all `COMMANDS`. The type of an option follows from its default, or is in ``_PARSING``."""
    parser = argparse.ArgumentParser(prog="python -m minisgl.bench", description=__doc__)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    style = argparse.ArgumentDefaultsHelpFormatter
    for command, (_, summary, options) in COMMANDS.items():
        added = commands.add_parser(command, help=summary, description=summary, formatter_class=style)
        added.add_argument("--threads", type=int, help="threads of PyTorch; by default one a core")
        added.add_argument("--output", type=Path, help="JSON file; by default benchmarks/results/<benchmark>.json")
        # Only where there is something to choose: help texts of Python 3.11 cannot show a group without options.
        either = added.add_mutually_exclusive_group() if "concurrency" in options else added
        for name, default in options.items():
            more: dict[str, Any] = {"dest": name, "help": HELP[name], "default": default}
            if isinstance(default, (list, tuple)):
                more |= {"nargs": "+", "type": type(default[0]) if default else str}
            elif type(default) in (int, float):
                more["type"] = type(default)
            flag = "--" + _FLAGS.get(name, name).replace("_", "-")
            (either if name in ("rate", "concurrency") else added).add_argument(flag, **more | _PARSING.get(name, {}))
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark that the command line names, print its tables and write its JSON file."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = build_parser()
    given = vars(parser.parse_args(arguments))
    benchmark, threads, output = (given.pop(name) for name in ("benchmark", "threads", "output"))
    load_average = psutil.getloadavg()[0]
    if threads is not None:
        torch.set_num_threads(threads)
    if "options" in given:
        given["options"] = dict(given["options"])
    if given.get("runs"):
        given["runs"] = [dict(pairs) for pairs in given["runs"]]
    module, _, function = COMMANDS[benchmark][0].partition(":")
    try:
        report: Report = getattr(import_module(f"minisgl.bench.{module}"), function)(**given)
    except (LoadError, ServerFailed) as error:
        parser.error(f"{benchmark}: {error}")
    console = Console()
    report.show(console)
    path = output or RESULTS / f"{benchmark}.json"
    report.write(path, f"python -m minisgl.bench {shlex.join(arguments)}", load_average)
    console.print(f"written to {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
