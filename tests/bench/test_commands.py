"""The commands from end to end, on sizes that take no time. Nothing that was timed is asserted."""

from __future__ import annotations

import inspect
import json
import operator
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from minisgl import demo
from minisgl.bench import preemption, workloads
from minisgl.bench.__main__ import COMMANDS, benchmark_function, build_parser, main
from minisgl.bench.host import _PHASES, HostTimes
from minisgl.bench.workloads import WORKLOADS, run_workload
from minisgl.llm import LLM
from minisgl.outputs import RequestOutput
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.loop import EngineLoop
from minisgl.scheduler.scheduler import StepOutput
from minisgl.trace import DEVICE, Trace, observed
from tests.model_zoo import tiny_checkpoint
from tests.tiny_tokenizer import byte_level, save


@pytest.fixture
def small_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same workloads with a few short requests."""

    for name, workload in WORKLOADS.items():
        shared = min(20, workload.shared)
        lengths = {"input_len": (40 - shared, 40 - shared), "output_len": (6, 6), "shared": shared}
        monkeypatch.setitem(WORKLOADS, name, workload._replace(num_requests=min(5, workload.num_requests), **lengths))


def bench(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "result.json"
    with patch.dict("os.environ", COLUMNS="200"):  # no cell is wrapped, however long the verdict beside it
        main([*arguments, "--threads", "1", "--output", str(path)])
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def test_the_scoreboard_measures_every_stage_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "CHATS", workloads.CHATS[:2])
    monkeypatch.setattr(workloads, "_COUNT", 2)
    record = bench(tmp_path, "scoreboard", "--repeat", "1")
    (speeds,) = record["tables"]
    assert speeds["title"] == "default, output tokens/s"
    assert [row[:2] for row in speeds["rows"]] == [
        [chapter, label] for chapter, label, _ in workloads.STAGES if chapter not in (10, 11, 12)
    ]
    assert all(least <= median <= most for *_, median, least, most in speeds["rows"])
    assert record["settings"]["chats"] == 2


def test_cpu_measures_both_engines_on_the_same_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    sizes = ["--requests", "3", "--input-len", "20", "--output-len", "5", "--prefix-len", "100", "--repeat", "2"]
    record = bench(tmp_path, "cpu", "--model", str(model), *sizes)

    assert record["benchmark"] == "cpu"
    assert record["command"].startswith("python -m minisgl.bench cpu --model ")
    assert record["settings"]["requests"] == 3
    assert record["hardware"]["threads"] == 1
    assert all(len(samples) == 2 and min(samples) > 0 for samples in record["samples"].values())
    throughput, first_token = record["tables"]
    assert [row[0] for row in throughput["rows"]] == [3, 1]
    assert [row[-1] for row in throughput["rows"]] == ["6 of 6", "2 of 2"]  # same weights, same greedy tokens
    assert first_token["columns"][-1] == "cached / uncached"
    assert len(record["targets"]) == 3

    screen = capsys.readouterr().out
    assert "transformers" in screen
    assert len(re.findall(r"\b(?:met|missed by)\b", screen)) == 3


def test_host_measures_watched_and_unwatched_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--running", "2", "5", "--steps", "6", "--prefix-len", "64", "--page-size", "8"]
    record = bench(tmp_path, "host", *sizes)

    decode, prefill, published = record["tables"]
    assert [row[:2] for row in published["rows"]] == [[2, 0.25], [5, 0.625]]
    assert [row[:2] for row in decode["rows"]] == [["unwatched", 2], ["unwatched", 5], ["watched", 2], ["watched", 5]]
    assert [row[0] for row in prefill["rows"]] == [1, 64]
    assert all(min(row[1:]) > 0 for row in [*decode["rows"], *prefill["rows"]])
    assert all(micros > 0 for row in published["rows"] for micros in row[2:4])
    assert len(record["targets"]) == 4
    assert "decode step of 2 watched requests" in capsys.readouterr().out


def test_the_demo_answers_and_shows_which_prompts_were_cached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_level()
    model, _ = tiny_checkpoint(
        tmp_path, "LlamaForCausalLM", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=1024
    )
    save(tokenizer, model)
    demo.main([str(model)])

    screen = capsys.readouterr().out
    assert "\n1. What is the capital of France?" in screen  # no escape sequence before it: this is no terminal
    assert max(map(len, screen.splitlines())) <= 80
    rows = [line.split() for line in screen.splitlines() if re.match(r"\s+\d+(\s+\d+){3}\s", line)]
    assert [int(row[0]) for row in rows] == list(range(1, 9))
    cached = [int(row[2]) for row in rows]
    assert cached[0] == 0
    assert cached[3] > 100  # the fourth question repeats the note of the third


def test_offline_runs_every_workload_with_the_options_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small_workloads: None
) -> None:
    model, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    options = ["--set", "device=cpu", "max_seq_len=256", "overlap=true", "prefix_cache=none"]
    record = bench(tmp_path, "offline", "--model", str(model), "--repeat", "2", *options)
    (table,) = record["tables"]
    assert [row[1] for row in table["rows"]] == ["mixed", "bs1", "prefix", "refill", "refill-32", "ttft"]
    for row in table["rows"]:
        assert 0 < row[3] <= row[2] <= row[4]
    assert record["settings"]["options"]["overlap"] is True
    assert record["targets"] == []  # they are about one H200
    assert "shared tokens" in json.dumps(record["settings"])
    assert "mixed" in capsys.readouterr().out


def test_offline_measures_the_start_in_processes_of_their_own(tmp_path: Path, small_workloads: None) -> None:
    model, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    options = ["--set", "device=cpu", "max_seq_len=256", "num_pages=64"]
    record = bench(tmp_path, "offline", "--model", str(model), "--work", "bs1", "--start", *options)
    _, starts = record["tables"]
    assert [row[1] for row in starts["rows"]] == ["cold", "cached"]
    assert all(row[2] > 0.1 for row in starts["rows"])


def test_an_output_of_another_length_ends_a_workload(tmp_path: Path, small_workloads: None) -> None:
    model, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    llm = LLM(model, device="cpu", num_pages=64)
    generate = llm.generate

    def shorter(prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        return generate(prompts, [replace(each, max_tokens=3) for each in params])

    with patch.object(llm, "generate", shorter), pytest.raises(AssertionError, match="as many tokens"):
        run_workload(llm, WORKLOADS["bs1"], 0)


def test_compare_climbs_the_ladder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small_workloads: None
) -> None:
    model, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    used: list[dict[str, Any]] = []

    def on_the_cpu(model: str, options: dict[str, Any]) -> LLM:
        used.append(dict(options))
        return LLM(model, device="cpu", max_seq_len=256, num_pages=64)

    monkeypatch.setattr(workloads, "make_engine", on_the_cpu)
    record = bench(tmp_path, "compare", "--model", str(model), "--work", "bs1", "--repeat", "1")
    rows = record["tables"][0]["rows"]
    assert [row[0] for row in rows] == [label for label, _ in workloads.LADDER]
    assert all(row[1] > 0 for row in rows)
    assert used[0]["enforce_eager"] is True
    assert used[0]["overlap"] is False
    assert used[-1] == {
        "prefill_attention": "cascade",
        "decode_attention": "cascade",
        "enforce_eager": False,
        "fusions": ("norm", "rope", "activation", "single-token", "persistent"),
        "sampler": "triton",
        "overlap": True,
    }


def test_profile_says_where_the_time_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small_workloads: None
) -> None:
    model, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    trace = tmp_path / "trace.json"
    options = ["--set", "device=cpu", "max_seq_len=256", "num_pages=64"]
    record = bench(tmp_path, "profile", "--model", str(model), "--trace", str(trace), *options)
    steps, kernels = record["tables"]
    assert {row[0]: row[1] for row in steps["rows"]} == {"prefill": 1, "decode": 5}
    assert all(min(row[2:]) > 0 for row in steps["rows"])
    assert sum(row[4] for row in kernels["rows"]) + 50 > 99  # the largest come first, the rest is left out
    assert kernels["rows"] == sorted(kernels["rows"], key=lambda row: -row[2])
    assert any("mm" in row[0] or "linear" in row[0] for row in kernels["rows"])
    assert len(record["targets"]) == 1  # a CPU takes turns with its host, so its idle time says nothing
    assert json.loads(trace.read_text())["traceEvents"]


def test_overlap_measures_the_same_steps_under_both_loops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    sizes = ["--rows", "1", "3", "--steps", "12", "--added", "0", "3"]
    options = ["--set", "device=cpu", "max_seq_len=128", "num_pages=64"]
    record = bench(tmp_path, "overlap", "--model", str(model), *sizes, *options)
    steps, phases, slower = record["tables"]
    keys = [[1, "off"], [1, "on"], [3, "off"], [3, "on"]]
    assert [row[:2] for row in steps["rows"]] == [row[:2] for row in phases["rows"]] == keys
    assert all(min(row[2:5]) > 0 and 0 <= row[5] < 100 for row in steps["rows"])
    assert all(len(row) == len(phases["columns"]) and min(row[2:]) > 0 for row in phases["rows"])
    assert [row[0] for row in slower["rows"]] == [0.0, 3.0]
    assert min(slower["rows"][1][1:]) >= 3.0  # a CPU is host and device in one, so nothing hides what was added
    order = {}
    for name in ("off", "on"):
        trace = Trace.load(tmp_path / f"trace-result-{name}.json")
        spans = [event for event in trace.events if event.track != DEVICE]
        assert {event.args["step"] for event in trace.events} == set(range(6, 12))
        order[name] = " ".join(f"{event.name[0]}{event.args['step']}" for event in spans if event.args["step"] < 8)
    assert order == {"off": "s6 l6 w6 p6 s7 l7 w7 p7", "on": "s6 l6 s7 l7 w6 p6 w7 p7"}


@pytest.mark.parametrize("depth", [0, 1])
def test_the_hosts_times_are_parts_of_the_steps_that_are_timed(tmp_path: Path, depth: int) -> None:
    model, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    llm = LLM(model, device="cpu", num_pages=64)
    loop, host = EngineLoop(llm.scheduler, llm.engine, depth), HostTimes()
    llm.scheduler.add(llm.prepare([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))[0].request)
    for _ in range(3):
        loop.step()
    start = time.perf_counter()
    with observed(host, loop.observers, llm.engine.observers):
        for _ in range(5):
            loop.step()
    elapsed = time.perf_counter() - start
    loop.step()  # is not noted any more
    assert {phase: len(each) for phase, each in host.seconds.items()} == dict.fromkeys([*_PHASES, "compute"], 5)
    assert min(map(min, host.seconds.values())) > 0
    assert all(map(operator.lt, host.seconds["compute"], host.seconds["launch"])), "one is a part of the other"
    assert sum(sum(host.seconds[phase]) for phase in _PHASES) < elapsed


def test_a_conversation_comes_back_from_the_page_store(tmp_path: Path) -> None:
    """The benchmark itself fails if a page is computed that should be copied, or the other way round."""
    sizes = ["--lengths", "90", "200", "--repeat", "1", "--set", "page_size=4", "page_store_gib=0.01"]
    record = bench(tmp_path, "page-store", "--model", "tiny", *sizes)
    (table,) = record["tables"]
    assert [row[:2] for row in table["rows"]] == [["tiny", 90], ["tiny", 200]]
    assert all(cell > 0 for row in table["rows"] for cell in row[2:])
    assert [target["name"].split(":")[0] for target in record["targets"]] == ["tiny, 200 tokens"]


def test_preemption_measures_every_way_on_the_same_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small_workloads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    depths: list[int] = []

    class Noted(EngineLoop):
        def step(self) -> StepOutput:
            depths.append(self.depth)
            return super().step()

    monkeypatch.setattr(preemption, "EngineLoop", Noted)
    model, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    sizes = ["--pool-tokens", "84", "--requests", "5", "--lengths", "8", "32"]
    options = ["--set", "device=cpu", "max_seq_len=128", "page_size=1", "overlap=true"]
    record = bench(tmp_path, "preemption", "--model", str(model), *sizes, *options)
    pressure, back = record["tables"]
    ways = {row[0]: dict(zip(pressure["columns"], row, strict=True)) for row in pressure["rows"]}
    assert list(ways) == list(preemption.CASES)
    assert set(depths) == {1}, "steps overlap as in the engine whose loop this one replaces"
    for label, way in ways.items():
        assert way["output tokens/s"] > 0
        assert (way["preemptions"] > 0) == label.startswith("optimistic")
    again, rows = (
        [way[column] for way in ways.values()] for column in ("tokens computed again", "rows of a decode step, mean")
    )
    assert again[0] == again[1] == 0 < again[2] < again[3]
    assert rows[0] <= rows[1] < rows[2]
    assert [row[1] for row in back["rows"]] == [8, 32]
    assert all(min(row[2:]) > 0 for row in back["rows"])


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_explains_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert "--output" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        "offline --repeat 0",
        "quantization --repeat 0",
        "scoreboard --repeat -1",
        "host --running 4 0",
        "cpu --threads 0",
    ],
)
def test_there_must_be_something_to_measure(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, flag, *counts = arguments.split()
    with pytest.raises(SystemExit) as ended:
        main([command, flag, *counts])
    assert ended.value.code == 2
    assert f"{command}: {flag[2:]}: must be positive, got {counts[-1]}" in capsys.readouterr().err


def test_all_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert [command for command in COMMANDS if f"    {command} " not in output] == []


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_names_a_function_that_takes_its_options(command: str) -> None:
    """Many run on GPUs alone, where a wrong name would show up late."""
    given = vars(build_parser(command).parse_args([command]))
    parameters = inspect.signature(benchmark_function(command)).parameters
    assert set(given) == {"benchmark", "threads", "output", *parameters}
    assert all(given[name] == parameter.default for name, parameter in parameters.items())
