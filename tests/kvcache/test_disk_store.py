"""Pages on disk: what is missing, damaged or does not fit costs time, and never a wrong token."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from minisgl.kvcache import disk_store
from minisgl.kvcache.disk_store import DiskStore
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from tests.contracts.test_page_store import content, ids, names, random_cache
from tests.model_zoo import tiny_checkpoint

PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
PROMPTS = [list(range(first, first + 42)) for first in (0, 50, 0, 100, 50, 0)]


def store_in(tmp_path: Path, max_pages: int = 8) -> DiskStore:
    return DiskStore(random_cache(), max_pages, str(tmp_path))


@pytest.mark.parametrize("damage", ["a bit", "cut off", "empty", "gone"])
def test_a_damaged_page_ends_what_is_restored(tmp_path: Path, damage: str) -> None:
    store = store_in(tmp_path)
    cache = store._kv_cache
    saved = content(cache, 1, 2, 3)
    store.save(names(1, 2, 3), ids(1, 2, 3))
    assert store.restore(names(1, 2, 3), ids(4, 5, 6)) == 3
    file = store._path(names(2)[0])
    data = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    else:
        data[-1] ^= 1
        file.write_bytes({"a bit": data, "cut off": data[:-8], "empty": b""}[damage])
    before = content(cache, 8, 9)
    assert store.restore(names(1, 2, 3), ids(7, 8, 9)) == 1
    assert torch.equal(content(cache, 7), saved[:, :, :1])
    assert torch.equal(content(cache, 8, 9), before)
    store.save(names(2), ids(2))
    assert store.restore(names(1, 2, 3), ids(7, 8, 9)) == 3
    assert torch.equal(content(cache, 7, 8, 9), saved)


def test_the_least_recently_used_file_makes_room(tmp_path: Path) -> None:
    store = store_in(tmp_path, max_pages=3)
    store.save(names(1, 2, 3), ids(1, 2, 3))
    store.restore(names(1), ids(9))
    store.save(names(4), ids(4))
    assert [number for number in (1, 2, 3, 4) if store.restore(names(number), ids(9))] == [1, 3, 4]
    store._writer.shutdown()
    assert len(list(store.folder.iterdir())) == 3


def test_the_folder_goes_with_the_store(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.save(names(1, 2, 3), ids(1, 2, 3))
    assert list(tmp_path.iterdir()) == [store.folder]
    del store
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_costs_time_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    write = disk_store._write

    def sometimes_full(path: Path, page: torch.Tensor) -> None:
        written.append(path)
        if len(written) % 3 == 0:
            raise OSError(28, "No space left on device")
        write(path, page)

    monkeypatch.setattr(disk_store, "_write", sometimes_full)
    checkpoint, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    llm = LLM(checkpoint, device="cpu", page_size=4, num_pages=16, page_store="disk", page_store_path=str(tmp_path))
    answers = [llm.generate([prompt], PARAMS)[0].token_ids for prompt in PROMPTS]
    offload = llm.scheduler.memory.offload
    assert offload is not None
    assert 0 < offload.restored < offload.wanted
    alone = LLM(checkpoint, device="cpu", page_size=4, num_pages=200)
    assert answers == [alone.generate([prompt], PARAMS)[0].token_ids for prompt in PROMPTS]
