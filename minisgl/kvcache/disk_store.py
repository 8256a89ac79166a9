"""Evicted pages on disk: a file a page, with a checksum. What cannot be written, read or trusted is computed again."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash

from minisgl.errors import ConfigError
from minisgl.kvcache.pool import KVCache
from minisgl.request import Int32Array

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 16


class DiskStore:
    """A `PageStore` of at most ``max_pages`` files, in a new folder that goes with the process; LRU.

    Simple rather than fast: saving waits for the device, though not for the disk, and restoring waits for both. It pays
    where reading is faster than computing: a drive reads some GB/s, so for large models on slow devices.

    Args:
        kv_cache: to copy from and to.
        max_pages: that are kept at most.
        directory: where the folder is made; None is the system's place for temporary files.

    Raises:
        ConfigError: no folder can be made in ``directory``.
    """

    def __init__(self, kv_cache: KVCache, max_pages: int = 1024, directory: str | None = None) -> None:
        self.max_pages = max_pages
        self._kv_cache = kv_cache
        check_directory(directory)
        self.folder = Path(tempfile.mkdtemp(prefix="minisgl-pages-", dir=directory))
        self._writer = ThreadPoolExecutor(1, "minisgl-pages")
        self._files: OrderedDict[bytes, Future[None]] = OrderedDict()  # by name, the least recently used first
        weakref.finalize(self, _remove, self._writer, self.folder)

    def save(self, names: Sequence[bytes], pages: Int32Array) -> None:
        """Keep pages that are new; a background thread writes them. A write that fails loses its page alone."""
        new: dict[bytes, int] = {}
        for name, page in zip(names, pages.tolist(), strict=True):
            if name in self._files:
                self._files.move_to_end(name)
            else:
                new[name] = page
        kept = list(new)[-self.max_pages :]
        if not kept:
            return
        content = self._kv_cache.read_pages(self._index([new[name] for name in kept]))
        by_page = content.movedim(2, 0).contiguous().cpu()
        while len(self._files) + len(kept) > self.max_pages:
            self._drop(next(iter(self._files)))
        for name, page in zip(kept, by_page, strict=True):
            self._files[name] = self._writer.submit(_write, self._path(name), page)

    def restore(self, names: Sequence[bytes], pages: Int32Array) -> int:
        """Fill pages up to the first that is missing or damaged."""
        shape, dtype = self._kv_cache.read_pages(self._index([0]))[:, :, 0].shape, self._dtype
        found: list[torch.Tensor] = []
        for name in names:
            if name not in self._files:
                break
            data = self._read(name)
            if data is None:
                self._drop(name)
                break
            found.append(torch.frombuffer(data, dtype=dtype, offset=_DIGEST_BYTES).view(shape))
        for name in reversed(names[: len(found)]):
            self._files.move_to_end(name)
        if found:
            index = self._index(pages[: len(found)].tolist())
            self._kv_cache.write_pages(index, torch.stack(found, dim=2).to(index.device))
        return len(found)

    def _read(self, name: bytes) -> bytearray | None:
        """The file of a page once it is written; None if it is not what was saved."""
        try:
            self._files[name].result()
            data = bytearray(self._path(name).read_bytes())
        except OSError as error:
            logger.warning("a page in %s is lost and computed again: %s", self.folder, error)
            return None
        content = memoryview(data)[_DIGEST_BYTES:]
        if len(content) == 0 or xxhash.xxh3_128_digest(content) != data[:_DIGEST_BYTES]:
            logger.warning("a page in %s is damaged and computed again", self.folder)
            return None
        return data

    def _drop(self, name: bytes) -> None:
        del self._files[name]
        self._writer.submit(self._path(name).unlink, missing_ok=True)  # behind its own write

    def _path(self, name: bytes) -> Path:
        return self.folder / name.hex()

    @property
    def _dtype(self) -> torch.dtype:
        stored = self._kv_cache.k.dtype
        return torch.uint8 if stored.itemsize == 1 else stored

    def _index(self, pages: list[int]) -> torch.Tensor:
        return torch.tensor(pages, device=self._kv_cache.k.device)


def check_directory(path: str | None) -> None:
    """Raise `ConfigError` unless a folder can be made in the directory ``path``; None is always right."""
    if path is not None and not (os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)):
        raise ConfigError(f"page_store_path: {path!r} is no directory that can be written to")


def _write(path: Path, page: torch.Tensor) -> None:
    content = page.reshape(-1).view(torch.uint8).numpy().tobytes()
    with path.open("wb") as file:
        file.write(xxhash.xxh3_128_digest(content))
        file.write(content)


def _remove(writer: ThreadPoolExecutor, folder: Path) -> None:
    writer.shutdown(wait=True, cancel_futures=True)
    shutil.rmtree(folder, ignore_errors=True)
