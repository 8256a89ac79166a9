"""``python -m minisgl.bench``: every number in the book comes from one of these commands."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console

from minisgl.bench.all_reduce import run_all_reduce
from minisgl.bench.attention import run_attention
from minisgl.bench.attention_steps import run_attention_steps
from minisgl.bench.compare import run_compare
from minisgl.bench.cpu import CpuWorkload, run_cpu
from minisgl.bench.fp8 import run_fp8, run_fp8_error
from minisgl.bench.host import HostWorkload, run_host
from minisgl.bench.offline import run_offline
from minisgl.bench.overlap import OverlapWorkload, run_overlap
from minisgl.bench.preemption import run_preemption
from minisgl.bench.profile import run_profile
from minisgl.bench.report import Report
from minisgl.bench.serve.command import add_commands
from minisgl.bench.shapes import FOR_ONE_GPU
from minisgl.bench.tp import Case, run_cases
from minisgl.bench.workloads import WORKLOADS

RESULTS = Path("benchmarks", "results")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark that the command line names, print its tables and write its JSON file."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    load_average = psutil.getloadavg()[0]
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    console = Console()
    report: Report = options.run(options)
    report.show(console)
    path = options.output or RESULTS / f"{options.benchmark}.json"
    report.write(path, f"python -m minisgl.bench {shlex.join(arguments)}", load_average)
    console.print(f"written to {path}", soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m minisgl.bench", description=__doc__)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    common = argparse.ArgumentParser(add_help=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    common.add_argument("--threads", type=int, help="threads of PyTorch; by default one a core")
    common.add_argument("--output", type=Path, help="JSON file; by default benchmarks/results/<benchmark>.json")

    def command(name: str, summary: str) -> argparse.ArgumentParser:
        style = argparse.ArgumentDefaultsHelpFormatter
        return commands.add_parser(name, parents=[common], help=summary, description=summary, formatter_class=style)

    batch, load = CpuWorkload(), HostWorkload()
    cpu = command("cpu", "this engine against transformers' generate, both in float32 on this machine's CPU")
    cpu.add_argument("--model", default="default", help="default, a directory, or a hub id")
    cpu.add_argument("--repeat", type=int, default=3, help="runs of each engine, of which the median counts")
    cpu.add_argument("--requests", type=int, default=batch.requests, help="requests of the batch")
    cpu.add_argument("--input-len", type=int, default=batch.input_len, help="prompt tokens a request")
    cpu.add_argument("--output-len", type=int, default=batch.output_len, help="generated tokens a request")
    cpu.add_argument("--prefix-len", type=int, default=batch.prefix_len, help="tokens of the cached prefix")
    cpu.set_defaults(run=_cpu)

    host = command("host", "host time of the scheduler, with a model that computes nothing")
    host.add_argument("--running", type=int, nargs="+", default=load.running, help="numbers of running requests")
    host.add_argument("--steps", type=int, default=load.steps, help="decode steps that are timed")
    host.add_argument("--prefix-len", type=int, default=load.prefix_len, help="tokens of the shared prefix")
    host.add_argument("--page-size", type=int, default=load.page_size, help="tokens a page")
    host.set_defaults(run=_host)

    kernels = command("kernels", "the fused GPU kernels against memory speed, plain PyTorch and torch.compile")
    kernels.add_argument("--tokens", type=int, nargs="+", default=(1, 256, 8192), help="numbers of tokens a step")
    kernels.add_argument("--repeat", type=int, default=3, help="measurements of each, of which the fastest counts")
    kernels.set_defaults(run=_kernels)

    batch_one = command("batch-one", "one request alone: where each millisecond of a token goes")
    batch_one.add_argument("--model", default="Qwen3-0.6B", help="a shape, a directory, or a hub id")
    batch_one.add_argument("--lengths", type=int, nargs="+", default=(1, 640, 2000), help="two or more, of the row")
    batch_one.add_argument("--repeat", type=int, default=5, help="measurements of each, of which the median counts")
    batch_one.set_defaults(run=_batch_one)

    reduce = command(
        "all-reduce", "sums over the GPUs of one host: NCCL and peer memory, alone and with the norm after"
    )
    reduce.add_argument("--ranks", type=int, nargs="+", default=(2, 4), help="numbers of GPUs")
    reduce.set_defaults(run=lambda options: run_all_reduce(options.ranks))

    attention = command("attention", "attention alone: every backend on the same decode and prefill steps")
    attention.add_argument("--backend", nargs="*", default=[], help="names; all that can run here if there are none")
    attention.add_argument("--repeat", type=int, default=3, help="measurements of each, of which the fastest counts")
    attention.set_defaults(run=_attention)

    ideas = command("attention-steps", "decode attention from a program a head to equal shares: what each idea buys")
    ideas.add_argument("--repeat", type=int, default=3, help="measurements of each, of which the fastest counts")
    ideas.set_defaults(run=_attention_steps)

    offline = command("offline", "whole workloads on one device, by default on random weights in public shapes")
    offline.add_argument("--model", nargs="+", default=FOR_ONE_GPU, help="shapes, directories, or hub ids")
    offline.add_argument("--start", action="store_true", help="also measure the time to the first token")
    offline.set_defaults(run=_offline)

    compare = command("compare", "the same workloads with one optimisation switched on after another")
    compare.add_argument("--model", default="Qwen3-0.6B", help="a shape, a directory, or a hub id")
    compare.set_defaults(run=_compare)
    profile = command("profile", "where the time of a workload goes, step by step and kernel by kernel")
    profile.add_argument("--model", default="Qwen3-0.6B", help="a shape, a directory, or a hub id")
    profile.add_argument("--work", default="mixed", choices=list(WORKLOADS), help="workload")
    profile.add_argument("--trace", type=Path, help="also write a trace for Perfetto or chrome://tracing to this file")
    profile.set_defaults(run=_profile)

    steps = OverlapWorkload()
    overlap = command("overlap", "decode steps with and without overlap, and with a host that is made slower")
    overlap.add_argument("--model", default="Qwen3-0.6B", help="a shape, a directory, or a hub id")
    overlap.add_argument("--rows", type=int, nargs="+", default=steps.rows, help="numbers of running requests")
    overlap.add_argument("--steps", type=int, default=steps.steps, help="decode steps that are timed")
    overlap.add_argument("--added", type=float, nargs="+", default=steps.added, help="ms added to the host's work")
    overlap.set_defaults(run=_overlap)

    preemption = command("preemption", "memory pressure: reservation and optimism; to compute again and to copy back")
    preemption.add_argument("--model", nargs="+", default=FOR_ONE_GPU, help="shapes; the first is put under pressure")
    preemption.add_argument("--pool-tokens", type=int, default=65536, help="tokens that the KV cache holds")
    preemption.add_argument("--requests", type=int, default=128, help="how many compete for it, 256 at most")
    preemption.add_argument("--lengths", type=int, nargs="+", default=(512, 2048, 8192), help="brought back, in tokens")
    preemption.set_defaults(run=_preemption)

    fp8 = command("fp8", "keys and values of eight bits: what they buy in memory and time")
    fp8.add_argument("--model", default="Qwen3-0.6B", help="a shape, a directory, or a hub id")
    fp8.add_argument("--work", default="mixed", choices=list(WORKLOADS), help="workload")
    fp8.add_argument("--repeat", type=int, default=1, help="runs of it, of which the median counts")
    fp8.set_defaults(run=lambda options: run_fp8(options.model, options.work, options.repeat))

    error = command("fp8-error", "keys and values of eight bits: what they cost in precision, on a text")
    error.add_argument("--model", default="default", help="default, a directory, or a hub id")
    error.add_argument("--text", type=Path, default=Path("chapters", "04-paged-kv.md"), help="file to read")
    error.add_argument("--tokens", type=int, default=2048, help="tokens of it")
    error.add_argument("--window", type=int, default=1024, help="tokens that are read in one go")
    error.set_defaults(run=lambda given: run_fp8_error(given.model, given.text, given.tokens, given.window))

    tp = command("tp", "tensor parallelism: the same workloads over more ranks, and the control planes")
    tp.add_argument("--model", nargs="+", default=["Qwen3-14B", "Qwen3-32B"], help="shapes, directories, or hub ids")
    tp.add_argument("--ranks", type=int, nargs="+", default=(1, 2, 4), help="numbers of ranks")
    of_a_run = "an engine of its own in place of --model and --ranks: model=M ranks=N, [repeat=N] [all_reduce=NAME]"
    tp.add_argument("--run", dest="runs", nargs="+", action="append", type=_option, metavar="NAME=VALUE", help=of_a_run)
    tp.add_argument("--planes", type=int, nargs="+", help="ranks told over control planes; by default, as many as run")
    tp.add_argument("--steps", type=int, default=300, help="steps that are sent over each control plane")
    tp.set_defaults(run=_tp)

    for each in (offline, compare, tp):
        choices = list(WORKLOADS)
        each.add_argument("--work", nargs="+", default=choices, choices=choices, help="workloads")
        each.add_argument("--repeat", type=int, default=3, help="runs of each, of which the median counts")
    summary = "options of minisgl.LLM, with values in JSON"
    for each in (batch_one, offline, profile, overlap, preemption, tp, *add_commands(command)):
        each.add_argument("--set", nargs="+", default=[], type=_option, metavar="NAME=VALUE", help=summary)
    return parser


def _cpu(options: argparse.Namespace) -> Report:
    workload = CpuWorkload(options.requests, options.input_len, options.output_len, options.prefix_len)
    return run_cpu(options.model, workload, options.repeat)


def _host(options: argparse.Namespace) -> Report:
    return run_host(HostWorkload(tuple(options.running), options.steps, options.prefix_len, options.page_size))


def _kernels(options: argparse.Namespace) -> Report:
    from minisgl.bench.kernels import run_kernels  # imports Triton, which not every platform has

    return run_kernels(tuple(options.tokens), options.repeat)


def _batch_one(options: argparse.Namespace) -> Report:
    from minisgl.bench.batch_one import run_batch_one  # imports Triton as well

    return run_batch_one(options.model, dict(options.set), options.lengths, options.repeat)


def _attention(options: argparse.Namespace) -> Report:
    return run_attention(options.backend, options.repeat)


def _attention_steps(options: argparse.Namespace) -> Report:
    return run_attention_steps(options.repeat)


def _offline(options: argparse.Namespace) -> Report:
    return run_offline(options.model, options.work, options.repeat, dict(options.set), options.start)


def _profile(options: argparse.Namespace) -> Report:
    return run_profile(options.model, options.work, dict(options.set), options.trace)


def _overlap(options: argparse.Namespace) -> Report:
    workload = OverlapWorkload(tuple(options.rows), options.steps, tuple(options.added))
    return run_overlap(options.model, workload, dict(options.set))


def _preemption(options: argparse.Namespace) -> Report:
    return run_preemption(options.model, options.pool_tokens, options.lengths, options.requests, dict(options.set))


def _tp(options: argparse.Namespace) -> Report:
    given = dict(options.set)
    how = {"repeat": options.repeat, "all_reduce": given.get("all_reduce", "auto")}
    runs = options.runs or [{"model": model, "ranks": size} for model in options.model for size in options.ranks]
    cases = [Case.of({**how, **dict(each)}) for each in runs]
    planes = options.planes or sorted({case.ranks for case in cases})
    return run_cases(cases, planes, options.work, options.steps, given)


def _compare(options: argparse.Namespace) -> Report:
    return run_compare(options.model, options.work, options.repeat)


def _option(text: str) -> tuple[str, Any]:
    """``name=value`` with a value in JSON; what is no JSON is a string."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


if __name__ == "__main__":
    main()
