"""Cases that are a function of their number: played in order, told by number when one is wrong."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from testkit.printed import print_figures

Faults = Callable[[int], list[str]]
"""Plays the case of a number; returns what is wrong with it."""


def measure(
    faults_of: Faults,
    describe: Callable[[int], dict[str, Any]],
    first: int,
    count: int,
    seconds: float,
) -> dict[str, Any]:
    """Play `count` cases from number `first` on, for `seconds` at most."""
    torch.set_num_threads(1)
    began = time.monotonic()
    wrong: list[dict[str, Any]] = []
    done = 0
    for number in range(first, first + count):
        if time.monotonic() - began > seconds:
            break
        done += 1
        if faults := faults_of(number):
            wrong.append({"number": number, "case": describe(number), "faults": faults[:5]})
    return {
        "first": first,
        "cases": done,
        "wrong": len(wrong),
        "seconds": round(time.monotonic() - began, 1),
        "wrong_cases": wrong[:10],
        "targets": {"wrong": 0},
    }


def run(title: str, faults_of: Faults, describe: Callable[[int], dict[str, Any]]) -> None:
    """The command line of such a benchmark."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seconds", type=float, default=36_000.0, help="stop after")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(faults_of, describe, arguments.first, arguments.count, arguments.seconds)
    print_figures(result, as_json=arguments.json)
    raise SystemExit(bool(result["wrong"]))
