"""Structured output on a CUDA device: masks after a replayed graph, in the fused sampler, and beside overlap."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jsonschema
import pytest
import torch

from minisgl.batch import Batch
from minisgl.engine.cuda_graph import CudaGraphRunner
from minisgl.engine.engine import LaunchedStep
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from tests.structured import CAT, DATE, PERSON, SCHEMA
from tests.test_gpu import PLAIN
from tests.tiny_text_model import assert_idle_and_clean, text_checkpoint

pytestmark = pytest.mark.gpu

GREEDY = [
    SamplingParams(temperature=0.0, max_tokens=40, json_schema=SCHEMA),
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=40, regex="[a-e]{4,}(,[a-e]+){3}", repetition_penalty=1.4),
    SamplingParams(temperature=0.0, max_tokens=40, regex=DATE, logprobs=2),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("grammar"), max_position_embeddings=2048, head_dim=32)


def make(path: Path, **options: Any) -> LLM:
    return LLM(path, **{"device": "cuda", "dtype": "float32", "num_pages": 1024, **options})


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("options", [{}, {"sampler": "default"}, {"enforce_eager": True}, {"num_pages": 12}])
def test_the_tokens_are_those_of_the_plain_engine(path: Path, options: dict[str, Any], overlap: bool) -> None:
    prompts, params = [[7, 8, 9 + i] for i in range(2 * len(GREEDY))], GREEDY * 2
    expected = [output.token_ids for output in make(path, **PLAIN, overlap=False).generate(prompts, params)]
    llm = make(path, overlap=overlap, **options)
    assert isinstance(llm.engine.runner, CudaGraphRunner) == ("enforce_eager" not in options)
    assert [output.token_ids for output in llm.generate(prompts, params)] == expected
    assert_idle_and_clean(llm)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_whatever_is_drawn_obeys_its_grammar(path: Path, dtype: str) -> None:
    llm = make(path, dtype=dtype)
    objects = [SamplingParams(max_tokens=400, json_schema=SCHEMA, temperature=1.5, seed=seed) for seed in range(100)]
    dates = [SamplingParams(regex=DATE, top_k=40, top_p=0.95, min_p=0.001, seed=seed) for seed in range(100)]
    outputs = llm.generate([CAT] * 200, objects + dates)
    assert {output.finish_reason for output in outputs} == {"stop"}
    for output in outputs[:100]:
        jsonschema.validate(json.loads(output.text), PERSON)
    assert all(re.fullmatch(DATE, output.text, re.ASCII) for output in outputs[100:])


def test_masks_are_applied_without_waiting_for_the_device(path: Path) -> None:
    llm = make(path)
    params = [*GREEDY, SamplingParams(max_tokens=60, json_schema=SCHEMA, top_k=5, seed=1)]
    llm.generate([CAT] * 5, params)
    launch = llm.engine.launch
    masked = []

    def watched(batch: Batch) -> LaunchedStep:
        masked.append(len(batch.mask_rows))
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with patch.object(llm.engine, "launch", watched):
        outputs = llm.generate([CAT] * 5, params)
    assert all(output.finish_reason in ("stop", "length") for output in outputs)
    assert max(masked) == 4
    assert 0 in masked, "steps between, in which the rows with a grammar sit out"
