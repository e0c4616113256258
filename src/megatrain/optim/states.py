"""The states that each optimizer keeps beside the fp32 master. Plain data, without torch."""

from __future__ import annotations

from megatrain.memory.kinds import Kind, state, store_kinds

M = state("m", "first moment (m)")
V = state("v", "second moment (v)")
ADAMW = (M, V)

STATES: dict[str, tuple[Kind, ...]] = {"adamw": ADAMW}
"""By `optim.name`."""

WITHOUT_CLIP = store_kinds(ADAMW, waits=False)
"""12 bytes per bf16 param: updates run as gradients arrive."""
WITH_CLIP = store_kinds(ADAMW, waits=True)
"""14 bytes: gradients wait for the global norm."""
