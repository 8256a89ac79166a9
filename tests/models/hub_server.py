"""A stand-in for the Hugging Face hub: the four routes that a download of a model repository uses."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """Serves repositories from memory.

    Args:
        repos: hub id → file name → content.
        gated: hub ids whose files need a login.
    """

    def __init__(self, repos: dict[str, dict[str, bytes]], gated: frozenset[str] = frozenset()) -> None:
        self.repos = repos
        self.gated = gated
        self.downloads: list[str] = []
        """Names of the files that were sent."""
        self.failing = False
        """Answer everything with status 500."""

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for one request."""
        repo = next((name for name in self.repos if f"/{name}/" in f"{path}/"), None)
        if self.failing:
            return 500, {}, b"{}"
        if repo is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if repo in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        files = self.repos[repo]
        if path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/main"):
            siblings = [{"rfilename": name} for name in files]
            return 200, {}, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings, "tags": []}).encode()
        if path.startswith(f"/api/models/{repo}/tree/"):
            tree = [{"type": "file", "path": n, "size": len(c), "oid": _etag(c)} for n, c in files.items()]
            return 200, {}, json.dumps(tree).encode()
        content = files[path.split(f"/resolve/{COMMIT}/")[1]]
        if method == "GET":
            self.downloads.append(path.rsplit("/", 1)[1])
        return 200, {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": COMMIT}, content


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serving(hub: HubServer) -> Iterator[str]:
    """Run ``hub`` on a free port; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.command, self.path.split("?")[0])
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            """Keep the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
