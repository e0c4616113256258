"""Alarms: a command or a webhook is called when a run is in trouble (`log.on_trouble`).

    lines of metrics.jsonl and events.jsonl --Troubles--> Trouble --Alarms--> command or webhook

`Troubles` decides what is worth an alarm: a spike, a rollback, a slow rank, memory that runs out,
an error that ends the run, and saves or uploads that have failed for ten minutes without a success.
The same kind of trouble is reported once in half an hour, and the next report counts those between.

`Alarms` has one thread, which calls, and a short queue. A call that takes longer than its limit is
ended, with all processes that it started. Nothing is ever passed back to the run.

Laws (tests/run/test_alarms.py)
    1. Each kind of trouble is reported, once, and what is not trouble never is.
    2. A command gets the trouble as JSON on its standard input and as variables, a webhook as the
       body of a POST.
    3. Whatever the command or the server does, the run goes on: a call never takes longer than its
       limit, and a failure is one line on the console.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.errors import Interrupted, RankLost
from megatrain.progress import Say

LONG_S = 600.0
"""So long saves may fail, after the first one that did, before it is trouble."""
QUIET_S = 1800.0
"""Least time between two reports of the same kind."""
LIMIT_S = 10.0
"""Most time of a call, and most time that the end of a run waits for calls."""
_MOST_WAITING = 8
_MOST_TEXT = 2000
_TRIED = {
    "saved": ("save", True),
    "save failed": ("save", False),
    "uploaded": ("upload", True),
    "upload failed": ("upload", False),
}
"""Events of what a run tries again: its name, and whether it succeeded."""
_WORDS = {
    "rolled back": "went back to the checkpoint of step {to}: {reason}",
    "memory damaged": "went back to the checkpoint of step {to}: {reason}",
    "slow rank": "{text}",
}
"""Events that are trouble by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """One report."""

    kind: str
    text: str
    step: int
    num_silent: int = 0
    """Troubles of this kind since the last report of one, which were not reported."""

    def __str__(self) -> str:
        more = f" ({self.num_silent} more since the last report)" if self.num_silent else ""
        return f"{self.kind}: step {self.step}: {self.text}{more}"[:_MOST_TEXT]


class Troubles:
    """Pure state: the caller passes in lines and the time."""

    def __init__(self) -> None:
        self._failing: dict[str, tuple[float, int, str]] = {}
        """What fails, by name: since when, the step and the reason of the last failure."""
        self._reported: dict[str, float] = {}
        self._num_silent: dict[str, int] = {}

    def heard(self, name: str, record: Mapping[str, Any], now: float) -> Trouble | None:
        """Return what a line of `metrics.jsonl` or `events.jsonl` has to report, if anything."""
        step, event = int(record.get("step", 0)), str(record.get("event"))
        if name == "metrics.jsonl":
            spike = record.get("spike")
            return None if spike is None else self._report("spike", str(spike), step, now)
        if event in _TRIED:
            what, succeeded = _TRIED[event]
            if succeeded:
                self._failing.pop(what, None)
            else:
                since = self._failing.get(what, (now, 0, ""))[0]
                self._failing[what] = since, step, str(record.get("error", ""))
        elif event == "interrupted" and "SIG" not in str(record.get("reason")):
            return self._report("memory", str(record.get("reason")), step, now)
        elif event in _WORDS:
            return self._report(event, _WORDS[event].format_map(record), step, now)
        return None

    def overdue(self, now: float) -> Trouble | None:
        """Return the report of a save or an upload that has failed for long."""
        for what, (since, step, reason) in self._failing.items():
            kind = f"{what} fails"
            if now - since >= LONG_S and now - self._reported.get(kind, -QUIET_S) >= QUIET_S:
                text = f"no {what} has succeeded for {(now - since) / 60:.0f} min: {reason}"
                return self._report(kind, text, step, now)
        return None

    def ended(self, error: BaseException, step: int, now: float) -> Trouble | None:
        """Return the report of the error that ends a run; a request to end is none."""
        if isinstance(error, Interrupted) or not isinstance(error, Exception):
            return None
        kind = "rank lost" if isinstance(error, RankLost) else "failed"
        self._reported.pop(kind, None)  # it is the last one
        return self._report(kind, str(error) or type(error).__name__, step, now)

    def _report(self, kind: str, text: str, step: int, now: float) -> Trouble | None:
        if now - self._reported.get(kind, -QUIET_S) < QUIET_S:
            self._num_silent[kind] = self._num_silent.get(kind, 0) + 1
            return None
        self._reported[kind] = now
        return Trouble(kind=kind, text=text, step=step, num_silent=self._num_silent.pop(kind, 0))


