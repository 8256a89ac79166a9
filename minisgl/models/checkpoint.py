"""A safetensors checkpoint on disk: which tensors it has, in which files. Only headers are read here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from minisgl.errors import ModelLoadError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a safetensors header says of one tensor.

    Args:
        file: the shard that holds it.
        shape: its sizes.
        dtype: safetensors' name, e.g. ``"BF16"``.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_headers(path: str | Path) -> dict[str, TensorHeader]:
    """Headers of all tensors of a model directory, single file or shards.

    Raises:
        ModelLoadError: there are no weights, a shard is missing, or a file is truncated or no safetensors file.
    """
    headers: dict[str, TensorHeader] = {}
    for file in _shards(Path(path)):
        try:
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - a safetensors file is no mapping
                    tensor = shard.get_slice(name)
                    headers[name] = TensorHeader(file, tuple(tensor.get_shape()), tensor.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{file}: truncated or corrupt ({error}); download it again") from error
    return headers


def _shards(path: Path) -> list[Path]:
    index = path / INDEX_FILE
    if index.is_file():
        files = _indexed_files(index)
    elif (path / SINGLE_FILE).is_file():
        files = [path / SINGLE_FILE]
    else:
        raise ModelLoadError(
            f"{path}: no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there; other formats must be converted to "
            "safetensors, and load_format='dummy' needs no weights"
        )
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelLoadError(f"{path}: missing shards named by {INDEX_FILE}: {', '.join(missing)}; download them again")
    return files


def _indexed_files(index: Path) -> list[Path]:
    """The shards that the index names, in order."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [index.parent / name for name in sorted(set(weight_map.values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index}: not a valid index ({error!r}); download it again") from error
