"""The benchmark of the fused kernels. Nothing that was timed is asserted."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._inductor.exc import InductorError

from minisgl.bench.gpu import buffers_needed, launched, microseconds
from minisgl.bench.kernels import _fails, run_kernels
from minisgl.errors import ConfigError


def test_without_a_gpu_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"kernels: .* need a CUDA device"):
        run_kernels((1,), repeat=1)


def test_what_torch_compile_has_no_code_for_fails_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("torch._inductor.scheduler")

    def compiled(count: int) -> None:
        log.critical("cannot compile %d", count)
        raise InductorError(ValueError("no code"), None)

    assert _fails(compiled, (3,))
    assert not caplog.records
    assert not _fails(abs, (3,))
    log.critical("heard again")
    assert [record.message for record in caplog.records] == ["heard again"]


@pytest.mark.gpu
def test_every_kernel_and_every_choice_of_fusions_is_measured() -> None:
    report = run_kernels((1,), repeat=1)
    kernels, experts, *layers = report.tables
    names = ["add + RMSNorm", "RoPE + store", "SiLU·mul"]
    samples = ["greedy sample", "random sample", "top-k 50, top-p sample", "top-p sample"]
    assert [row[0] for row in kernels.rows] == [*names, *names, *samples]
    assert all(isinstance(cell, float) and cell > 0 for row in kernels.rows for cell in row[2:-1])
    compiled = [row[-1] for row in kernels.rows if row[-1] != "fails"]  # which depends on PyTorch's version
    assert len(compiled) >= 2 * len(names)
    assert all(isinstance(cell, float) and cell > 0 for cell in compiled)
    assert [row[0] for row in experts.rows] == [1]
    assert all(isinstance(cell, float) and cell > 0 for row in experts.rows for cell in row[1:])
    for layer in layers:
        launched = {str(row[0]): float(row[2]) for row in layer.rows}
        assert launched["plain"] - launched["all fused"] >= 10
        assert all(launched["plain"] > launched[f"only {name}"] for name in ("norm", "rope", "activation"))
        assert launched["plain"] > launched["small layers compiled"] > launched["all fused"]


@pytest.mark.gpu
def test_launches_are_counted_and_timed() -> None:
    x = torch.ones(1024, device="cuda")
    assert len(launched(lambda: x.add_(1).mul_(2), x.device)) == 2
    assert microseconds([lambda: x.add_(1)]) > 0


@pytest.mark.gpu
def test_what_exceeds_the_cache_is_given_buffers_that_exceed_it_twice() -> None:
    cache = torch.cuda.get_device_properties().L2_cache_size
    assert buffers_needed(1024) == 1
    assert buffers_needed(cache) * cache > 2 * cache
