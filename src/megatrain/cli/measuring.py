"""The first measurement of a machine, which its first plan takes by itself.

`train`, `init` and `estimate` plan with the rates that `megatrain doctor` has measured. On a
machine that nobody has measured they start `megatrain doctor --quick` as a process of its own: it
takes some seconds, whatever it does to memory or a device ends with it, and its results are kept.
If it fails, the plan has no times.

It is left out where MEGATRAIN_MEASURE is 0, and in CI (the variable CI), whose machines are new
each time. Of several ranks, the first measures, and the others wait for it to join; the plan of all
is made from what it has found.

Laws (tests/cli/test_measuring.py)
    1. It happens once for a machine, and not where a variable forbids it.
    2. It ends within LIMIT_S, and no failure of it ends the command.
    3. One rank measures, alone and with all cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from megatrain.planning.machine.examination import kept_examination
from megatrain.planning.machine.facts import host_facts
from megatrain.ranks.launcher import ERROR_FILE, VARIABLES, read_environment

VARIABLE = "MEGATRAIN_MEASURE"
LIMIT_S = 120.0
"""A process that takes longer, import of torch included, is ended; what it has kept stays."""
COMMAND = (sys.executable, "-m", "megatrain", "doctor", "--quick")
_OF_RANKS = (*VARIABLES, ERROR_FILE, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
"""Variables of a launcher: with them the process would look for other ranks, on few cores."""


def measure_first(device: str = "auto") -> None:
    """Measure this machine, if nobody has, for a plan of a run that computes on `device`."""
    if not is_wanted(os.environ, device) or kept_examination() is not None:
        return
    _say(
        "First run on this machine: benchmarking it (about 10 s). "
        f"`megatrain doctor` is more exact, {VARIABLE}=0 skips it."
    )
    try:
        subprocess.run(
            COMMAND,
            env=environment_of_doctor(os.environ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,  # its progress is shorter than its lines are worth
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        _say(f"the measurement was ended after {LIMIT_S:.0f} s")
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        _say(f"the measurement failed ({said[-1]}), and the plan goes without it")
    except OSError as error:
        _say(f"the measurement failed ({error}), and the plan goes without it")
    found = kept_examination()
    if found is not None and found.disturbance:
        _say(f"{found.disturbance} `megatrain doctor` does.")


def is_wanted(environment: Mapping[str, str], device: str) -> bool:
    """Return whether a machine that was not measured is to be: by this process, and of use."""
    owner = read_environment(environment)
    if environment.get(VARIABLE) == "0" or environment.get("CI") or (owner and not owner.leads):
        return False
    return device != "cpu" or not host_facts().gpus  # where there is a GPU, doctor measures that


def environment_of_doctor(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that measures the whole host by itself."""
    if read_environment(environment) is None:
        return dict(environment)
    return {name: value for name, value in environment.items() if name not in _OF_RANKS}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
