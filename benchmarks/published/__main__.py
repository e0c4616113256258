"""Predicted against published, as a table or as JSON.

python -m benchmarks.published [--json]
"""

from __future__ import annotations

import argparse
import json

from benchmarks.published.trial import (
    Verdict,
    error_at,
    facts,
    median_error,
    ours,
    share_near,
    since_async,
    verdicts,
)
from megatrain.planning.prediction import predicted_speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="all figures, sources and reasons")
    if parser.parse_args().json:
        print(json.dumps(facts(), indent=1))
        return
    print(f"{'system':13}{'model':13}{'machine':9}{'step':>6}{'published':>10}", end="")
    print(f"{'predicted':>10}{'error':>6}{'ours':>13}")
    found = verdicts()
    for verdict in found:
        print(_row(verdict))
    print(
        f"\n{len(found)} points: median error {median_error(found):.0%}, nine in ten within "
        f"{error_at(found, 0.9):.0%}, {share_near(found):.0%} within 25 %"
    )
    print("\nZeRO-3 since gradients leave pinned, asynchronously (DeepSpeed 8207), at most:")
    for verdict in filter(None, map(since_async, found)):
        print(_row(verdict))


def _row(verdict: Verdict) -> str:
    point = verdict.point
    model = point.model.rpartition("/")[2]
    ours_range = predicted_speed(ours(point).tokens_per_s).removesuffix(" tok/s")
    step = f"{point.step / 1024:.0f}k" + "*" * point.step_is_assumed
    return (
        f"{point.system:13}{model:13}{point.machine:9}{step:>6}{point.published:>10,.0f}"
        f"{verdict.predicted:>10,.0f}{verdict.error:>+6.0%}{ours_range:>13}"
    )


if __name__ == "__main__":
    main()
