"""The plan against what happens: memory, time, and whether the choice was the best.

    python -m benchmarks.plan --memory | --cap | --time | --choice
                              [--json] [--rounds 3] [--steps 2]

Small Llamas of random weights, on this machine's CPU: compute reads the store (`views`), or copies
blocks into slots as an accelerator would (`copies`), with the tape on either side.

--memory: 42 configurations, each in a process of its own. The ledger's host total against the most
that was resident. What Python and libraries hold is measured once, in a process that has trained a
model of no size, as the profile of a machine has it. malloc is told to give memory from 1 MiB on
back when it is freed; left alone it keeps up to 80 MiB, now more, now less (`--keeping` shows it).

    worst, median         of |predicted / measured - 1|

--cap: runs of the trainer in a control group whose limit is 0.5 to 1.2 of their plan
(cap.py).

    died                  starts that the kernel killed
    refused_above         refusals with a limit of 1.1 and more
    stopped               runs that saw the limit come, saved, and ended by themselves

--time: 17 configurations (time.py), with real compute and with each lane slowed down.

    worst, median         of |predicted / measured - 1| of the step time, each the median of rounds
    limits_named          share of the slowed cases whose slow lane was named as the limit, always

--choice: on three such machines, every combination of micro-batch, slots and tape is tried, in
turns; the planner chooses before.

    choice_over_best      step time of its choice over that of the best, by measurement; worst grid
"""

from __future__ import annotations

import argparse
import json

import torch

from benchmarks.plan.cap import measure_caps
from benchmarks.plan.configurations import Configuration
from benchmarks.plan.memory import GIVING_BACK, measure_memory, memory_configurations, run_alone
from benchmarks.plan.time import measure_choice, measure_time


def _figures(options: argparse.Namespace) -> dict[str, object]:
    if options.cap:
        return measure_caps()
    if options.time:
        return measure_time(options.rounds, options.steps, options.only)
    if options.choice:
        return measure_choice(options.rounds, options.steps, options.only)
    environment = {} if options.keeping else GIVING_BACK
    return measure_memory(memory_configurations()[: options.first or None], environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", action="store_true", help="ledger against resident peak")
    parser.add_argument("--cap", action="store_true", help="runs under a limit of the kernel's")
    parser.add_argument("--time", action="store_true", help="predicted against measured steps")
    parser.add_argument("--choice", action="store_true", help="the plan against all others")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", default="", help="one slow lane, or `real`")
    parser.add_argument("--keeping", action="store_true", help="with malloc as it is")
    parser.add_argument("--first", type=int, default=0, help="only so many configurations")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--alone", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.alone:
        print(json.dumps(run_alone(Configuration(**json.loads(options.alone)))))
        return
    figures = _figures(options)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
