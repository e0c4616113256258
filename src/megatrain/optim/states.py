"""The states that each optimizer keeps beside the fp32 master. Plain data, without torch.

A state is kept in fp32, in bf16, or in 8 bits with one scale for SHARED elements. In bf16 and in
8 bits an update rounds stochastically (optim/kernel.py). Bytes of zero mean a moment of zero in
all of them: a new store needs no first write.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megatrain.memory.kinds import TensorKind, state, store_kinds

SHARED = 256
"""Elements that share a scale, and a key of the random bits that round them. Divides layout.ALIGN,
so a run of elements starts at a multiple of it."""

M = state("m", "first moment (m)")
V = state("v", "second moment (v)")
ADAMW = (M, V)
ADAMW_BF16 = (
    state("m", "first moment (m)", "bfloat16"),
    state("v", "second moment (v)", "bfloat16"),
)
ADAMW_8BIT = (
    state("m", "first moment (m)", "int8"),
    state("m_scale", "scales of m", "float32", SHARED),
    state("v", "second moment (v)", "uint8"),
    state("v_scale", "scales of v", "float32", SHARED),
)

MUON = (M, state("v", "second moment (v)", is_for_matrices=False))
MUON_BF16 = (
    state("m", "first moment (m)", "bfloat16"),
    state("v", "second moment (v)", "bfloat16", is_for_matrices=False),
)
MUON_8BIT = (
    state("m", "first moment (m)", "int8"),
    state("m_scale", "scales of m", "float32", SHARED),
    state("v", "second moment (v)", "uint8", is_for_matrices=False),
    state("v_scale", "scales of v", "float32", SHARED, is_for_matrices=False),
)
"""Matrices of layers have a momentum alone, all others the moments of AdamW."""

StatesByName = Mapping[str, tuple[TensorKind, ...]]
"""States by `optim.state`, the most exact first."""

STATES: Mapping[str, StatesByName] = {
    "adamw": {"fp32": ADAMW, "bf16": ADAMW_BF16, "8bit": ADAMW_8BIT},
    "muon": {"fp32": MUON, "bf16": MUON_BF16, "8bit": MUON_8BIT},
}
"""States by `optim.name`."""


def state_among(optimizer: str, kinds: Collection[TensorKind]) -> str:
    """Return the `optim.state` whose states are among the kinds of a store."""
    return next(name for name, states in STATES[optimizer].items() if set(states) <= set(kinds))


WITHOUT_CLIP = store_kinds(ADAMW, waits=False)
"""12 bytes per bf16 param: updates run as gradients arrive."""
WITH_CLIP = store_kinds(ADAMW, waits=True)
"""14 bytes: gradients wait for the global norm."""
