"""A device that is full: what it held is kept, and the step is done again with less on the device.

The plan predicts the working memory of compute; what kernels of a device take beside it is an
assumption (planning/machine/reserve.py), and documents, experts and other programs on the device
change from step to step. Where the plan chose, too much of it costs a few seconds, not the run:
weights stay where they are. Kept activations are given up first, which changes no bit; then
micro-batches are halved.

Late updates follow a step that is complete, so a step that fails leaves the store as the step
before it left it (engine.py). Updates in backward may have changed some blocks by then: such a
step cannot be done again, and the error says so.

What the device held is torch's snapshot as JSON, which `torch.cuda._memory_viz` draws. Without
torch's recording of allocations it has segments and blocks, and not who asked for them.

Laws (tests/run/opening/test_retry_smaller.py)
    1. From the step that did not fit on, the run is one that was resumed there with the smaller
       micro-batches, bit for bit.
    2. What the config gives stays as it is.
    3. A step that has changed some blocks is not done again.
    4. A run that ends for lack of device memory has the snapshot, where the device gives one, and
       the error stays the error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatrain.errors import OutOfDeviceMemory
from megatrain.models.isolation import packs_flat
from megatrain.planning.levers import LEVERS
from megatrain.run.folder import RunFolder
from megatrain.run.opening.opening import Opening
from megatrain.run.opening.recipe import make_engine
from megatrain.run.opening.training_data import TrainingData, open_data

SNAPSHOT = "memory_snapshot.json"


def keep_snapshot(folder: RunFolder, error: OutOfDeviceMemory, say: Callable[[str], None]) -> None:
    """Write what device memory held, if it is known, and tell where."""
    if error.snapshot is None:
        return
    folder.write(SNAPSHOT, json.dumps(error.snapshot, default=str))
    say(f"memory snapshot written to {folder.path / SNAPSHOT}")


def can_shrink(opened: Opening, what: str, error: OutOfDeviceMemory) -> bool:
    """Return whether what failed by the error may take less device memory, and could.

    Raises OutOfDeviceMemory with the reason, from the error, if it could and weights forbid it.
    """
    if _smaller(opened) is None or not opened.ranks.owner.is_alone:
        return False
    if opened.engine.is_consistent:
        return True
    cause = (
        "train.max_grad_norm is null, so weights are updated during backward"
        if opened.plan.settings.update == "in_backward"
        else "updates were under way, with states on disk or in a second backward"
    )
    raise OutOfDeviceMemory(
        f"{error}. No second try of {what} in smaller micro-batches: some blocks have been updated "
        f"and others not ({cause}). Give a smaller train.micro_batch_tokens, and continue from the "
        "last checkpoint with --resume",
        error.snapshot,
    ) from error


def opened_smaller(
    opened: Opening, step: int, what: str, reason: str, say: Callable[[str], None]
) -> Opening:
    """Return the run with less on the device; the user and the run folder get a line.

    It begins after `step`, where `opened` has come to, whose engine is closed, and its data from
    now on. The caller sets the position of the new data.
    """
    config, home = opened.config, opened.home
    found = _smaller(opened)
    assert found is not None
    name, now, event, text = found
    before = getattr(opened.plan.settings, name)
    plan = opened.plan.with_setting(name, now, f"{what} did not fit with {before}")
    say(f"{what} does not fit: {text} ({reason})")
    record = {"event": event, "step": step, "from": before, "to": now}
    opened.folder.append("events.jsonl", record | {"reason": reason})
    opened.data.close()
    data = open_data(
        config,
        opened.tokenizer,
        plan.settings,
        opened.data.rows,
        flat=packs_flat(home.decoder, compiles=plan.settings.compile),
        external=opened.given.open_external,
    )
    if isinstance(data, TrainingData) and isinstance(opened.data, TrainingData):
        data.take_over(opened.data)
    try:
        engine = make_engine(
            config,
            plan.settings,
            home,
            opened.device,
            data.num_steps,
            loss=opened.given.loss,
        )
        engine.announce(data.step_tokens)
        if not isinstance(data, TrainingData):
            data.attach(engine, home)
        engine.restore(step, opened.engine.num_updates)
    except BaseException:
        data.close()
        raise
    return replace(opened, plan=plan, data=data, engine=engine)


def _smaller(opened: Opening) -> tuple[str, Any, str, str] | None:
    """Return the lever to pull, its new value, the event and its words; None: there is none.

    Those that change no bit come first.
    """
    plan = opened.plan
    for lever in sorted(LEVERS, key=lambda lever: lever.is_kept):
        found = lever.smaller(plan.workload, plan.settings)
        if found is not None and lever.given(opened.config) == "auto":
            return lever.name, *found
    return None
