"""The error of a run that was asked to end early."""

from __future__ import annotations

from megatrain.errors import Interrupted
from megatrain.run.checkpoints import Checkpoints
from megatrain.run.opening.opening import Opening
from megatrain.run.state import RunState


def interrupted(
    opened: Opening, checkpoints: Checkpoints, state: RunState, reason: str
) -> Interrupted:
    """Return what to raise, and record in the folder that the run ends."""
    record = {"event": "interrupted", "step": state.step, "reason": reason}
    opened.folder.append("events.jsonl", record)
    saved = checkpoints.saved_step
    return Interrupted(
        f"{reason}: stopped after step {state.step} of {opened.data.num_steps}, "
        + (f"saved after step {saved}" if saved is not None else "nothing is saved")
        + "; continue with `megatrain train ... --resume`"
    )
