"""What a step must move and compute, counted from shapes and compared with tensors and with loops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl.batch import Batch, build_batch
from minisgl.bench.gpu import Machine, Work, step_work
from minisgl.bench.host import SimulatedDevice
from minisgl.bench.workloads import model_dir
from minisgl.errors import ConfigError
from minisgl.kvcache.pool import KVCache
from minisgl.models.config import ModelConfig, MoEConfig
from minisgl.models.loader import load_model
from tests.model_zoo import tiny_checkpoint


def step(fed: list[int], cached: list[int], samples: list[int]) -> Batch:
    rows = len(fed)
    as_int32 = [np.array(each, dtype=np.int32) for each in (range(rows), fed, cached, samples)]
    table = np.arange(rows * 64, dtype=np.int32).reshape(rows, 64)
    return build_batch(*as_int32[:3], table, 4, as_int32[3], as_int32[3] * 0, num_decode=0)


@pytest.fixture(params=["Qwen3ForCausalLM", "LlamaForCausalLM"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> ModelConfig:
    path, _ = tiny_checkpoint(tmp_path, request.param)
    return ModelConfig.from_dir(path)


def test_matrices_and_scores_are_all_the_weights_of_a_model(model: ModelConfig) -> None:
    loaded = load_model("", model, model.dtype, torch.device("cpu"), "dummy")
    multiplied = sum(each.nbytes for name, each in loaded.named_parameters() if each.ndim == 2 and "embed" not in name)
    if model.tie_word_embeddings:
        multiplied += loaded.model.embed_tokens.weight.nbytes
    matrices, _, scores = step_work(model, step([1], [0], [0]))
    assert matrices.bytes + scores.bytes == multiplied


def test_each_row_multiplies_each_weight_and_reads_it_for_nothing(model: ModelConfig) -> None:
    one, many = (step_work(model, step([1] * rows, [5] * rows, list(range(rows)))) for rows in (1, 7))
    for index in (0, 2):
        assert many[index].bytes == one[index].bytes
        assert many[index].flops == 7 * one[index].flops
        assert one[index].flops == 2 * one[index].bytes // model.dtype.itemsize
    assert many[1].bytes == 7 * one[1].bytes


def test_attention_reads_what_the_cache_holds_and_sees_no_later_token(model: ModelConfig) -> None:
    batch = step([3, 1], [4, 9], [0, 1])
    cache = KVCache(model.num_layers, model.num_kv_heads, model.head_dim, 1, 17, model.dtype, torch.device("cpu"))
    token = (cache.k.nbytes + cache.v.nbytes) // (cache.k.shape[1] * cache.k.shape[2])
    attention = step_work(model, batch)[1]
    assert attention.bytes == token * (7 + 10)
    assert step_work(model, batch, kv_tokens=12)[1].bytes == token * 12
    seen = sum(position + 1 for position in (4, 5, 6, 9))
    assert attention.flops == 2 * 2 * seen * model.num_heads * model.head_dim * model.num_layers


def test_qwen3_shapes_have_the_sizes_in_their_names(tmp_path: Path) -> None:
    for name, billions in (("Qwen3-0.6B", 0.6), ("Qwen3-14B", 14.0)):
        model = ModelConfig.from_dir(model_dir(name, tmp_path))
        matrices, _, scores = step_work(model, step([1], [0], [0]))
        assert (matrices.bytes + scores.bytes) / 2e9 == pytest.approx(billions, rel=0.01)


def test_a_mixture_is_refused(model: ModelConfig) -> None:
    experts = MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=8, normalize=True, layers=(True,))
    with pytest.raises(ConfigError, match="dense model"):
        step_work(replace(model, moe=experts), step([1], [0], [0]))


def test_a_machine_takes_the_longer_of_moving_and_computing_and_pays_for_kernels() -> None:
    machine = Machine("slow", bytes_per_second=10.0, flops_per_second=200.0, kernel_seconds=0.25)
    assert machine.ridge == 20
    assert machine.seconds(Work("moves", 30, 20)) == 3.0
    assert machine.seconds(Work("computes", 30, 800)) == 4.0
    assert machine.seconds(Work("starts", 30, 800, kernels=4)) == 5.0
    assert Work("computes", 30, 600).intensity == machine.ridge


def test_a_simulated_device_moves_its_clock_by_each_step() -> None:
    device = SimulatedDevice(lambda batch: 0.5 * batch.num_tokens)
    for fed, samples in (([3, 1], [0, 1]), ([2], [])):
        result = device.launch(step(fed, [0] * len(fed), samples)).wait()
        assert len(result.tokens) == len(samples)
    assert device.now == 3.0
