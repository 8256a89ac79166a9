"""A pytest plugin for notebooks: how long one may run, and how its kernel is reached.

A notebook gets `SECONDS` instead of nbmake's 300 and the 300 of a test, so that plain ``pytest --nbmake notebooks/``
does what ``make notebooks`` does: the first cell of the first one may fetch the default model.

Kernels talk over sockets in the file system. A TCP port is chosen before the kernel starts and bound later; of two
kernels that start at the same moment, as under ``pytest -n 2 --nbmake``, both may choose the same one, and one dies.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from uuid import uuid4

import pytest

SECONDS = 900
"""Time limit of a cell and of a whole notebook, unless the command line names another."""
_NBMAKE_DEFAULT = 300


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give notebooks their time limit."""
    if config.getoption("timeout", None) is None:
        for item in items:
            if getattr(item, "nbmake", False):
                item.add_marker(pytest.mark.timeout(SECONDS))


def pytest_configure(config: pytest.Config) -> None:
    """Raise nbmake's limit, and let kernels listen on files where there is Jupyter."""
    if config.getoption("nbmake_timeout", None) == _NBMAKE_DEFAULT:
        config.option.nbmake_timeout = SECONDS
    if find_spec("jupyter_client") is None:
        return
    import jupyter_client
    from traitlets import default

    class LocalKernelManager(jupyter_client.AsyncKernelManager):
        @default("transport")
        def _local(self) -> str:
            return "ipc"

        @default("ip")
        def _path(self) -> str:
            """Absolute, since kernel and client have working directories of their own; short, as sockets' paths are."""
            return str(Path(gettempdir(), f"kernel-{uuid4().hex[:12]}"))

    # nbclient looks the class up by this name whenever it is given none.
    jupyter_client.AsyncKernelManager = LocalKernelManager
