from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tools.pytest_copies import PytestCopies


@pytest.fixture(scope="module")
def copies() -> Iterator[PytestCopies]:
    with PytestCopies() as started:
        yield started


def run(copies: PytestCopies, folder: Path, test: str, seconds: float = 60.0, **environment: str) -> str:
    """Run one test in a folder, with a package of its own."""
    (folder / "test_it.py").write_text(test)
    (folder / "script.py").write_text("import sys, pytest\nsys.exit(pytest.main(sys.argv[1:]))")
    script = [str(folder / "script.py"), "-q", "-p", "no:cacheprovider"]
    return copies.run(script, folder, {**os.environ, **environment}, seconds)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_each_copy_imports_the_package_and_sees_the_settings_that_it_is_told_of(
    copies: PytestCopies, tmp_path: Path
) -> None:
    test = "import os, minisgl\ndef test_it(): assert minisgl.NAME == os.environ['WANTED']"
    for name in ("one", "other"):
        package = tmp_path / name / "minisgl"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"NAME = '{name}'")
        output = run(copies, tmp_path / name, test, WANTED=name, PYTHONPATH=str(tmp_path / name))
        assert "1 passed" in output


def test_what_fails_is_told_and_what_ends_its_process_takes_nobody_along(copies: PytestCopies, tmp_path: Path) -> None:
    assert "the reason" in run(copies, tmp_path, "def test_it(): assert False, 'the reason'")
    assert "passed" not in run(copies, tmp_path, "import os\ndef test_it(): os._exit(3)")
    assert "1 passed" in run(copies, tmp_path, "def test_it(): print('again')")


def test_time_that_is_over_ends_all_that_was_started(copies: PytestCopies, tmp_path: Path) -> None:
    test = (
        "import subprocess, time\n"
        "def test_it():\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    open('pid', 'w').write(str(child.pid))\n"
        "    time.sleep(600)"
    )
    noted = tmp_path / "pid"
    noted.touch()
    for seconds in (5.0, 20.0, 80.0):  # on a busy machine it takes long to come as far as that
        with pytest.raises(TimeoutError):
            run(copies, tmp_path, test, seconds)
        if noted.read_text():
            break
    child = int(noted.read_text())
    deadline = time.monotonic() + 60
    while is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "1 passed" in run(copies, tmp_path, "def test_it(): pass")


def test_a_process_that_is_gone_is_told_from_tests_that_fail(tmp_path: Path) -> None:
    with PytestCopies() as broken:
        broken._process.kill()
        broken._process.wait()
        with pytest.raises(BrokenPipeError):
            run(broken, tmp_path, "def test_it(): pass")
