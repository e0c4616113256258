"""A device that is full: what it held is kept, and a run at its first step is opened again smaller.

The plan predicts the working memory of compute; what kernels of a device take beside it is an
assumption (planning/machine/reserve.py). Where the plan chose and nothing is trained yet, too much
of it costs a few seconds, not the run: weights stay where they are. Kept activations are given up
first, which changes no bit; then micro-batches are halved.

What the device held is torch's snapshot as JSON, which `torch.cuda._memory_viz` draws. Without
torch's recording of allocations it has segments and blocks, and not who asked for them.

Laws (tests/run/opening/test_retry_smaller.py)
    1. The run is that of a config with the smaller micro-batches, bit for bit.
    2. What the config gives, and what a resumed run has, stays as it is.
    3. A run that ends for lack of device memory has the snapshot, where the device gives one, and
       the error stays the error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatrain.errors import DeviceFull
from megatrain.models.isolation import packs_flat
from megatrain.planning.levers import LEVERS
from megatrain.run.folder import RunFolder
from megatrain.run.opening.opening import Opening
from megatrain.run.opening.recipe import make_engine
from megatrain.run.opening.training_data import open_data

SNAPSHOT = "memory_snapshot.json"


def keep_snapshot(folder: RunFolder, error: DeviceFull, say: Callable[[str], None]) -> None:
    """Write what device memory held, if it is known, and tell where."""
    if error.snapshot is None:
        return
    folder.write(SNAPSHOT, json.dumps(error.snapshot, default=str))
    say(f"memory snapshot written to {folder.path / SNAPSHOT}")


def can_shrink(opened: Opening) -> bool:
    """Return whether a step may take less device memory, and could."""
    return (
        _smaller(opened) is not None
        and opened.resumed is None
        and opened.ranks.owner.is_alone
        and not opened.engine.torn
    )


def opened_smaller(opened: Opening, reason: str, say: Callable[[str], None]) -> Opening:
    """Return the run with less on the device; the user and the run folder get a line.

    `opened` has no engine and no data from then on.
    """
    config, home = opened.config, opened.home
    found = _smaller(opened)
    assert found is not None
    name, now, event, text = found
    before = getattr(opened.plan.settings, name)
    plan = opened.plan.with_setting(name, now, f"step 1 did not fit with {before}")
    say(f"step 1 does not fit: {text} ({reason})")
    record = {"event": event, "step": 0, "from": before, "to": now}
    opened.folder.append("events.jsonl", record | {"reason": reason})
    opened.engine.close()
    opened.data.close()
    data = open_data(
        config,
        opened.tokenizer,
        plan.settings,
        opened.data.rows,
        flat=packs_flat(home.decoder.config, compiles=plan.settings.compile),
    )
    try:
        engine = make_engine(
            config,
            plan.settings,
            home,
            opened.device,
            data.num_steps,
            loss=opened.given.loss,
        )
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
