"""``python -m minisgl.bench``: every number in the book comes from one of these commands."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import psutil
import torch
from rich.console import Console

from minisgl.bench.report import Report
from minisgl.bench.workloads import WORKLOADS
from minisgl.errors import ConfigError, MiniSGLError
from minisgl.registry import import_path

COMMANDS = {
    "cpu": ("workloads:run_cpu", "this engine against transformers' generate, both in float32 on this machine's CPU"),
    "host": ("host:run_host", "host time of the scheduler, with a model that computes nothing"),
    "kernels": ("kernels:run_kernels", "the fused GPU kernels against memory speed, plain PyTorch and torch.compile"),
    "batch-one": ("batch_one:run_batch_one", "one request alone: where each millisecond of a token goes"),
    "all-reduce": ("tensor_parallel:run_all_reduce", "all-reduces between GPUs, by NCCL and over peer memory"),
    "attention": ("attention:run_attention", "attention alone: every backend on the same decode and prefill steps"),
    "attention-steps": ("attention:run_attention_steps", "decode attention: what each idea behind its kernel buys"),
    "offline": ("workloads:run_offline", "whole workloads on one device, by default with random weights"),
    "compare": ("workloads:run_compare", "the same workloads with one optimisation switched on after another"),
    "scoreboard": ("workloads:run_scoreboard", "tokens a second after each chapter of the book, from a naive loop on"),
    "profile": ("batch_one:run_profile", "where the time of a workload goes, step by step and kernel by kernel"),
    "overlap": ("host:run_overlap", "decode steps with and without overlap, and with a host that is made slower"),
    "preemption": ("preemption:run_preemption", "memory pressure: reserving or not, recomputing or copying"),
    "page-store": ("preemption:run_page_store", "a conversation that returns: computed again, or from host memory"),
    "simulate": ("planning:run_simulation", "fleets of simulated engines behind a router, and two real ones"),
    "apart": ("apart:run_apart", "one engine prefills and one decodes, against two that do both"),
    "speculative": ("speculative:run_speculative", "drafts that are right with a given probability, and prompt lookup"),
    "fp8": ("attention:run_fp8", "keys and values of eight bits: what they buy in memory and time"),
    "fp8-error": (
        "quantization:run_fp8_error",
        "keys and values of eight bits: what they cost, on a text",
    ),
    "quantization": ("quantization:run_quantization", "quantised weights: what they buy in time and memory"),
    "quantization-error": ("quantization:run_quantization_error", "quantised weights: what they cost, on a text"),
    "tp": ("tensor_parallel:run_tp", "tensor parallelism: the same workloads over more ranks, and the control planes"),
    "serve": ("serving:run_serve", "a server under load: latency, throughput, goodput, and what is left behind"),
    "faults": ("processes:run_faults", "kill each process of a server under load: what happens to each request"),
    "api": ("processes:run_overhead", "what the server adds to the engine's time for a token batch"),
}
"""By command: the function whose parameters are its options, and a line about it."""
HELP = {
    "added": "ms added to the host's work",
    "arrivals": "poisson, constant, or trace FILE (Mooncake's or Qwen's format)",
    "backend": "names; all that can run here if there are none",
    "concurrency": "closed loop: users, a run for each number; by default 16",
    "check": "real-time, or models of two engines: what two simulated replicas are compared with",
    "chances": "probabilities that a draft is right",
    "costs": "numbers of drafts: what a step costs that verifies so many of each request",
    "devices": "of the two engines",
    "disconnects": "share of clients that leave before the end",
    "dollars": "price of a replica an hour",
    "draft_tokens": "tokens to draft for a request in a step",
    "edit": "prompt lookup on an edit-this-text task instead, with a model that can do it",
    "input_len": "tokens in: one number, or for a server the least and the most",
    "lengths": "of sequences, in tokens",
    "load": "requests a second for each replica",
    "malformed": "share of requests with a body that is wrong",
    "model": "a shape (with random weights), a directory, a hub id, or default; for a server also tiny",
    "output_len": "tokens out: one number, or for a server the least and the most",
    "page_size": "tokens a page",
    "pool_tokens": "tokens that the KV cache holds",
    "prefix_len": "tokens of the cached prefix",
    "ranks": "numbers of GPUs",
    "rate": "open loop: requests a second, a run for each number",
    "replicas": "numbers of engines in a fleet",
    "repeat": "measurements of each: the median counts, of single kernels the fastest",
    "requests": "how many; for a server by default 100, or all of a trace",
    "rows": "numbers of running requests",
    "running": "numbers of running requests",
    "seconds": "that a trace lasts, at most",
    "seed": "of lengths, arrivals, faults and prompts",
    "set": "options of minisgl.llm.LLM, with values in JSON",
    "schemes": "values of the option quantization to measure; none among them is what the others are compared with",
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
    "work": "workload, or workloads",
}


def _name_and_value(text: str) -> tuple[str, Any]:
    """``name=value`` with a value in JSON; a value that is no JSON is a string."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


