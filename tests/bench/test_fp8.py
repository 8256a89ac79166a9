"""What the benchmark of eight-bit keys and values compares. Nothing that was timed is asserted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.attention.select import AttentionFactory
from minisgl.bench import attention, quantization, workloads
from minisgl.bench.__main__ import main
from minisgl.bench.attention import Step, attend_calls
from minisgl.engine.engine import Engine
from minisgl.errors import ConfigError
from minisgl.llm import LLM
from tests.model_zoo import hf_logits, tiny_checkpoint
from tests.tiny_text_model import text_checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def bench(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "result.json"
    main([*arguments, "--threads", "1", "--output", str(path)])
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def engine_of(path: Path, **options: Any) -> Engine:
    return LLM(path, device="cpu", dtype="float32", num_pages=8, page_size=8, **options).engine


def test_a_reading_is_that_of_transformers(tmp_path: Path) -> None:
    path, reference = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM")
    ids = [int(token) for token in torch.randint(211, (50,), generator=torch.Generator().manual_seed(0))]
    logits = hf_logits(reference, ids)[:-1]
    reading = quantization.score_text(engine_of(path), ids, logits.log_softmax(-1))
    expected = logits.log_softmax(-1)[range(49), ids[1:]]
    torch.testing.assert_close(reading.logprobs, expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(reading.argmax, logits.argmax(-1))


def test_a_reading_is_over_what_is_stored(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM")
    ids, engines = [*range(1, 60)], [engine_of(path, kv_dtype=name) for name in ("auto", "fp8")]
    reference = quantization.text_logits(engines[0], ids).log_softmax(-1)
    exact, rounded = (quantization.score_text(engine, ids, reference) for engine in engines)
    assert 1e-3 < (exact.logprobs - rounded.logprobs).abs().mean() < 1.0
    assert torch.equal(rounded.largest.to(torch.float8_e4m3fn).float(), rounded.largest)
    torch.testing.assert_close(rounded.largest, exact.largest, rtol=0.07, atol=0.0)


def test_the_error_is_against_the_first_line(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat " * 12, encoding="utf-8")
    model = text_checkpoint(tmp_path)
    sizes = ["--model", str(model), "--text", str(text), "--tokens", "70", "--window", "32"]
    record = bench(tmp_path, "fp8-error", *sizes)
    (table,) = record["tables"]
    assert [row[0] for row in table["rows"]] == list(quantization._OF_KEYS)
    (_, perplexity, mean, largest, same, *_), *others = table["rows"]
    assert (mean, largest, same) == (0.0, 0.0, "100.0%")
    assert perplexity > 1.0
    assert all(0.0 < row[2] < row[3] for row in others)
    assert record["settings"]["tokens"] == 70
    assert "67 tokens of text" in table["title"]  # three windows, of which the first token has nothing before it


def test_the_gain_is_measured_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="fp8: times of GPU kernels need a CUDA device"):
        attention.run_fp8("default", "mixed", 1)


def test_the_same_keys_are_attended_to_in_both_dtypes() -> None:
    step = Step("2 × 9", [1, 1], [8, 8])
    (wide, (wide_call,)), (narrow, (narrow_call,)) = (
        (torch.manual_seed(0), attend_calls(step, 16, make, 1, DEVICE))[1]
        for make in (attention._wide, attention._over_eight_bits)
    )
    assert narrow.kv_cache.k.dtype == torch.float8_e4m3fn
    assert torch.equal(narrow.kv_cache.k.float(), wide.kv_cache.k.to(torch.float8_e4m3fn).float())
    torch.testing.assert_close(narrow_call(), wide_call(), rtol=0, atol=0.2)


def test_the_gain_is_that_of_the_same_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU that pretends."""
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    kept: list[torch.dtype] = []

    def measured(step: Step, heads: int, make: AttentionFactory, repeat: int) -> float:
        return 2.0 if make is attention._wide else 1.0

    def on_the_cpu(model: str, options: dict[str, Any]) -> LLM:
        llm = LLM(model, device="cpu", dtype="bfloat16", num_pages=200, **options)
        kept.append(llm.engine.kv_cache.k.dtype)
        return llm

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("minisgl.bench.gpu.copy_bandwidth", lambda: 1e12)
    monkeypatch.setattr(attention, "measure", measured)
    monkeypatch.setattr(attention, "make_engine", on_the_cpu)
    monkeypatch.setattr(workloads, "run_workload", lambda llm, workload, seed: workload_run)
    report = attention.run_fp8(str(path), "bs1", 2)
    alone, whole = report.tables
    assert {row[-1] for row in alone.rows} == {2.0}
    assert {str(row[0]).split()[0] for row in alone.rows} == {"decode", "prefill"}
    assert kept == [torch.bfloat16, torch.float8_e4m3fn]
    (_, wide_bytes, *_), (_, narrow_bytes, *_) = whole.rows
    assert wide_bytes == 2 * narrow_bytes == 2 * 2 * 2 * 8 * 2  # layers, k and v, heads, width, bytes
    assert report.samples.keys() == {"auto", "fp8"}


class workload_run:
    """Stands for a `Run` that took no time."""

    @staticmethod
    def value(workload: object) -> float:
        return 5.0
