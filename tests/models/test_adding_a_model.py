"""The page "Adding a model": its code is a model, and it is the one that it says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from minisgl.models.config import MODELS, ModelConfig
from minisgl.models.loader import load_model
from tests.model_zoo import hf_logits, random_tokens, run_dense, tiny_checkpoint

PAGE = Path(__file__).parents[2] / "chapters" / "adding-a-model.md"
NAME = "my_models:Exaone4ForCausalLM"


@pytest.fixture
def my_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"^~~~python\n(.*?)^~~~$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (tmp_path / "my_models.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_models", raising=False)


@pytest.mark.parametrize(
    "overrides", [{"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6}, {}]
)
@pytest.mark.usefixtures("my_models")
def test_the_class_on_the_page_equals_transformers(tmp_path: Path, overrides: dict[str, object]) -> None:
    path, hf = tiny_checkpoint(tmp_path, "Exaone4ForCausalLM", **overrides)
    model = load_model(path, ModelConfig.from_dir(path, NAME), torch.float32, torch.device("cpu"))
    (prompt,) = random_tokens(23)
    assert float((run_dense(model, prompt)[0] - hf_logits(hf, prompt)).abs().max()) < 1e-4


def test_the_package_does_not_have_it() -> None:
    assert "Exaone4ForCausalLM" not in MODELS
