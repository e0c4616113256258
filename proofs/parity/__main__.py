"""The same rows through TRL's SFTTrainer and through MegaTrain, on the CPU in fp32.

    python -m proofs.parity --json
    python -m proofs.parity --case "chat, packed"

TRL is an oracle that is not ours. It is no dependency: run this in its own environment that
has `trl` from PyPI beside MegaTrain's requirements. For each case: the documents of every step
with their targets must be the same tokens, the loss of the first 20 steps must agree within 1e-5,
and the number of steps must be equal. Ends with 1 if a case differs.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from proofs.side_by_side import main_of


def main() -> None:
    main_of(
        __doc__,
        package="trl",
        kind="case",
        names=_names,
        compare=compare,
        is_wrong=lambda result: bool(result["faults"]),
        line=_line,
    )


def _names() -> list[str]:
    from proofs.parity.cases import CASES

    return [case.name for case in CASES]


def compare(name: str) -> dict[str, Any]:
    """Run one case in both tools; return what agrees and what does not."""
    from proofs.parity.cases import CASES
    from proofs.parity.models import write_model
    from proofs.parity.ours import train_ours
    from proofs.parity.steps import faults_of
    from proofs.parity.theirs import train_theirs

    (case,) = [case for case in CASES if case.name == name]
    with tempfile.TemporaryDirectory(prefix="megatrain-parity-") as path:
        scratch = Path(path)
        os.environ["MEGATRAIN_CACHE"] = str(scratch / "cache")
        files = []
        for number, rows in enumerate(case.sources):
            files.append(scratch / f"rows-{number}.jsonl")
            files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
        texts = [file.read_text() for file in files]
        write_model(scratch / "model", case.family, texts, case.template_text(), case.end)
        theirs = train_theirs(case, scratch / "model", files, scratch)
        ours = train_ours(case, scratch / "model", files, scratch)
    return {
        "case": case.name,
        "steps": ours.planned_steps,
        "steps_theirs": theirs.planned_steps,
        "targets": sum(sum(targets) for step in ours.documents for _, targets in step),
        "worst_loss_difference": ours.worst_difference(theirs),
        "left_out_of_theirs": theirs.left_out,
        "known_difference": case.difference,
        "faults": faults_of(ours, theirs),
    }


def _line(result: dict[str, Any]) -> str:
    state = "; ".join(result["faults"]) or "equal"
    return (
        f"{result['case']:48} {result['steps']:3} steps {result['targets']:6,} targets "
        f"loss within {result['worst_loss_difference']:.1e}  {state}"
    )


if __name__ == "__main__":
    main()
