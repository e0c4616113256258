"""Will the run stay within `memory.ram`? Known from config.json, before a byte is loaded.

`auto` leaves it to the store, which refuses what is not free on this machine, limits of the
process's group included (memory/host.py). A size is a cap on this process: what Python and its
libraries hold already, and all that the store will hold once every step has written to it.

Laws (tests/trainer/test_host_memory.py)
    1. A run is refused if and only if its ledger exceeds the cap.
    2. A refusal names changes that would fit, the smallest first.
"""

from __future__ import annotations

from pathlib import Path

from megatrain.config import Config
from megatrain.disk.folder import read_config_bytes
from megatrain.errors import DoesNotFit
from megatrain.memory.host import resident_bytes
from megatrain.memory.layout import Layout, build_layout
from megatrain.memory.ledger import Ledger, Line, gib
from megatrain.memory.store import WITH_CLIP, WITHOUT_CLIP, store_ledger
from megatrain.models.decoder import build_decoder
from megatrain.models.model_config import parse_config


def check_ram(config: Config) -> None:
    """Raise DoesNotFit if the run would hold more host memory than `memory.ram`."""
    cap = config.memory.ram
    if isinstance(cap, str):
        return
    layout = _layout(config)
    clips = config.train.max_grad_norm is not None
    ledger = host_ledger(layout, clips=clips)
    needed = ledger.total("host")
    if needed <= cap:
        return
    purposes = "  ".join(f"{line.purpose} {gib(line.num_bytes)}" for line in ledger.lines)
    changes = []
    if clips and (without := host_ledger(layout, clips=False).total("host")) <= cap:
        changes.append(f"train.max_grad_norm=null ({gib(without)})")
    changes.append(f"memory.ram={-(-needed // 10**6)}MB")
    raise DoesNotFit(
        f"host memory: the run needs {gib(needed)}, memory.ram allows {gib(cap)}.\n"
        f"  {purposes}\n  What would fit: {', or '.join(changes)}"
    )


def host_ledger(layout: Layout, *, clips: bool) -> Ledger:
    """Return what this process will hold: what it holds now, and the store."""
    base = Line(place="host", purpose="Python and libraries", num_bytes=resident_bytes())
    return Ledger([base]) + store_ledger(layout, WITH_CLIP if clips else WITHOUT_CLIP)


def _layout(config: Config) -> Layout:
    model = config.model
    attn = None if model.attn == "auto" else model.attn
    parsed = parse_config(read_config_bytes(Path(model.name_or_path)))
    return build_layout(build_decoder(parsed, model.dtype, model.frozen, attn).blocks)
