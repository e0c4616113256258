"""Object storage on loopback (moto), and a door before it that drops, slows, fails and lies.

    python -m proofs.bucket.server     # prints {"door": URL, "storage": URL}, ends with its input

POST /-/faults at the door takes a list of {"kind", "after", "count", "seconds"}, and answers how
many requests each fault of the list before has met. After so many requests so many are disturbed;
where several faults meet a request, the first one does. Listings are counted by themselves.

    500, 503   are answered so, unasked
    drop       the connection is closed before the storage is asked
    lost       the storage does what was asked, and the connection is closed without an answer
    cut        the answer ends in the middle
    slow       the answer comes late, beyond what a client waits
    list       listings lack every second object, or, every second time, all of them
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KINDS = ("500", "503", "drop", "lost", "cut", "slow", "list")
_CONTENTS = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)


class Door(ThreadingHTTPServer):
    """Passes requests on to the storage, but for those that are to be disturbed."""

    daemon_threads = True

    def __init__(self, storage: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.storage = storage
        self._lock = threading.Lock()
        self._faults: list[dict[str, Any]] = []
        self._seen: Counter[bool] = Counter()
        self._met: Counter[int] = Counter()

    def set(self, faults: list[dict[str, Any]]) -> list[int]:
        """Disturb requests from here on; return how many each fault until here has met."""
        with self._lock:
            met = [self._met[number] for number in range(len(self._faults))]
            self._faults = faults
            self._seen.clear()
            self._met.clear()
            return met

    def fault(self, *, lists: bool) -> dict[str, Any]:
        """Return the fault of the next request, without a kind if it has none."""
        with self._lock:
            self._seen[lists] += 1
            for number, fault in enumerate(self._faults):
                ordinal = self._seen[lists] - fault["after"]
                if (fault["kind"] == "list") == lists and 0 < ordinal <= fault["count"]:
                    self._met[number] += 1
                    return fault | {"ordinal": ordinal}
            return {"kind": None}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no news."""


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Door

    def _pass(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if self.path == "/-/faults":
            met = self.server.set(json.loads(body))
            self._answer(200, {}, json.dumps(met).encode())
            return
        found = self.server.fault(lists="list-type=2" in self.path)
        fault = found["kind"]
        if fault in ("500", "503"):
            self._answer(int(fault), {}, b"<Error><Code>Disturbed</Code></Error>")
            return
        if fault == "drop":
            self._hang_up()
            return
        if fault == "slow":
            time.sleep(found["seconds"])
        status, headers, data = self._asked(body)
        if fault == "lost":
            self._hang_up()
            return
        if fault == "list":
            half, number = found["ordinal"] % 2, iter(range(1 << 30))
            data = _CONTENTS.sub(lambda one: one[0] if half and next(number) % 2 else b"", data)
            headers.pop("Content-Length", None)
        if fault == "cut" and data:
            self._answer(status, headers, data, len(data) // 2)
            self._hang_up()
            return
        self._answer(status, headers, data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass  # noqa: N815

    def _asked(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(*self.server.storage)
        try:
            headers = {name: value for name, value in self.headers.items() if name != "Connection"}
            connection.request(self.command, self.path, body=body or None, headers=headers)
            answer = connection.getresponse()
            kept = {
                name: value
                for name, value in answer.getheaders()
                if name.lower() not in ("connection", "transfer-encoding", "server", "date")
            }
            return answer.status, kept, answer.read()
        finally:
            connection.close()

    def _answer(
        self, status: int, headers: dict[str, str], data: bytes, stop: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if not any(name.lower() == "content-length" for name in headers):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:stop])

    def _hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def main() -> None:
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    door = Door((host, port))
    threading.Thread(target=door.serve_forever, daemon=True).start()
    connection = http.client.HTTPConnection(host, port)
    connection.request("PUT", "/proof")
    connection.getresponse().read()
    urls = {"door": f"http://127.0.0.1:{door.server_port}", "storage": f"http://{host}:{port}"}
    print(json.dumps(urls), flush=True)
    sys.stdin.read()  # until who started it ends
    moto.stop()


if __name__ == "__main__":
    main()