_FLAGS = {"backends": "backend", "models": "model", "options": "set", "workloads": "work"}
_PARSING: dict[str, dict[str, Any]] = {
    "arrivals": {"metavar": ("KIND", "FILE")},
    "backends": {"nargs": "*"},
    "check": {"nargs": "*"},
    "work": {"choices": tuple(WORKLOADS)},
    "workloads": {"choices": tuple(WORKLOADS)},
}
"""Beyond what the type of a parameter says."""
_COUNTS = (
    "concurrency", "lengths", "output_len", "page_size", "pool_tokens", "ranks", "repeat", "replicas", "requests",
    "rows", "running", "steps", "streams", "threads", "tokens", "users",
)  # fmt: skip
"""Parameters of which there must be one at least."""


def _parsing(hint: Any) -> dict[str, Any]:
    """How argparse reads a parameter of this type, which may be None."""
    if isinstance(hint, UnionType):
        hint = get_args(hint)[0]
    element, *_ = get_args(hint) or (None,)
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) is Mapping:
        return {"nargs": "+", "type": _name_and_value, "metavar": "NAME=VALUE"}
    return {"type": hint} if element is None else {"nargs": "+", "type": element}


def _check_counts(given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an option without which there is nothing to measure."""
    for name in _COUNTS:
        value = given.get(name)
        counts = value if isinstance(value, Sequence) else () if value is None else (value,)
        if any(count < 1 for count in counts):
            raise ConfigError(f"{_FLAGS.get(name, name)}: must be positive, got {min(counts)}")


def benchmark_function(command: str) -> Callable[..., Report]:
    """Import the function behind a command."""
    function: Callable[..., Report] = import_path("command", f"minisgl.bench.{COMMANDS[command][0]}")
    return function


def build_parser(chosen: str) -> argparse.ArgumentParser:
    """The parser of all `COMMANDS`, with the options of the ``chosen`` one: no other module is imported."""
    parser = argparse.ArgumentParser(prog="python -m minisgl.bench", description=__doc__)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    style = argparse.ArgumentDefaultsHelpFormatter
    for command, (_, summary) in COMMANDS.items():
        added = commands.add_parser(command, help=summary, description=summary, formatter_class=style)
        if command != chosen:
            continue
        function = benchmark_function(command)
        added.add_argument("--threads", type=int, help="threads of PyTorch; by default one a core")
        added.add_argument("--output", type=Path, help="JSON file; by default benchmarks/results/<benchmark>.json")
        parameters, hints = signature(function).parameters, get_type_hints(function)
        # Only where there is something to choose: help texts of Python 3.11 cannot show a group without options.
        either = added.add_mutually_exclusive_group() if "concurrency" in parameters else added
        for name, parameter in parameters.items():
            more = {**_parsing(hints[name]), **_PARSING.get(name, {}), "default": parameter.default}
            flag = _FLAGS.get(name, name)
            group = either if name in ("rate", "concurrency") else added
            group.add_argument("--" + flag.replace("_", "-"), dest=name, help=HELP[flag], **more)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark that the command line names, print its tables and write its JSON file."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = build_parser(arguments[0] if arguments else "")
    given = vars(parser.parse_args(arguments))
    benchmark, threads, output = (given.pop(name) for name in ("benchmark", "threads", "output"))
    load_average = psutil.getloadavg()[0]
    if "options" in given:
        given["options"] = dict(given["options"])
    try:
        _check_counts({**given, "threads": threads})
        if threads is not None:
            torch.set_num_threads(threads)
        report = benchmark_function(benchmark)(**given)
    except MiniSGLError as error:
        parser.error(f"{benchmark}: {error}")
    console = Console()
    report.show(console)
    path = output or Path("benchmarks", "results", f"{benchmark}.json")
    report.settings = {**given, **report.settings}
    report.write(path, f"python -m minisgl.bench {shlex.join(arguments)}", load_average)
    console.print(f"written to {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
