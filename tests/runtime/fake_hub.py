"""As much of the Hub as downloading a model needs, served from a folder on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Handler(http.server.BaseHTTPRequestHandler):
    repositories: dict[str, Path]
    asked: list[str]

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def _answer(self, body: bool) -> None:
        self.asked.append(f"{self.command} {self.path}")
        for name, folder in self.repositories.items():
            if self.path.startswith(f"/api/models/{name}/tree/"):
                entries = [self._entry(path) for path in sorted(folder.iterdir())]
                return self._send(json.dumps(entries).encode(), body, {"Content-Type": "application/json"})
            if self.path.startswith(f"/api/models/{name}"):
                files = [{"rfilename": path.name} for path in sorted(folder.iterdir())]
                info = {"id": name, "sha": COMMIT, "siblings": files, "private": False, "gated": False, "tags": []}
                return self._send(json.dumps(info).encode(), body, {"Content-Type": "application/json"})
            if self.path.startswith(f"/{name}/resolve/"):
                file = folder / self.path.rsplit("/", 1)[1]
                data = file.read_bytes()
                tag = hashlib.sha256(data).hexdigest()
                return self._send(data, body, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT})
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None

    @staticmethod
    def _entry(path: Path) -> dict[str, object]:
        return {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": "0" * 40}

    def _send(self, data: bytes, body: bool, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@contextlib.contextmanager
def serve(repositories: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Serve folders as repositories; yields the endpoint and, as they come, the requests."""
    asked: list[str] = []
    handler = type("Handler", (_Handler,), {"repositories": repositories, "asked": asked})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
