from __future__ import annotations

import json
from pathlib import Path

import pytest

from minisgl.errors import ModelLoadError
from minisgl.models.eos import load_eos_ids


def write(directory: Path, **files: object) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def test_generation_config_lists_all_of_them(tmp_path: Path) -> None:
    path = write(tmp_path, generation_config={"eos_token_id": [2, 7, 9]}, config={"eos_token_id": 1})
    assert load_eos_ids(path) == (2, 7, 9)


def test_a_single_id(tmp_path: Path) -> None:
    assert load_eos_ids(write(tmp_path, generation_config={"eos_token_id": 2})) == (2,)


def test_config_where_generation_config_is_silent(tmp_path: Path) -> None:
    assert load_eos_ids(write(tmp_path, generation_config={}, config={"eos_token_id": [0]})) == (0,)


@pytest.mark.parametrize("eos_token", ["</s>", {"content": "</s>"}])
def test_the_tokenizers_own_token_comes_last(tmp_path: Path, eos_token: object) -> None:
    added = [{"id": 1, "content": "<s>"}, {"id": 5, "content": "</s>"}]
    path = write(
        tmp_path,
        config={"eos_token_id": None},
        tokenizer_config={"eos_token": eos_token},
        tokenizer={"added_tokens": added},
    )
    assert load_eos_ids(path) == (5,)


def test_no_file_names_one(tmp_path: Path) -> None:
    assert load_eos_ids(tmp_path) == ()


@pytest.mark.parametrize("value", ["2", [2, "3"], True, 1.5])
def test_nonsense_names_the_file(tmp_path: Path, value: object) -> None:
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: eos_token_id must be"):
        load_eos_ids(write(tmp_path, generation_config={"eos_token_id": value}))


@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_json_names_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelLoadError, match="generation_config"):
        load_eos_ids(tmp_path)
