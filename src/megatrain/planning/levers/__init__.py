"""The levers of a step, in the order in which a plan shows them.

Each module here is one lever, whole (lever.py). The order of homes, which two of them make
together, is in homes.py. The precision of the optimizer's states is no lever: it changes what a run
computes, so the config alone decides it.
"""

from __future__ import annotations

from megatrain.planning.levers.chunk import ChunkTokens
from megatrain.planning.levers.embedding_rows import GatherEmbedding
from megatrain.planning.levers.gradient_slots import GradSlots
from megatrain.planning.levers.kept import KeptLayers
from megatrain.planning.levers.lever import Lever
from megatrain.planning.levers.micro_batch import MicroBatchTokens
from megatrain.planning.levers.pages import ExpertPages
from megatrain.planning.levers.slots import Slots
from megatrain.planning.levers.tape import Tape
from megatrain.planning.levers.tier import TIER
from megatrain.planning.levers.tiles import TileTokens
from megatrain.planning.levers.update import UPDATE

LEVERS: tuple[Lever, ...] = (
    TIER,
    MicroBatchTokens(),
    Slots(),
    ExpertPages(),
    Tape(),
    UPDATE,
    KeptLayers(),
    ChunkTokens(),
    TileTokens(),
    GradSlots(),
    GatherEmbedding(),
)
KEPT = tuple(lever for lever in LEVERS if lever.is_kept)
"""The bits of a run depend on these: they stay unless the config sets them."""
CHANGE_FORWARD = tuple(lever.name for lever in LEVERS if lever.changes_forward)
"""Step settings that change the last bits of a forward pass."""
