"""The report of a run, served on the loopback; the page updates itself while the run trains.

    GET /    the page that `megatrain report` writes, made anew when a file of the run has changed

The browser loads the page again by itself (the header `Refresh`): the page has no script. The
server has one page and no files, so no path leads anywhere.

Laws (tests/report/test_serving.py)
    1. It listens on 127.0.0.1 alone.
    2. A request for another host is refused: a page of a stranger whose name was made to point
       here cannot read the report.
    3. It only reads: methods other than GET and HEAD are refused.
    4. Nothing outside of the run folder is served: no path but / exists, and a file of the folder
       that is a link to outside is refused.
"""

from __future__ import annotations

import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from megatrain.config.load import USED_NAME
from megatrain.errors import ConfigError, MegaTrainError, RunFolderError
from megatrain.report.page import render
from megatrain.report.run import FILES, read_run
from megatrain.report.terminal import is_over

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")
"""Hosts that a request may be for; the port may be that of a tunnel."""
LEAST_S, SHARE = 5, 20
"""The page is loaded again after so many seconds, or so many times the time to make it."""
READ = (*FILES, USED_NAME, "media.json", "heartbeat.json", "events.jsonl")
"""Files that the page is made of."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Page:
    """The page of one run, made anew when its files have changed. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mutex = threading.Lock()
        self._marks: object = None
        self._bytes = b""
        self.refresh_s: int | None = LEAST_S
        """Seconds until the page may be another; None: the run has ended."""

    def current(self) -> bytes:
        """Return the page. Raises MegaTrainError if there is no run, or a file leads out of it."""
        with self._mutex:
            marks = self._looked()
            if marks != self._marks:
                began = time.monotonic()
                run = read_run(self._folder, self._folder.absolute().name)
                self._bytes, self._marks = render([run]).encode(), marks
                least_s = max(LEAST_S, round(SHARE * (time.monotonic() - began)))
                self.refresh_s = None if is_over(run) else least_s
            return self._bytes

    def _looked(self) -> list[tuple[int, int] | None]:
        """Return the time and size of each file."""
        inside = self._folder.resolve()
        marks: list[tuple[int, int] | None] = []
        for name in READ:
            path = self._folder / name
            if not path.resolve().is_relative_to(inside):
                raise RunFolderError(f"{path} is a link that leads out of the run folder")
            found = path.stat() if path.exists() else None
            marks.append(None if found is None else (found.st_mtime_ns, found.st_size))
        return marks


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    page: Page


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "megatrain", ""
    timeout = 10

    def parse_request(self) -> bool:
        """Read a request; refuse it, whatever it asks for, unless it reads and names this host."""
        if not super().parse_request():
            return False
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or hosts[0].rsplit(":", 1)[0].lower() not in NAMES:
            self._answer(HTTPStatus.FORBIDDEN, b"this server is for 127.0.0.1 and localhost\n")
            return False
        if self.command not in ("GET", "HEAD"):
            self._answer(HTTPStatus.METHOD_NOT_ALLOWED, b"this server only reads\n")
            return False
        return True

    def do_GET(self) -> None:
        if self.path != "/":
            self._answer(HTTPStatus.NOT_FOUND, b"there is one page: /\n")
            return
        try:
            page = self.server.page.current()
        except (MegaTrainError, OSError) as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode())
            return
        self._answer(HTTPStatus.OK, page, "text/html")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, status: HTTPStatus, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        refresh_s = self.server.page.refresh_s
        if status is HTTPStatus.OK and refresh_s is not None:
            self.send_header("Refresh", str(refresh_s))
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def open_server(folder: Path, port: int) -> ThreadingHTTPServer:
    """Return a server of the report, which listens; `port` 0 takes a free one.

    Raises ConfigError if the port is in use, MegaTrainError if the folder has no run.
    """
    page = Page(folder)
    page.current()
    try:
        server = _Server((HOST, port), _Handler)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on port {port} of {HOST}: {error.strerror}. Give another with --port; "
            "0 takes a free one."
        ) from error
    server.page = page
    return server
