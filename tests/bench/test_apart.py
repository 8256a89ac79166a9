"""Two engines, of which one prefills and one decodes: the tokens are those of one engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from minisgl.bench.__main__ import main
from minisgl.bench.apart import Job, serve_alike, serve_apart
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from tests.model_zoo import tiny_checkpoint

OPTIONS = {"device": "cpu", "dtype": "float64", "page_size": 4, "num_pages": 120}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, _ = tiny_checkpoint(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")
    return directory


def make_jobs() -> list[Job]:
    rng = np.random.default_rng(0)
    return [Job(rng.integers(0, 200, length).tolist(), 1 + length % 7) for length in (30, 4, 41, 17, 8, 25, 1, 36)]


def assert_answers(path: Path, jobs: list[Job]) -> None:
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=job.max_tokens) for job in jobs]
    expected = LLM(path, **OPTIONS).generate([job.prompt for job in jobs], params)
    assert [job.tokens for job in jobs] == [output.token_ids for output in expected]
    assert all(len(job.times) == job.max_tokens for job in jobs)


@pytest.mark.parametrize("num_slots", [2, 100])
def test_apart_the_tokens_are_those_of_one_engine(path: Path, num_slots: int) -> None:
    """With two slots, most pages are gone before they are wanted, and computed again."""
    prefill, decode, jobs = LLM(path, **OPTIONS), LLM(path, **OPTIONS), make_jobs()
    serve_apart(prefill, decode, jobs, num_slots)
    assert_answers(path, jobs)
    whole = sum(len(job.prompt) // 4 for job in jobs if job.max_tokens > 1)
    restored = decode.scheduler.memory.offload.restored
    assert restored == whole if num_slots == 100 else restored < whole
    prefill.scheduler.check()
    decode.scheduler.check()


def test_alike_the_tokens_are_those_of_one_engine(path: Path) -> None:
    jobs = make_jobs()
    serve_alike([LLM(path, **OPTIONS), LLM(path, **OPTIONS)], jobs)
    assert_answers(path, jobs)


def test_an_error_of_an_engine_ends_the_experiment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = LLM(path, **OPTIONS), LLM(path, **OPTIONS)
    monkeypatch.setattr(decode, "prepare", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        serve_apart(prefill, decode, make_jobs(), 100)


def test_the_command_measures_three_ways(tmp_path: Path) -> None:
    output = tmp_path / "apart.json"
    sizes = ["--streams", "2", "--requests", "2", "--rate", "20", "--input-len", "60", "--output-len", "12"]
    main(["apart", "--model", "tiny", *sizes, "--devices", "cpu", "cpu", "--threads", "1", "--output", str(output)])
    (table,) = json.loads(output.read_text(encoding="utf-8"))["tables"]
    assert [row[0] for row in table["rows"]] == ["alike, prefill first", "alike, mixed steps", "apart"]
    assert all(cell > 0 for row in table["rows"] for cell in row[1:])
