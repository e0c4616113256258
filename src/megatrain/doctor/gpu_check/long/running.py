"""A long check as processes: one for each part, one after another, within a time.

    for each part: skip it if its result is there  ->  start its process, and wait
                   ->  its result, or why there is none  ->  pages and archive, anew

The process of a part says what it does on its standard output, line by line; what it prints on the
other goes into its log. One that does not end is asked for its stacks (SIGABRT), and killed. If
this process is killed, the system ends that of the part.

Laws (tests/doctor/gpu_check/long/test_running.py)
    1. A part that fails, is killed or hangs leaves a result that says so, and the others run.
    2. What was done is not done again; what was not, is.
    3. No part begins once the time is over: those left are named.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import IO

from megatrain.doctor.gpu_check.findings import anonymous
from megatrain.doctor.gpu_check.long.parts import PARTS, TOTAL_S, Part
from megatrain.doctor.gpu_check.long.results import PartResult, PartState, ResultFolder
from megatrain.planning.machine.facts import host_facts
from megatrain.progress import Say
from megatrain.ranks.launcher import LAUNCHER

PART = "MEGATRAIN_CHECK_PART"
"""The variable that makes a process one of a part: its name and its seconds."""
GRACE_S = 45.0
"""For a part to start and, once its time is over, to end by itself."""
LEAST_S = 10.0
"""A part is not begun with less."""
_STACKS_S = 5.0
_POLL_S = 0.2
_MOST_REASON = 300
"""Characters of a part's last line that its result repeats."""


def machine_key(device: str) -> str:
    """Return the key under which results of this machine, device and software are found again."""
    return f"{host_facts().key} {device}"


def command_of(verb: str, words: Sequence[str] = sys.orig_argv) -> tuple[str, ...]:
    """Return the words before the verb with which this process was started, or our own."""
    if verb not in words:
        return (sys.executable, "-m", "megatrain")
    return (sys.executable, *words[1 : words.index(verb)])


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRun:
    """One run through the parts."""

    folder: ResultFolder
    machine: str
    command: tuple[str, ...]
    """Starts the process of a part, which the environment names."""
    say: Say
    write_pages: Callable[[], None]
    """Writes pages about the results into their folder."""
    parts: Sequence[Part] = PARTS
    total_s: float = TOTAL_S

    def run(self) -> list[PartResult]:
        """Run the parts that have no result yet; return the results of all."""
        self.folder.open()
        begin = time.monotonic()
        results = []
        for number, part in enumerate(self.parts, 1):
            say = _with_clock(self.say, begin, f"{number} of {len(self.parts)}, {part.name}")
            result = self.folder.read(part.name, self.machine)
            if result is None or not result.is_settled:
                result = self._ran(part, begin + self.total_s - time.monotonic(), say)
                self.folder.write(result)
                self.pack()
                say(f"{result.state} in {result.seconds:.0f} s {result.why}".rstrip())
            else:
                say("done before; delete its file to run it again")
            results.append(result)
        self.pack()
        return results

    def pack(self) -> None:
        """Write pages and archive anew."""
        self.write_pages()
        self.folder.pack()

    def _ran(self, part: Part, left_s: float, say: Say) -> PartResult:
        if left_s < LEAST_S:
            why = f"the {self.total_s / 60:.0f} minutes are over; run the command again for it"
            return self._result(part, "unfinished", why)
        begin, limit_s = time.monotonic(), min(part.budget_s, left_s)
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            with self._started(part, limit_s, log) as process:
                code = self._awaited(process, limit_s, say)
            log.seek(0)
            printed = log.read()
            self.folder.attach_log(f"{part.name}.log", printed)
        seconds = time.monotonic() - begin
        result = self.folder.read(part.name, self.machine)
        if result is None:
            result = self._result(part, "unfinished", "")
        if result.state == "unfinished":
            result = replace(result, state="failed", why=_why(part, code, printed))
        return replace(result, seconds=seconds)

    def _result(self, part: Part, state: PartState, why: str) -> PartResult:
        return new_result(part, self.machine, state, why)

    def _started(self, part: Part, limit_s: float, log: IO[str]) -> subprocess.Popen[str]:
        own = {PART: f"{part.name} {limit_s:.1f}", LAUNCHER: str(os.getpid())}
        return subprocess.Popen(
            self.command,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def _awaited(self, process: subprocess.Popen[str], limit_s: float, say: Say) -> int:
        """Wait for the process of a part, and end it if it takes too long; return its code."""
        assert process.stdout is not None
        reader = threading.Thread(target=_read_lines, args=(process.stdout, say), daemon=True)
        reader.start()
        until = time.monotonic() + limit_s + GRACE_S
        try:
            while process.poll() is None and time.monotonic() < until:
                time.sleep(_POLL_S)
            if process.poll() is None:
                process.send_signal(signal.SIGABRT)  # prints the stacks of all threads
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_STACKS_S)
        finally:
            _end_group(process)
        reader.join(_STACKS_S)
        return process.wait()


def new_result(part: Part, machine: str, state: PartState, why: str) -> PartResult:
    """Return a result without figures."""
    return PartResult(
        name=part.name,
        asks=part.asks,
        state=state,
        why=why,
        machine=machine,
        when=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        seconds=0.0,
        found={},
    )


def part_asked_for(environment: Mapping[str, str]) -> tuple[Part, float] | None:
    """Return the part that this process is to do, and its seconds; None: it does them all."""
    if (text := environment.get(PART)) is None:
        return None
    name, seconds = text.split()
    return next(part for part in PARTS if part.name == name), float(seconds)


def _with_clock(say: Say, begin: float, what: str) -> Say:
    def said(text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - begin), 60)
        say(f"{minutes:3}:{seconds:02}  part {what}: {text}")

    return said


def _read_lines(output: IO[str], say: Say) -> None:
    for line in output:
        say(line.rstrip())


def _end_group(process: subprocess.Popen[str]) -> None:
    """Kill what the process has started, and itself if it is still there."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _why(part: Part, code: int, printed: str) -> str:
    if code == -signal.SIGABRT:
        return f"it did not end within its {part.budget_s:.0f} s; {part.name}.log has the stacks"
    if code == -signal.SIGKILL:
        return "it was killed (SIGKILL): memory may have run out, see dmesg"
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}; see {part.name}.log"
    last = printed.rstrip().rpartition("\n")[2][:_MOST_REASON]
    said = f": {anonymous(last)}" if last else ""
    return f"it ended with exit code {code}{said}; see {part.name}.log"
