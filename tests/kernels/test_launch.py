"""How kernels are launched: compiled ahead, without being run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.runtime import JITFunction

from minisgl.kernels import quantized_linear
from minisgl.kernels.launch import compile_only
from minisgl.kernels.quantized_linear import scale_product
from tests.kernels.closeness import random
from tests.model_zoo import tiny_checkpoint

# Counts kernels that were compiled ahead and others while an engine starts and answers, and prints both.
_COUNT = """
import sys, triton
from minisgl.llm import LLM

def main():
    count = [0, 0]
    def compiled(*, is_manual_warmup, **_):
        count[is_manual_warmup] += 1
    triton.knobs.runtime.jit_post_compile_hook = compiled
    with LLM(sys.argv[1], device="cuda") as llm:
        llm.generate([[1, 2, 3]])
    print(*count)

if __name__ == "__main__":
    main()
"""


def _kernel(x):  # type: ignore[no-untyped-def]
    pass


def test_a_launch_inside_the_block_only_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[bool] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool) -> None:
        launches.append(warmup)

    monkeypatch.setattr(JITFunction, "run", record)
    kernel = JITFunction(_kernel)
    with compile_only():
        kernel[(1,)](0)
    kernel[(1,)](0)
    with pytest.raises(ValueError, match="in the middle"), compile_only():
        raise ValueError("in the middle")
    kernel[(1,)](0)
    assert launches == [True, False, False]


@pytest.mark.gpu
def test_a_kernel_is_compiled_and_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    quantized_linear._scale_product_kernel.device_caches.clear()
    product, scale = random(3, 40, dtype=torch.bfloat16), random(40, 1, dtype=torch.float32)
    before = product.clone()
    with compile_only():
        scale_product(product, scale[:3], scale, None)
    assert torch.equal(product, before)
    assert list(tmp_path.rglob("*.cubin"))
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **_: pytest.fail("compiled once more"))
    scale_product(product, scale[:3], scale, None)
    assert not torch.equal(product, before)


@pytest.mark.gpu
def test_an_engine_compiles_most_kernels_ahead(tmp_path: Path) -> None:
    checkpoint, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM")
    run = subprocess.run(
        [sys.executable, "-c", _COUNT, str(checkpoint)], check=True, capture_output=True, text=True, cwd=Path.cwd()
    )
    later, ahead = map(int, run.stdout.split()[-2:])
    assert ahead > 2 * later > 0
