"""``python -m tools.fuzz_api``: requests made up from ``/openapi.json``, sent to a server with a tiny random model.

Its engine is in processes of its own, as that of ``python -m minisgl.serve`` is.

Schemathesis makes them, good ones and bad ones. It fails on any 5xx, on a status, a media type or a body that the
document does not tell, and on bad requests that are taken.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from minisgl.server.config import ServerConfig
from tests.server.harness import ProcessServer, chat_checkpoint
from tests.server.templates import QWEN

OPERATIONS = 6
"""Those with many fields; each gets its share of the cases, and those with few run out of ideas earlier."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of Schemathesis: 0 if nothing was found."""
    parser = argparse.ArgumentParser("python -m tools.fuzz_api", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="about how many requests to send")
    parser.add_argument("--seed", type=int, default=0, help="the same seed makes up the same requests")
    arguments = parser.parse_args(argv)
    with (
        tempfile.TemporaryDirectory() as directory,
        ProcessServer(chat_checkpoint(Path(directory), QWEN), ServerConfig(), max_seq_len=64, num_pages=512) as server,
    ):
        document = Path(directory, "openapi.json")
        document.write_bytes(server.http.get("/openapi.json").content)
        command = _command(document, server.url, arguments.cases, arguments.seed)
        return subprocess.run(command, cwd=directory, check=False).returncode  # it keeps notes where it runs


def _command(document: Path, url: str, cases: int, seed: int) -> list[str]:
    options = {
        "--url": url,
        "--max-examples": cases // OPERATIONS,
        "--seed": seed,
        "--checks": "all",
        # Rules between two fields, such as "give one of them", are told in words only.
        "--exclude-checks": "positive_data_acceptance",
        "--suppress-health-check": "all",
        "--phases": "coverage,fuzzing",
        "--request-timeout": 60,
    }
    words = [str(word) for option in options.items() for word in option]
    return [sys.executable, "-m", "schemathesis.cli", "run", str(document), *words]


if __name__ == "__main__":
    sys.exit(main())
