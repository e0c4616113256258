"""The command: a program of Python on the null device."""

from __future__ import annotations

import argparse
import os
import sys

from testkit.null_cuda.building import NoNullCuda
from testkit.null_cuda.environment import UNAVAILABLE, NoEnvironment
from testkit.null_cuda.launching import program_and_environment


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m testkit.null_cuda", description=__doc__)
    parser.add_argument("--capability", default="8.9", help="compute capability")
    parser.add_argument("--mib", type=int, default=24564, help="memory of each device")
    parser.add_argument("--devices", type=int, default=1, help="number of devices")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="what Python is to run")
    options = parser.parse_args()
    try:
        python, variables = program_and_environment(
            capability=options.capability, mib=options.mib, devices=options.devices
        )
    except (NoEnvironment, NoNullCuda) as error:
        print(error, file=sys.stderr)
        sys.exit(UNAVAILABLE)
    os.execve(python, [python, *options.program], variables)


if __name__ == "__main__":
    main()
