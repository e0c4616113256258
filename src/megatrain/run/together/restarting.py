"""A run that its launcher starts again resumes by itself.

The run folder keeps the name of the launch that began or resumed it, and in which attempt. Only a
later attempt of that very launch resumes unasked. A command that was refused, because the folder
has another run, has left no name there: it stays refused, whatever id its launcher was given.

Laws (tests/run/together/test_restarting.py, tests/run/test_torchrun.py)
    1. A restart resumes the run that its own launch has begun, and no other.
    2. Rank 0 decides for all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megatrain.memory.host import read_system_file
from megatrain.ranks.launcher import launch_name, num_restarts
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.folder import RunFolder

LAUNCH_FILE = ".launch"


def note_launch(folder: RunFolder, environment: Mapping[str, str] = os.environ) -> None:
    """Keep the name of the launch and the number of its attempt, if it has a name."""
    if (name := launch_name(environment)) is not None:
        folder.write(LAUNCH_FILE, f"{name} {num_restarts(environment)}\n")


def was_restarted(
    run: Path, ranks: Ranks = ALONE, environment: Mapping[str, str] = os.environ
) -> bool:
    """Return whether an earlier attempt of this launch has begun the run. All ranks ask."""
    return bool(ranks.decide(lambda: _has_begun(run, environment)))


def _has_begun(run: Path, environment: Mapping[str, str]) -> bool:
    if not num_restarts(environment):
        return False
    name, _, attempt = read_system_file(run / LAUNCH_FILE).strip().partition(" ")
    is_earlier = attempt.isdecimal() and int(attempt) < num_restarts(environment)
    return is_earlier and name == launch_name(environment)
