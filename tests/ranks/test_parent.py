"""A rank ends when its launcher does. That it does is tested in tests/cli/test_launch.py too."""

from __future__ import annotations

import os
import signal
import subprocess

from megatrain.ranks.parent import LAUNCHER
from testkit.patience import HANG_S
from testkit.warm_python import warm_python

ASKS = f"""
import os, time
from megatrain.ranks.parent import end_with_launcher
end_with_launcher()
print(os.environ.get({LAUNCHER!r}), flush=True)
"""
STANDS_FOR_THE_LAUNCHER = f"""
import os
os.environ[{LAUNCHER!r}] = str(os.getppid())
{ASKS}
"""


def _asked(code: str, launcher: str | None) -> tuple[int, str]:
    environment = {**os.environ} if launcher is None else {**os.environ, LAUNCHER: launcher}
    done = subprocess.run(
        [*warm_python().command, "-c", code],
        stdout=subprocess.PIPE, text=True, env=environment, timeout=HANG_S, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_a_launcher_that_died_before_is_noticed() -> None:
    assert _asked(ASKS, "1") == (-signal.SIGTERM, "")


def test_a_process_whose_launcher_lives_goes_on_and_tells_its_children_of_none() -> None:
    assert _asked(STANDS_FOR_THE_LAUNCHER, None) == (0, "None\n")


def test_a_process_without_a_launcher_goes_on() -> None:
    assert _asked(ASKS, None) == (0, "None\n")
