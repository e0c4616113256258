"""A short form of `python -m proofs.soak`, and that it would notice what it is there for.

Programs of both legs are forks of a warm interpreter here; the proof itself starts the first anew.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from proofs import soak
from proofs.soak.flat import TARGETS, Sample, flatness, too_much
from testkit.patience import HANG_S
from testkit.warm_python import warm_python

pytestmark = pytest.mark.merge

ROOT = Path(soak.__file__).parents[2]
SHORT = """
import sys
from proofs.soak import __main__ as soak, flat
{spoil}
flat.PROGRAM = {program!r}
sys.argv = ["soak", "--steps", "{steps}", "--json"]
soak.main()
"""
RESUMES_FROM_THE_OLDEST = """
from megatrain.run.opening import resumption
finished = resumption.finished
resumption.finished = lambda parent: finished(parent)[::-1]
soak.world.SAVE_EVERY = soak.SAVE_EVERY = 4
soak.LEAST_FAULTS = 3
"""
LEAKS = """
from megatrain.run.trainer import Trainer
from proofs.soak.process import main
held, take_step = [], Trainer._take_step
def leaking(self, step):
    take_step(self, step)
    held.append(bytearray(b"x") * (1 << 20))
    held.extend(object() for _ in range(100))
Trainer._take_step = leaking
main()
"""
ONLY_UNDISTURBED = """
import json, tempfile
from pathlib import Path
from proofs.soak import __main__ as soak, flat
flat.PROGRAM = {program!r}
with tempfile.TemporaryDirectory() as scratch:
    found = soak.Undisturbed(Path(scratch), {steps}).end()
    print(json.dumps(found | {{"failures": []}}))
"""


def _result(code: str, program: list[str], steps: int, spoil: str = "") -> dict[str, Any]:
    command = warm_python().command
    text = code.format(program=[*command, *program], steps=steps, spoil=spoil)
    done = subprocess.run(
        [*command, "-c", text],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=8 * HANG_S,
        check=False,
    )
    assert done.stdout, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == bool(result["failures"])
    return result


def test_a_run_with_every_fault_ends_as_one_without() -> None:
    result = _result(SHORT, ["-m", "proofs.soak.process"], 110)
    assert result["failures"] == []
    assert result["torn"] == result["lost"] == 0
    assert result["bitwise"]
    assert result["faults"] == 8
    kinds = {name.split(":")[0] for name in result["outcomes"]} | result["skipped"].keys()
    assert len(kinds) == 8, "one of each"
    assert result["most_repeated"] < 40
    assert result["undisturbed"]["rss_growth"] < 0.05


def test_a_resume_from_an_older_checkpoint_would_be_noticed() -> None:
    result = _result(SHORT, ["-m", "proofs.soak.process"], 50, RESUMES_FROM_THE_OLDEST)
    assert result["lost"] > 0
    assert any("was acknowledged" in failure for failure in result["failures"])


def test_a_process_that_keeps_memory_of_each_step_would_be_noticed() -> None:
    found = _result(ONLY_UNDISTURBED, ["-c", LEAKS], 40)
    assert found["rss_growth"] > 0.05
    assert found["heap_per_step"] > 100


def test_growth_is_that_of_the_last_four_fifths() -> None:
    flat = _samples(lambda step: 900 if step < 2000 else 1000)
    assert flatness(flat, 10_000)["rss_growth"] == 0.0
    growing = flatness(_samples(lambda step: 1000 + step // 400), 10_000) | {"heap_per_step": 0.0}
    assert 0.01 < growing["rss_growth"] < 0.02
    assert too_much(growing) == [f"rss_growth is {growing['rss_growth']}, at most 0.01"]
    assert growing.keys() >= TARGETS.keys()


def _samples(rss: Any) -> list[Sample]:
    return [
        Sample(step=step, rss_bytes=rss(step), num_threads=3, num_files=9, num_children=1)
        for step in range(1, 10_000, 7)
    ]
