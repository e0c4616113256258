"""The same preferences through TRL's trainers and through MegaTrain, on the CPU in fp32.

    python -m proofs.preferences --json
    python -m proofs.preferences --case "dpo"

TRL is an oracle that is not ours. It is no dependency: run this in its own environment that has
`trl` from PyPI beside MegaTrain's requirements. TRL's trainer takes ten steps of AdamW and keeps
its own reference; the engine then trains on the batches that it saw, with references from one
pass at the start. The loss of each step must agree within 1e-5, and so must every gradient, as a
share of the largest element of the step's gradients. Ends with 1 if a case differs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from proofs.side_by_side import main_of

TOLERANCE = 1e-5


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
    from proofs.preferences.cases import CASES

    return CASES


def compare(name: str) -> dict[str, Any]:
    """Run one case in both tools; return how far apart they are."""
    from proofs.preferences.cases import CASES, write_case_model
    from proofs.preferences.ours import train_ours
    from proofs.preferences.theirs import train_theirs

    case = CASES[name]
    with tempfile.TemporaryDirectory(prefix="megatrain-preferences-") as path:
        scratch = Path(path)
        write_case_model(scratch / "model")
        theirs = train_theirs(case, scratch / "model", scratch)
        ours = train_ours(case, scratch / "model", theirs)
    moved = max(abs(a - b) for a in theirs.losses for b in theirs.losses)
    found: dict[str, Any] = {
        "case": name,
        "steps": len(ours.losses),
        "worst_loss_difference": ours.worst_loss(theirs),
        "worst_gradient_difference": ours.worst_gradient(theirs),
        "loss_moved_by": moved,
        "known_difference": case.difference,
    }
    worst = max(found["worst_loss_difference"], found["worst_gradient_difference"])
    return found | {"equal": worst <= TOLERANCE and found["steps"] == 10}


def _line(result: dict[str, Any]) -> str:
    return (
        f"{result['case']:24} {result['steps']:3} steps  "
        f"loss within {result['worst_loss_difference']:.1e}  "
        f"gradients within {result['worst_gradient_difference']:.1e}  "
        f"{'equal' if result['equal'] else 'DIFFERENT'}"
    )


if __name__ == "__main__":
    main()
