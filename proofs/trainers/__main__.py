"""TRL's trainers, as they are and streamed through the engine, on the CPU in fp32.

    python -m proofs.trainers --json
    python -m proofs.trainers --case "dpo"

TRL is an oracle that is not ours, and no dependency: run this in an environment of its own that has
`trl` from PyPI beside MegaTrain's requirements. Each trainer takes twenty steps of two
micro-batches with the same seed, rows and arguments, once with its model in memory and once
streamed. The loss of each step, and of an evaluation at the end, must agree within 1e-5; norms of
gradients and other metrics within 1e-4 of their size. Ends with 1 if a case differs.

tests/integrations/test_trl.py has the other laws, and runs in the same environment.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from proofs.side_by_side import main_of

TOLERANCE = 1e-5
METRICS_TOLERANCE = 1e-4
_OF_TIME = ("runtime", "per_second", "step_time")


def main() -> None:
    main_of(
        __doc__,
        package="trl",
        kind="case",
        names=_names,
        compare=compare,
        is_wrong=lambda result: not result["equal"],
        line=_line,
    )


def _names() -> Iterable[str]:
    from proofs.trainers.cases import CASES

    return CASES


def compare(name: str) -> dict[str, Any]:
    """Run a case both ways; return how far apart they are."""
    from proofs.trainers.cases import CASES, write_model
    from proofs.trainers.sides import STEPS, make_trainer, run

    case = CASES[name]
    with tempfile.TemporaryDirectory(prefix="megatrain-trainers-") as path:
        scratch = Path(path)
        write_model(scratch / "model", case.family, scores=case.trainer == "Reward")
        theirs, ours = (
            run(make_trainer(case, scratch / "model", scratch / side, is_streamed=side == "ours"))
            for side in ("theirs", "ours")
        )
    losses = list(zip(theirs.of("loss"), ours.of("loss"), strict=True))
    evaluated = (theirs.evaluated["eval_loss"], ours.evaluated["eval_loss"])
    lines = [*zip(theirs.logs, ours.logs, strict=True), (theirs.evaluated, ours.evaluated)]
    found: dict[str, Any] = {
        "case": name,
        "steps": len(losses),
        "worst_loss_difference": max(abs(a - b) for a, b in [*losses, evaluated]),
        "worst_metric_difference": max(_apart(*pair) for pair in lines),
        "loss_moved_by": max(theirs.of("loss")) - min(theirs.of("loss")),
    }
    equal = found["worst_loss_difference"] <= TOLERANCE and found["steps"] == STEPS
    return found | {"equal": equal and found["worst_metric_difference"] <= METRICS_TOLERANCE}


def _apart(theirs: dict[str, float], ours: dict[str, float]) -> float:
    """Return the largest difference of two lines, as a share of the larger of the value and 1."""
    assert theirs.keys() == ours.keys(), theirs.keys() ^ ours.keys()
    names = [name for name in theirs if not name.endswith(_OF_TIME)]
    return max(abs(theirs[name] - ours[name]) / max(1.0, abs(theirs[name])) for name in names)


def _line(result: dict[str, Any]) -> str:
    return (
        f"{result['case']:24} {result['steps']:3} steps  "
        f"loss within {result['worst_loss_difference']:.1e}  "
        f"metrics within {result['worst_metric_difference']:.1e}  "
        f"{'equal' if result['equal'] else 'DIFFERENT'}"
    )


if __name__ == "__main__":
    main()
