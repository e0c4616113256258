"""Laws of serving.py, asked over a plain socket."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import ConfigError
from megatrain.report import serving
from megatrain.report.serving import open_server
from tests.report.fake_runs import write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "mine", num_steps=20)


@pytest.fixture
def server(run: Path) -> Iterator[Any]:
    with open_server(run, 0) as opened:
        thread = threading.Thread(target=opened.serve_forever, args=(0.01,))
        thread.start()
        yield opened
        opened.shutdown()
        thread.join()


def ask(server: Any, path: str = "/", method: str = "GET", *hosts: str) -> tuple[int, str]:
    """Return the status of an answer, and all of it."""
    lines = [f"{method} {path} HTTP/1.1", *(f"Host: {host}" for host in hosts or ("localhost",))]
    with socket.create_connection(server.server_address) as asked:
        asked.sendall("\r\n".join([*lines, "", ""]).encode())
        data = b""
        while piece := asked.recv(1 << 16):
            data += piece
    text = data.decode()
    return int(text.split()[1]), text


def test_the_page_is_the_report_and_loads_itself_again(server: Any) -> None:
    status, text = ask(server)
    assert status == 200
    assert "<title>mine - MegaTrain report</title>" in text
    assert "\r\nRefresh: 5\r\n" in text
    assert "\r\nCache-Control: no-store\r\n" in text
    assert "<script" not in text
    status, head = ask(server, "/", "HEAD")
    assert (status, "<html" in head) == (200, False)


def test_the_page_follows_the_run_until_it_has_ended(server: Any, run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 21, "loss": 0.5}) + "\n")
    assert "21 steps" in ask(server)[1]
    (run / "heartbeat.json").write_text('{"state": "ended"}')
    assert "Refresh" not in ask(server)[1]


def test_it_listens_on_the_loopback_alone(server: Any) -> None:
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "hosts",
    [
        ("evil.example",), ("evil.example:8990",), ("127.0.0.1.evil.example",), ("localhost.evil",),
        ("",), ("127.0.0.1@evil.example",), ("127.0.0.1", "evil.example"), ("[::1]",), ("0.0.0.0",),
        ("localhost:80:evil.example",),
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_request_for_another_host_is_refused(
    server: Any, method: str, hosts: tuple[str, ...]
) -> None:
    status, text = ask(server, "/", method, *hosts)
    assert status == 403
    assert "<html" not in text


@pytest.mark.parametrize("host", ["127.0.0.1", "LOCALHOST:9000", "127.0.0.1:8990"])
def test_a_request_through_a_tunnel_is_answered(server: Any, host: str) -> None:
    assert ask(server, "/", "GET", host)[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/config.yaml", "/../secret", "//etc/passwd", "/%2e%2e/secret", "/..%2fsecret", "/?x=1",
        "/./", "/metrics.jsonl", "http://127.0.0.1/etc/passwd", "/\\..\\secret", "*",
    ],
)  # fmt: skip
def test_no_path_but_one_exists(server: Any, run: Path, path: str) -> None:
    (run.parent / "secret").write_text("hidden")
    status, text = ask(server, path)
    assert status == 404
    assert "hidden" not in text


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "MKCOL", "get"]
)
def test_it_only_reads(server: Any, run: Path, method: str) -> None:
    before = {path: path.read_bytes() for path in run.iterdir()}
    status, text = ask(server, "/", method)
    assert status == 405
    assert "<title>mine" not in text
    assert {path: path.read_bytes() for path in run.iterdir()} == before


@pytest.mark.parametrize("name", serving.READ)
def test_a_link_that_leads_out_is_refused(server: Any, run: Path, name: str) -> None:
    secret = run.parent / "secret"
    secret.write_text("hidden: true")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(secret)
    status, text = ask(server)
    assert status == 503
    assert "hidden: true" not in text


def test_a_link_that_nobody_checked_would_be_noticed(
    server: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.parent / "secret").write_text("hidden: true")
    (run / "config.yaml").unlink()
    (run / "config.yaml").symlink_to(run.parent / "secret")
    monkeypatch.setattr(Path, "is_relative_to", lambda *_: True)
    assert "hidden: true" in ask(server)[1]


def test_a_port_in_use_is_named(server: Any, run: Path) -> None:
    port = server.server_address[1]
    with pytest.raises(ConfigError, match=rf"cannot listen on port {port} of 127\.0\.0\.1: "):
        open_server(run, port)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        open_server(tmp_path, 0)
