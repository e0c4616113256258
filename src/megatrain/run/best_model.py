"""The result of a run that keeps its best model, loaded when the run has ended."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from megatrain.disk.checkpoint.manifest import read_manifest
from megatrain.disk.checkpoint.parts import checkpoint_parts
from megatrain.disk.checkpoint.restore import restore, verify
from megatrain.disk.checkpoint.retention import best_of
from megatrain.disk.checkpoint.retried import retried
from megatrain.disk.hf.export import Origin
from megatrain.disk.hf.model import HostModel
from megatrain.errors import CheckpointDamaged, DiskError
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.checkpoints import Checkpoints
from megatrain.run.state import RunState


def load_best(
    checkpoints: Checkpoints, home: HostModel, state: RunState, ranks: Ranks = ALONE
) -> tuple[Origin, str]:
    """Put the best model that was saved into `home`; return which it is, also in words.

    The last one stays where memory holds its only copy, or where the best cannot be read: the
    text reports it. Rank 0 chooses, and reads the whole; each rank then reads its part.
    """
    checkpoints.wait()
    chosen = ranks.long_work(lambda: ranks.on_first(partial(_chosen, checkpoints, state)))
    found = _Chosen(**ranks.decide(lambda: None if chosen is None else asdict(chosen)))
    if found.path is not None:
        path = Path(found.path)
        ranks.long_work(lambda: restore(path, read_manifest(path), checkpoint_parts(home)))
    return Origin(step=found.step, best_loss=found.loss), found.text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """The model that is the result of a run."""

    step: int
    loss: float | None = None
    text: str
    path: str | None = None
    """Of its checkpoint; None: memory has it."""


def _chosen(checkpoints: Checkpoints, state: RunState) -> _Chosen:
    last = f"model of step {state.step}, the last"
    best = best_of(checkpoints.folder, checkpoints.damaged)
    if best is None:
        return _Chosen(step=state.step, text=f"{last}; no evaluated model was saved")
    text = state.evaluations.rank(best.step, best.eval_loss)
    found = _Chosen(step=best.step, loss=best.eval_loss, text=text)
    if best.step == state.step:
        return found
    if checkpoints.saved_step != state.step:
        return _Chosen(step=state.step, text=f"{last}, because the best was not saved")
    try:
        retried(lambda: verify(best.path))  # a restore that failed half-way would leave a mixture
    except (CheckpointDamaged, DiskError) as error:
        found_wrong = "is damaged" if isinstance(error, CheckpointDamaged) else "cannot be read"
        return _Chosen(step=state.step, text=f"{last}, because the best {found_wrong}: {error}")
    return replace(found, path=str(best.path))
