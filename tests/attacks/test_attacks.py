"""Hostile folders: nothing of theirs runs, nothing is written, and each ends in an error of ours.

Laws
    1. No folder makes us run code, start a program, open a socket, write a file, or read a file
       that is not its own.
    2. Each ends as its case says, within MAX_LOOPS and 512 MiB, and no allocation fails
       on the way.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatrain import load_model
from testkit.effort import require_effort
from tests.attacks.adapter_corpus import ADAPTER_CASES
from tests.attacks.code_corpus import BYSTANDERS, CODE_CASES
from tests.attacks.config_corpus import CONFIG_CASES
from tests.attacks.folders import BENIGN, Case, write_benign
from tests.attacks.index_corpus import INDEX_CASES
from tests.attacks.quantized_corpus import QUANTIZED_CASES
from tests.attacks.sandbox import LOADED, MARKER, Outcome, Sandbox
from tests.attacks.weights_corpus import WEIGHTS_CASES

CASES = [
    *BENIGN, *CONFIG_CASES, *INDEX_CASES, *WEIGHTS_CASES, *QUANTIZED_CASES, *CODE_CASES,
    *ADAPTER_CASES,
]  # fmt: skip
MAX_LOOPS = 80
"""5 s on a server core: testkit/effort.py."""
FAST_S = 1.0
"""On no machine too long."""
MAX_EXTRA_BYTES = 512 << 20


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    folder = tmp_path_factory.mktemp("warm")
    write_benign(folder)
    load_model(folder)  # so that what loading imports is there before the child is
    with Sandbox() as sandbox:
        yield sandbox


def faults(case: Case, outcome: Outcome, root: Path) -> list[str]:
    """Return what is wrong with an outcome."""
    found = list(outcome.events)
    if (root / MARKER).exists():
        found.append("code of the folder ran")
    if outcome.end != case.end:
        found.append(f"ended with {outcome.end}, not {case.end}: {outcome.text}")
    if not re.search(case.says, outcome.text):
        found.append(f"does not say {case.says!r}: {outcome.text}")
    if outcome.end != LOADED and not outcome.ours:
        found.append(f"{outcome.end} is not an error of ours")
    if outcome.extra_bytes > MAX_EXTRA_BYTES:
        found.append(f"took {outcome.extra_bytes >> 20} MiB")
    if outcome.out_of_memory:
        found.append(f"an allocation failed: {outcome.text}")
    if len(outcome.text) > 4000 or not outcome.text.replace("\n", "").isprintable():
        found.append(f"the message is not fit to print: {outcome.text!r:.200}")
    return found


def require_harmless(case: Case, sandbox: Sandbox, folder: Path) -> None:
    """Raise AssertionError unless a folder comes to nothing, within MAX_LOOPS."""
    outcome = sandbox.attack(folder)
    assert faults(case, outcome, folder.parent) == []
    if outcome.seconds > FAST_S:
        require_effort(
            lambda: sandbox.attack(folder), at_most=MAX_LOOPS, clock=lambda: sandbox.spent_s
        )


@pytest.mark.few(150)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_hostile_folder_comes_to_nothing(case: Case, sandbox: Sandbox, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    case.make(folder)
    require_harmless(case, sandbox, folder)


def test_nothing_runs_when_we_stand_in_the_folder(tmp_path: Path) -> None:
    def load_from_inside(folder: Path) -> None:
        os.chdir(folder)
        load_model(".")

    folder = tmp_path / "model"
    folder.mkdir()
    for case in BYSTANDERS:
        case.make(folder)
    with Sandbox(load_from_inside) as sandbox:
        require_harmless(BYSTANDERS[0], sandbox, folder)
