"""The memory of a run, planned and measured: what plan.json holds."""

from __future__ import annotations

import resource
from typing import Any

from megatrain.memory.ledger import Ledger, Line
from megatrain.memory.store import Store, store_ledger
from megatrain.pipeline.device import Device
from megatrain.trainer.resolve import Resolved


def memory_plan(
    store: Store, device: Device, base_bytes: int, resolved: Resolved, planned: dict[str, Any]
) -> dict[str, Any]:
    """Return the ledger, line by line, what was measured until now, and the settings.

    `planned` is what a plan says, if there is one; its ledger has working memory too.
    """
    base = Line(place="host", purpose="Python and libraries", num_bytes=base_bytes)
    ledger = Ledger([base]) + store_ledger(store.layout, store.kinds)
    lines = [
        {"place": line.place, "purpose": line.purpose, "num_bytes": line.num_bytes}
        for line in ledger.lines
    ]
    measured = {
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "device_peak_bytes": device.peak_bytes,
    }
    return {"ledger": lines, "measured": measured, "settings": resolved.facts()} | planned
