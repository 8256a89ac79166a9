"""A pytest plugin: kernels of notebooks talk over sockets in the file system.

A TCP port is chosen before the kernel starts and bound by it later. Of two kernels that start at the same moment, as
under ``pytest -n 2 --nbmake``, both may have chosen the same one, and then one of them dies.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from uuid import uuid4


def pytest_configure() -> None:
    """Where there is no Jupyter there are no kernels."""
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
