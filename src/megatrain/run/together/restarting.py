"""A run that its launcher starts again resumes by itself.

The run folder keeps the name of the launch that began or resumed it. Only ranks of that very launch
resume unasked: a command that was refused, because the folder has another run, stays refused.

Laws (tests/run/together/test_restarting.py)
    1. A restart resumes the run that its own launch has begun, and no other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megatrain.memory.host import read_system_file
from megatrain.ranks.restarts import launch_name, num_restarts
from megatrain.run.folder import RunFolder

LAUNCH_FILE = ".launch"


def note_launch(folder: RunFolder, environment: Mapping[str, str] = os.environ) -> None:
    """Keep the name of the launch, if it has one."""
    if (name := launch_name(environment)) is not None:
        folder.write(LAUNCH_FILE, f"{name}\n")


def was_restarted(run: Path, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launch that began a run has started its ranks again."""
    name = launch_name(environment)
    return (
        name is not None
        and num_restarts(environment) > 0
        and read_system_file(run / LAUNCH_FILE) == f"{name}\n"
    )
