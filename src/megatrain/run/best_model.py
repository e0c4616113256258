"""The result of a run that keeps its best model, loaded when the run has ended."""

from __future__ import annotations

from megatrain.disk.checkpoint.parts import checkpoint_parts
from megatrain.disk.checkpoint.restore import restore, verify
from megatrain.disk.checkpoint.retention import best_of
from megatrain.disk.hf.export import Origin
from megatrain.disk.hf.model import HostModel
from megatrain.errors import CheckpointDamaged, DiskError
from megatrain.run.checkpoints import Checkpoints
from megatrain.run.state import RunState


def load_best(checkpoints: Checkpoints, home: HostModel, state: RunState) -> tuple[Origin, str]:
    """Put the best model that was saved into `home`; return which it is, also in words.

    The last one stays where memory holds its only copy, or where the best cannot be read: the
    text reports it.
    """
    checkpoints.wait()
    last = f"model of step {state.step}, the last"
    best = best_of(checkpoints.folder, checkpoints.damaged)
    if best is None:
        return Origin(step=state.step), f"{last}; no evaluated model was saved"
    text = state.evaluations.rank(best.step, best.eval_loss)
    if best.step != state.step:
        if checkpoints.saved_step != state.step:
            return Origin(step=state.step), f"{last}, because the best was not saved"
        try:
            manifest = verify(best.path)  # a restore that failed half-way would leave a mixture
        except (CheckpointDamaged, DiskError) as error:
            return Origin(step=state.step), f"{last}, because the best is damaged: {error}"
        restore(best.path, manifest, checkpoint_parts(home))
    return Origin(step=best.step, best_loss=best.eval_loss), text