class Alarms:
    """Calls a command or a webhook from a thread of its own; without one it does nothing."""

    def __init__(self, wanted: str | None, run: Path, say: Say) -> None:
        """`wanted` is a shell command, an http or https URL, or a variable that has the URL."""
        self._wanted = wanted
        self._run = run
        self._say = say
        self._waiting: queue.Queue[Trouble | None] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        if wanted is not None:
            if (lack := _unset(wanted)) is not None:
                say(f"log.on_trouble: {lack}: nobody will be called. Set it, and resume the run")
            self._thread = threading.Thread(target=self._work, name="alarms", daemon=True)
            self._thread.start()

    def send(self, trouble: Trouble | None) -> None:
        """Call soon; return at once."""
        if trouble is None or self._thread is None:
            return
        try:
            self._waiting.put_nowait(trouble)
        except queue.Full:
            self._say(f"log.on_trouble: not called, {_MOST_WAITING} calls wait: {trouble}")

    def close(self) -> None:
        """Wait for the calls that are due, no longer than one may take."""
        if self._thread is not None:
            with suppress(queue.Full):
                self._waiting.put_nowait(None)
            self._thread.join(LIMIT_S + 1.0)
            self._thread = None

    def _work(self) -> None:
        while (trouble := self._waiting.get()) is not None:
            try:
                failure = self._call(trouble)
            except Exception as error:  # a library's own, and a network's
                failure = f"{type(error).__name__}: {error}"
            if failure is not None:
                self._say(f"log.on_trouble: {failure[:300]}. It was called for: {trouble}")

    def _call(self, trouble: Trouble) -> str | None:
        """Call; return what went wrong."""
        wanted = str(self._wanted)
        facts = {
            "text": f"{self._run.name} on {socket.gethostname()}: {trouble}",
            "event": trouble.kind,
            "step": trouble.step,
            "run": str(self._run.absolute()),
            "host": socket.gethostname(),
            "time": time.time(),
        }
        if (lack := _unset(wanted)) is not None:  # the shell would run nothing, and succeed
            return lack
        place = os.path.expandvars(wanted)
        if place.startswith(("http://", "https://")):
            return _post(place, json.dumps(facts).encode())
        return _run(wanted, facts)


def _unset(wanted: str) -> str | None:
    """Return that a variable that is to have the address is empty, if it is."""
    name = re.fullmatch(r"\$(?:(\w+)|\{(\w+)\})", wanted.strip())
    if name is None or os.environ.get(name[1] or name[2], "").strip():
        return None
    return f"the variable {wanted.strip()} is not set"


def _post(url: str, body: bytes) -> str | None:
    """Send a POST; return what went wrong. The address may hold a secret, and is never printed."""
    request = urllib.request.Request(
        url, data=body, headers={"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S):
            return None
    except urllib.error.HTTPError as error:
        return f"the webhook answered {error.code}"
    except (urllib.error.URLError, OSError) as error:
        return f"the webhook cannot be reached: {getattr(error, 'reason', error)}"
    except (ValueError, http.client.HTTPException) as error:  # their texts quote the address
        return f"the webhook's address or its answer is not as HTTP has it ({type(error).__name__})"


def _run(command: str, facts: Mapping[str, Any]) -> str | None:
    """Run a shell command; return what went wrong.

    Python starts it without a copy of this process's pages, which may be all of host memory.
    """
    names = {f"MEGATRAIN_{name.upper()}": str(value) for name, value in facts.items()}
    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        env=os.environ | names,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the run; and all of it can be ended
    )
    try:
        process.communicate(json.dumps(facts).encode() + b"\n", timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"the command took longer than {LIMIT_S:g} s and was ended"
    return f"the command ended with {process.returncode}" if process.returncode else None
