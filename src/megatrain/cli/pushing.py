"""The command `push`: the model or the adapters of a run, with a model card, on the Hub.

A new repository is private unless `--public` is given: it is one click to publish a model, and no
way to take it back. A repository that exists stays as visible as it is. The run folder is locked
meanwhile, so no training can replace the checkpoint that is read.

Laws (tests/cli/test_pushing.py)
    1. The Hub has every file that `export` writes, byte for byte, and the card of that step.
    2. Nothing of a run is pushed while a process trains it, or if its model has another byte than
       it was written with.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatrain.cli.exporting import export_found
from megatrain.cli.verbs import found_model
from megatrain.config import load_config
from megatrain.config.load import file_of_run
from megatrain.errors import CheckpointDamaged, ConfigError, RunFolderError
from megatrain.ranks.ranks import ALONE
from megatrain.run.folder import RunFolder, is_run
from megatrain.run.publishing import PLACE, model_card, upload_export
from megatrain.run.run_model import RunModel
from megatrain.run.state import RunState


def push_run(
    model: Path,
    repo_id: str,
    *,
    best: bool,
    merge: bool,
    private: bool,
    say: Callable[[str], None],
) -> str:
    """Push the model of a run or of one of its checkpoints; return the address of the commit.

    Raises RunFolderError while the run is training, CheckpointDamaged for a model that is not as
    it was written, HubError.
    """
    run = _run_of(model)
    if run is None:
        raise ConfigError(
            f"{model} is not a run or a checkpoint of one, so there is nothing to write its model "
            f"card from. `hf upload {repo_id} {model}` uploads a folder as it is."
        )
    with RunFolder(run):
        found = found_model(model, best=best, ranks=ALONE)
        step = _pushed_step(found, model)
        config, state, rows = load_config(file_of_run(run)), _state_at(run, step), _rows_of(run)

        def export(place: Path) -> str:
            say(export_found(found, place, merge=merge))
            return f"model of step {step}"

        def card(is_adapter: bool) -> str:
            return model_card(repo_id, config, state, rows, is_adapter=is_adapter)

        return upload_export(run / PLACE, repo_id, export, card, private=private, say=say)


def _run_of(model: Path) -> Path | None:
    """Return the run folder that a model belongs to."""
    here = model.resolve()
    return next((folder for folder in (here, *here.parents[:3]) if is_run(folder)), None)


def _pushed_step(found: RunModel, model: Path) -> int:
    """Return the step of a model. Raises for one that is not the one that was meant."""
    if found.passed_over:
        reasons = "\n  ".join(found.passed_over)
        raise CheckpointDamaged(
            f"{model}: the newest model cannot be pushed:\n  {reasons}\nTo push step {found.step} "
            f"instead, give {found.folder.parent}."
        )
    if found.step is None:
        raise ConfigError(f"{model} has no step that is known. Give its run folder.")
    return found.step


def _rows_of(run: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((run / "data_card.json").read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise RunFolderError(f"{run}/data_card.json cannot be read: {error}") from error


def _state_at(run: Path, step: int) -> RunState:
    """Return the counts and losses of a run up to a step; its checkpoints may be gone."""
    state = RunState(step=step)
    try:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
        for line in lines:
            if line["step"] > step:
                continue
            if "eval_loss" in line:
                state.evaluations.is_best(line["step"], line["eval_loss"])
            elif "loss" in line:
                state.first_loss = line["loss"] if state.first_loss is None else state.first_loss
                state.last_loss = line["loss"]
            state.total_tokens = line.get("total_tokens", state.total_tokens)
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise RunFolderError(f"{run}/metrics.jsonl cannot be read: {error}") from error
    return state
