"""Laws of alarms.py."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import DiskError, Interrupted, RankLost
from megatrain.run import alarms
from megatrain.run.alarms import LONG_S, QUIET_S, Alarms, Trouble, Troubles

TROUBLE = Trouble(kind="spike", text="loss 9.1 is far above 2.3", step=7)


@pytest.mark.parametrize(
    ("name", "record", "said"),
    [
        ("metrics.jsonl", {"step": 7, "spike": "loss 9.1"}, "spike: step 7: loss 9.1"),
        ("metrics.jsonl", {"step": 7, "loss": 9.1}, None),
        ("metrics.jsonl", {"step": 7, "eval_loss": 9.1}, None),
        ("events.jsonl", {"event": "saved", "step": 7}, None),
        ("events.jsonl", {"event": "save failed", "step": 7, "error": "full"}, None),
        ("events.jsonl", {"event": "interrupted", "step": 7, "reason": "rank 2: SIGTERM"}, None),
        ("events.jsonl", {"event": "interrupted", "step": 7, "reason": "only 0.1 GiB"},
         "memory: step 7: only 0.1 GiB"),
        ("events.jsonl", {"event": "rolled back", "step": 7, "to": 4, "reason": "nan"},
         "rolled back: step 7: went back to the checkpoint of step 4: nan"),
        ("events.jsonl", {"event": "slow rank", "step": 7, "text": "rank 3"},
         "slow rank: step 7: rank 3"),
        ("samples.jsonl", {"step": 7, "text": "spike"}, None),
    ],
)  # fmt: skip
def test_lines_that_are_trouble(name: str, record: dict[str, Any], said: str | None) -> None:
    found = Troubles().heard(name, record, 0.0)
    assert (None if found is None else str(found)) == said


def test_saves_that_fail_are_trouble_only_after_a_while_and_until_one_succeeds() -> None:
    troubles = Troubles()
    failed = {"event": "save failed", "step": 7, "error": "the disk is full"}
    troubles.heard("events.jsonl", failed, 0.0)
    troubles.heard("events.jsonl", failed, LONG_S - 1)
    assert troubles.overdue(LONG_S - 1) is None
    assert str(troubles.overdue(LONG_S)) == (
        "save fails: step 7: no save has succeeded for 10 min: the disk is full"
    )
    assert troubles.overdue(LONG_S + QUIET_S - 1) is None
    assert troubles.overdue(LONG_S + QUIET_S) is not None
    troubles.heard("events.jsonl", {"event": "saved", "step": 8}, 0.0)
    assert troubles.overdue(10 * QUIET_S) is None


def test_a_kind_is_reported_once_in_a_while_and_the_silent_ones_are_counted() -> None:
    troubles, spike = Troubles(), {"step": 7, "spike": "loss 9.1"}
    found = [troubles.heard("metrics.jsonl", spike, float(now)) for now in range(0, 2000, 600)]
    assert [one is None for one in found] == [False, True, True, False]
    assert str(found[-1]) == "spike: step 7: loss 9.1 (2 more since the last report)"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RankLost("rank 3 is lost"), "rank lost"),
        (DiskError("gone"), "failed"),
        (Interrupted("SIGTERM"), None),
        (KeyboardInterrupt(), None),
    ],
)
def test_errors_that_end_a_run_are_trouble_and_requests_are_not(
    error: BaseException, kind: str | None
) -> None:
    found = Troubles().ended(error, 7, 0.0)
    assert (None if found is None else found.kind) == kind


def called(wanted: str, tmp_path: Path) -> list[str]:
    """Call once; return what was said."""
    said: list[str] = []
    sender = Alarms(wanted, tmp_path / "mine", said.append)
    sender.send(TROUBLE)
    sender.close()
    return said


def test_a_command_gets_the_trouble(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert called(f'cat > {out}; echo "$MEGATRAIN_EVENT $MEGATRAIN_STEP" >> {out}', tmp_path) == []
    body, variables = out.read_text().splitlines()
    facts = json.loads(body)
    assert (facts["event"], facts["step"], facts["run"]) == ("spike", 7, str(tmp_path / "mine"))
    assert facts["text"].startswith("mine on ")
    assert facts["text"].endswith(str(TROUBLE))
    assert variables == "spike 7"


def test_a_command_that_fails_is_one_line(tmp_path: Path) -> None:
    (line,) = called("exit 3", tmp_path)
    assert line == f"log.on_trouble: the command ended with 3. It was called for: {TROUBLE}"


@pytest.mark.parametrize("wanted", ["$ALARM_URL", "${ALARM_URL}"])
@pytest.mark.parametrize("value", [None, ""])
def test_a_variable_that_is_not_set_is_said_when_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, value: str | None
) -> None:
    """The shell runs an empty command, which succeeds."""
    monkeypatch.delenv("ALARM_URL", raising=False)
    if value is not None:
        monkeypatch.setenv("ALARM_URL", value)
    first, last = called(wanted, tmp_path)
    assert first == (
        f"log.on_trouble: the variable {wanted} is not set: nobody will be called. Set it, and "
        "resume the run"
    )
    assert last.startswith(f"log.on_trouble: the variable {wanted} is not set. It was called for: ")
    monkeypatch.setenv("ALARM_URL", "true")
    assert called(wanted, tmp_path) == []


def test_a_command_that_hangs_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarms, "LIMIT_S", 0.3)
    late = tmp_path / "late"
    (line,) = called(f"(sleep 0.6; touch {late}) & sleep 100", tmp_path)
    assert "took longer than 0.3 s and was ended" in line
    time.sleep(0.8)
    assert not late.exists()


class Hook(BaseHTTPRequestHandler):
    """Answers as its server is told, and keeps what it got."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append(json.loads(body))  # type: ignore[attr-defined]
        self.send_response(self.server.answer)  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Hook)
    server.got, server.answer = [], 200  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_webhook_gets_the_trouble_also_by_a_variable(
    hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"http://127.0.0.1:{hook.server_port}/secret"
    assert called(address, tmp_path) == []
    monkeypatch.setenv("ALARM_URL", address)
    assert called("$ALARM_URL", tmp_path) == []
    assert [one["event"] for one in hook.got] == ["spike", "spike"]
    hook.answer = 500
    (line,) = called("${ALARM_URL}", tmp_path)
    assert line.startswith("log.on_trouble: the webhook answered 500.")
    assert "secret" not in line


def test_a_server_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    (line,) = called("http://127.0.0.1:9/secret", tmp_path)
    assert line.startswith("log.on_trouble: the webhook cannot be reached")
    assert "secret" not in line


@pytest.mark.parametrize("rest", ["/a secret", "/s\u00e9cret/secret"])
def test_an_address_that_is_none_is_not_printed(tmp_path: Path, rest: str) -> None:
    for address in (f"http://127.0.0.1:9{rest}", "http://me:secret@127.0.0.1/"):
        (line,) = called(address, tmp_path)
        assert line.startswith("log.on_trouble: the webhook's address or its answer is not as HTTP")
        assert "secret" not in line


def test_a_sender_never_blocks_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarms, "LIMIT_S", 0.2)
    said: list[str] = []
    sender = Alarms("sleep 100", tmp_path, said.append)
    for _ in range(20):
        sender.send(TROUBLE)
    assert any("not called, 8 calls wait" in line for line in said)
    sender.close()
