"""A real HTTP server for tests of downloads, which can also misbehave. It counts what it was asked for and what it sent."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Server:
    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    etags: dict[str, str] = field(default_factory=dict)
    faults: dict[str, list[Any]] = field(default_factory=dict)
    """What goes wrong with a path, one after another: a function of the handler, or after how many bytes it hangs up."""
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    bytes_sent: dict[str, int] = field(default_factory=dict)
    ignores_range: bool = False
    pause_seconds: float = 0.0
    """After each 64 kB: a slow network."""
    hold_at: int | None = None
    """An answer stops after so many bytes until `released` is set: a network that stands still."""
    released: threading.Event = field(default_factory=threading.Event)

    def count(self, name: str) -> int:
        return sum(path == f"/{name}" for path, _ in self.requests)

    def ranges(self, name: str) -> list[str | None]:
        return [headers.get("Range") for path, headers in self.requests if path == f"/{name}"]

    def publish(self, *entries: dict[str, Any], **files: bytes) -> str:
        """Serve these files and a manifest of them; the manifest's address."""
        rows = []
        for name, data in files.items():
            name = name.replace("_", ".")
            self.files[f"/{name}"] = data
            rows.append(row(name, data))
        self.files["/manifest.json"] = json.dumps({"files": [*rows, *entries]}).encode()
        return f"{self.url}/manifest.json"


def row(path: str, data: bytes, **more: Any) -> dict[str, Any]:
    return {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest(), **more}


class Handler(BaseHTTPRequestHandler):
    state: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.state.requests.append((path, dict(self.headers.items())))
        faults = self.state.faults.get(path, [])
        fault = faults.pop(0) if faults else None
        if callable(fault):
            fault(self)
        elif path not in self.state.files:
            self.send_error(404)
        else:
            self.send_file(path, cut=fault)

    def send_file(self, path: str, cut: int | None = None) -> None:
        data, etag = self.state.files[path], self.state.etags.get(path)
        start = self._start(etag)
        if start > 0 and start >= len(data):
            self.send_response(416)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        if etag:
            self.send_header("ETag", etag)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        self.send_body(data[start:] if cut is None else data[start : start + cut])

    def _start(self, etag: str | None) -> int:
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        wished = self.headers.get("If-Range")
        return 0 if found is None or self.state.ignores_range or (wished is not None and wished != etag) else int(found[1])

    def send_body(self, data: bytes) -> bool:
        """Is the other side still there?"""
        path = self.path.partition("?")[0]
        for at in range(0, len(data), 2**16):
            try:
                self.wfile.write(data[at : at + 2**16])
            except OSError:  # the other side has gone
                return False
            self.state.bytes_sent[path] = self.state.bytes_sent.get(path, 0) + len(data[at : at + 2**16])
            if self.state.pause_seconds:
                time.sleep(self.state.pause_seconds)
            if self.state.hold_at is not None and at + 2**16 >= self.state.hold_at:
                self.state.released.wait(60)
        return True


def answers(status: int, body: bytes = b"", **headers: str) -> Callable[[Handler], None]:
    """A fault: this answer, whatever was asked for."""

    def fault(handler: Handler) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **{k.replace("_", "-"): v for k, v in headers.items()}}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.send_body(body)

    return fault


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that hang up, and are killed, are what is tested


@contextlib.contextmanager
def serving(wrap: Callable[[socket.socket], socket.socket] | None = None) -> Iterator[Server]:
    state = Server()
    handler = type("Bound", (Handler,), {"state": state})
    server = _QuietServer(("127.0.0.1", 0), handler)
    if wrap is not None:
        server.socket = wrap(server.socket)
    state.url = f"http{'s' if wrap else ''}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, links as their targets; notes of the downloader are left out."""
    found: dict[str, bytes | None] = {}
    for path in sorted(folder.rglob("*")):
        if path.name.startswith(".fleetx-"):
            continue
        name = str(path.relative_to(folder))
        found[name] = str(path.readlink()).encode() if path.is_symlink() else None if path.is_dir() else path.read_bytes()
    return found
