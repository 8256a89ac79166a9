"""What the benchmarks of quantised weights compare. Nothing that was timed is asserted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.bench import quantization, workloads
from minisgl.bench.__main__ import main
from minisgl.bench.quantization import text_logits
from minisgl.errors import ConfigError
from minisgl.llm import LLM
from tests.tiny_text_model import text_checkpoint

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}


def bench(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "result.json"
    main([*arguments, "--threads", "1", "--output", str(path)])
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def on_the_cpu(model: str, options: dict[str, Any]) -> LLM:
    return LLM(model, device="cpu", dtype="bfloat16", num_pages=200, **options)


class Took:
    """What every workload took."""

    @staticmethod
    def value(workload: object) -> float:
        return 5.0


def test_schemes_take_turns_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = str(text_checkpoint(tmp_path, **SIZES))
    sizes = ("--input-len", "4", "--output-len", "4", "--repeat", "2")
    monkeypatch.setattr(quantization, "_prompt", lambda count: [[5] * count])
    record = bench(tmp_path, "quantization", "--model", model, "--schemes", "none", "int8", "fp8", *sizes)
    (table,) = record["tables"]
    assert [row[0] for row in table["rows"]] == ["none", "int8", "fp8"]
    assert {len(values) for values in record["samples"].values()} == {2}
    (*_, plain), (*_, int8), _ = table["rows"]
    assert plain == 1.0
    assert 0.25 < int8 < 0.4
    assert [each["name"] for each in record["targets"]] == ["int8, tokens/s × float32", "int8, weights × float32"]


def test_schemes_meet_the_same_workloads_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU that pretends."""
    model = str(text_checkpoint(tmp_path, **SIZES))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("minisgl.bench.gpu.copy_bandwidth", lambda: 1e9)
    monkeypatch.setattr(quantization, "make_engine", on_the_cpu)
    monkeypatch.setattr(workloads, "run_workload", lambda llm, workload, seed: Took)
    monkeypatch.setitem(quantization._TARGETS, (model, "fp8", "bs1"), 4.0)
    report = quantization.run_quantization(model, ("none", "fp8", "int4"), ("bs1", "mixed"), 1)
    (table,) = report.tables
    assert [(row[0], row[3]) for row in table.rows] == [
        (scheme, workload)
        for scheme in ("none", "fp8", "int4")
        for workload in ("bs1, ms/token", "mixed, output tokens/s")
    ]
    sizes = [float(row[1]) for row in table.rows[::2]]
    assert sizes[0] > sizes[1] > sizes[2]
    assert [row[2] for row in table.rows[::2]] == pytest.approx([1e3 * size for size in sizes])
    mixed = f"{model} int4 mixed, output tokens/s"
    assert {target.name: target.met for target in report.targets} == {
        f"{model} fp8 bs1, ms/token": False,
        mixed: True,  # as many as without
    }
    with pytest.raises(ConfigError, match="work: 'refill-32' needs an engine of its own"):
        quantization.run_quantization(model, ("fp8",), ("refill-32",), 1)


def test_only_the_schemes_that_are_named_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a large model take minutes each, and one may be all that is asked about."""
    model = str(text_checkpoint(tmp_path, **SIZES))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(quantization, "_prompt", lambda count: [[5] * count])
    report = quantization.run_quantization(model, ("int8",), repeat=1, input_len=4, output_len=4)
    ((name, *_, speed, _, memory),) = report.tables[0].rows
    assert (name, speed, memory) == ("int8", "–", "–"), "there is nothing to compare with"
    assert report.targets == []
    whole = quantization.run_quantization(model, repeat=1, input_len=4, output_len=4)
    assert [row[0] for row in whole.tables[0].rows] == ["none", "int8"]


def test_only_the_schemes_that_are_named_are_measured_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU that pretends."""
    model = str(text_checkpoint(tmp_path, **SIZES))
    made: list[str] = []

    def noted(model: str, options: dict[str, Any]) -> LLM:
        made.append(options["quantization"])
        return on_the_cpu(model, {})  # the tiny model has no blocks of 128, and nothing is measured here

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("minisgl.bench.gpu.copy_bandwidth", lambda: 1e9)
    monkeypatch.setattr(quantization, "make_engine", noted)
    monkeypatch.setattr(workloads, "run_workload", lambda llm, workload, seed: Took)
    report = quantization.run_quantization(model, ("int4",), ("mixed",), 1)
    assert made == [row[0] for row in report.tables[0].rows] == ["int4"]
    assert report.targets == [], "the aim is what bfloat16 does, which was not asked for"
    made.clear()
    quantization.run_quantization(model, workloads=("mixed",), repeat=1)
    assert made == ["none", "fp8", "fp8-block", "int4", "int4-zero-point"]


def test_the_error_is_against_the_first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat " * 12, encoding="utf-8")
    model = text_checkpoint(tmp_path, **SIZES)
    sizes = ["--model", str(model), "--text", str(text), "--tokens", "70", "--window", "32"]
    record = bench(tmp_path, "quantization-error", *sizes)
    (table,) = record["tables"]
    assert [row[0] for row in table["rows"]] == list(quantization._OF_WEIGHTS)
    exact, *others = table["rows"]
    assert exact[3:] == [0.0, 0.0, 0.0, "100.0%"]
    assert all(0.0 < row[3] <= row[4] <= row[5] for row in others)
    by_name = {row[0]: row for row in table["rows"]}
    assert by_name["int4"][3] > by_name["int8"][3], "fewer bits, larger errors"
    assert by_name["int4"][1] < by_name["fp8"][1] < exact[1]


def test_divergence_is_that_of_its_definition(tmp_path: Path) -> None:
    path = text_checkpoint(tmp_path, **SIZES)
    ids = [*range(5, 30)]
    engines = [LLM(path, device="cpu", num_pages=8, page_size=8, quantization=name).engine for name in ("none", "int4")]
    exact, other = (text_logits(engine, ids).double().softmax(-1) for engine in engines)
    error = quantization.score_text(engines[1], ids, exact.log().float())
    for token in (0, 17):
        p, q = exact[token], other[token]
        assert float(error.divergence[token]) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-3)
        assert float(error.logprobs[token]) == pytest.approx(float(q[ids[token + 1]].log()), rel=1e-3)
        assert int(error.argmax[token]) == int(q.argmax())


@pytest.mark.parametrize("command", ["quantization-error", "fp8-error"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "0"], "tokens: must be positive, got 0"),
        (["--tokens", "1"], "tokens: must be at least 2, as a token is predicted from one before it, got 1"),
        (["--window", "1"], "window: must be at least 2, as a token is predicted from one before it, got 1"),
        (["--text", "nowhere.md"], "text: nowhere.md cannot be read"),
        (["--text", "short.md"], "text: short.md is too short: 1 of at least 2 tokens"),
        (["--window", "9000"], "window: 601 tokens, and model reads at most 512; lower it"),
    ],
)
def test_a_text_that_cannot_be_scored(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    options: list[str],
    message: str,
) -> None:
    text_checkpoint(tmp_path, **SIZES).rename(tmp_path / "model")
    (tmp_path / "long.md").write_text("a " * 300, encoding="utf-8")
    (tmp_path / "short.md").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([command, "--model", "model", "--text", "long.md", *options, "--output", "result.json"])
    assert ended.value.code == 2
    assert f"{command}: {message}" in capsys.readouterr().err
    assert not (tmp_path / "result.json").exists()
