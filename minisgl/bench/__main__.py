"""``python -m minisgl.bench cpu`` and ``python -m minisgl.bench host``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from rich.console import Console

from minisgl.bench.cpu import CpuWorkload, run_cpu
from minisgl.bench.host import HostWorkload, run_host


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark that the command line names, print its tables and write its JSON file."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    load_average = psutil.getloadavg()[0]
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    console = Console()
    if options.benchmark == "cpu":
        workload = CpuWorkload(options.requests, options.input_len, options.output_len, options.prefix_len)
        report = run_cpu(options.model, workload, options.repeat)
    else:
        report = run_host(HostWorkload(tuple(options.running), options.steps, options.prefix_len, options.page_size))
    report.show(console)
    path = options.output or Path("benchmarks", "results", f"{options.benchmark}.json")
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

    host = command("host", "host time of the scheduler, with a model that computes nothing")
    host.add_argument("--running", type=int, nargs="+", default=load.running, help="numbers of running requests")
    host.add_argument("--steps", type=int, default=load.steps, help="decode steps that are timed")
    host.add_argument("--prefix-len", type=int, default=load.prefix_len, help="tokens of the shared prefix")
    host.add_argument("--page-size", type=int, default=load.page_size, help="tokens a page")
    return parser


if __name__ == "__main__":
    main()
