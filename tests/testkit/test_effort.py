"""The measure of effort: machine and neighbors cancel out, and excess is found."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from testkit import effort
from testkit.effort import children_s, loop_s, require_effort


def test_the_loop_costs_one_loop() -> None:
    require_effort(effort._loop, at_most=3)
    with pytest.raises(AssertionError, match=r"loops of processor time; 0.2 are allowed"):
        require_effort(effort._loop, at_most=0.2)


def test_waiting_costs_nothing() -> None:
    require_effort(lambda: time.sleep(0.2), at_most=0.5)


def test_children_count_by_their_own_clock() -> None:
    spins = "import time\nwhile time.process_time() < 0.5: pass"
    begin = children_s()
    subprocess.run([sys.executable, "-c", spins], check=True)
    assert children_s() - begin >= 0.5


def test_a_slow_machine_is_allowed_more_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times slower in everything: ten times the seconds, and as many loops."""
    now = [0.0]

    def spend(seconds: float) -> None:
        now[0] += 10 * seconds

    monkeypatch.setattr(effort, "_loop", lambda: spend(0.065))
    monkeypatch.setattr("testkit.effort.time.process_time", lambda: now[0])
    assert loop_s() == pytest.approx(0.65)
    require_effort(lambda: spend(0.6), at_most=10, clock=lambda: now[0])
    with pytest.raises(AssertionError, match=r"^10\.77 loops"):
        require_effort(lambda: spend(0.7), at_most=10, clock=lambda: now[0])
