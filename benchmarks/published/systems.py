"""How each system takes a step, in the terms of our simulator.

Decided from a system's own text and program before any of its speeds was predicted, the same for
all of its points, and not changed since. The machine's figures are those of the catalog.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.published.points import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A schedule. A copy is as many bytes as a block has in bf16: 2 per parameter."""

    copies_in: tuple[int, int]
    """Over the link for each layer, in forward and in backward, for each micro-batch."""
    copies_out: tuple[int, int]
    """Of each gradient, for each micro-batch, and how many more for the last of a step."""
    update: Literal["after", "in_backward"]
    """When the optimizer runs: after backward while the device waits, or as gradients arrive."""
    update_bytes: float
    """Host memory traffic per parameter of an update; 0: it runs on the device."""
    update_copies: int = 0
    """Copies in, and as many out, of an update on the device."""
    returns_weights: bool = False
    """Weights stay on the device, and an update on the host sends them back."""
    forwards_again: float = 1.0
    """How often backward computes a forward again."""
    backward_saved: float = 0.0
    """The share of backward's time that a later version saves, by its own measurement."""
    staged: bool = False
    """Weights pass through a pinned buffer: the profile's `unpinned_share` of the link."""
    tape: Literal["device", "host"] = "device"
    why: str


PAPER = System(
    copies_in=(1, 2),
    copies_out=(1, 0),
    update="after",
    update_bytes=30,
    forwards_again=2,
    staged=True,
    why="Each group of layers is streamed and computed once more from its checkpoint, then each "
    "layer is streamed and computed again for its own graph: three forwards, weights in three "
    "times. Weights are pageable and pass through pinned buffers. clip_grad_norm_ (6 bytes per "
    "parameter), Adam with bf16 weights and fp32 moments (22) and zero_grad (2) follow backward.",
)
ZERO_3 = System(
    copies_in=(1, 3),
    copies_out=(1, 2),
    update="after",
    update_bytes=42,
    why="Weights come for forward, for its recompute and for backward, for each micro-batch. "
    "A gradient goes into a buffer on the host, comes back to be added to, and goes out again in "
    "fp32 with the last micro-batch. step() scales gradients (8 bytes per parameter), runs Adam in "
    "fp32 (28) and copies masters to bf16 weights (6), group by group, while the device waits.",
)
ZERO_3_ASYNC = replace(
    ZERO_3,
    backward_saved=0.28,
    why="As ZeRO-3, since DeepSpeed 8207 (August 2026): gradients leave asynchronously, into "
    "buffers that are pinned by default. Its author measured a backward that is 18 to 28 % shorter "
    "on four RTX 4080 Super, against pageable buffers. The larger share is an upper bound: less is "
    "saved where buffers were pinned before, and where compute limits.",
)
ZERO_2 = replace(
    ZERO_3,
    copies_in=(0, 1),
    returns_weights=True,
    why="As ZeRO-3, with the weights on the device, where an update sends them.",
)
SUPER_OFFLOAD = System(
    copies_in=(0, 0),
    copies_out=(2, 0),
    update="in_backward",
    update_bytes=0.9 * 28,
    returns_weights=True,
    why="Weights stay on the device, gradients are cast there and leave in fp32, and Adam updates "
    "nine tenths of the parameters while backward runs, before the norm is known.",
)
LLMQ = System(
    copies_in=(0, 0),
    copies_out=(0, 0),
    update="after",
    update_bytes=0,
    why="A micro-batch after another; its options say what is on the host. Weights there come for "
    "forward and for backward, gradients come and go to be added to, residuals go and come. "
    "The optimizer runs on the device behind backward, on bf16 states from the host.",
)
ROUND_PIPE = System(
    copies_in=(1, 1),
    copies_out=(1, 0),
    update="in_backward",
    update_bytes=30,
    why="A stage of layers is uploaded once in forward and once in backward, which computes it "
    "again, for all micro-batches. The optimizer runs beside the next step, on weights that are "
    "one step old: Adam in fp32 (28 bytes per parameter) and a copy of the weights (2).",
)
SYSTEMS: Mapping[str, System] = {
    "paper": PAPER,
    "ZeRO-3": ZERO_3,
    "ZeRO-3 async": ZERO_3_ASYNC,
    "ZeRO-2": ZERO_2,
    "SuperOffload": SUPER_OFFLOAD,
    "LLMQ": LLMQ,
    "RoundPipe": ROUND_PIPE,
}


def system_of(point: Point) -> System:
    """Return the point's schedule; of LLMQ, as the options of its run make it."""
    system = SYSTEMS[point.system]
    if point.system != "LLMQ":
        return system
    weights, gradients = "weights" in point.on_host, "gradients" in point.on_host
    return replace(
        system,
        copies_in=(int(weights), int(weights) + int(gradients)),
        copies_out=(int(gradients), 0),
        update_copies=len({"m", "v", "master"} & set(point.on_host)),
        forwards_again=_share_again(point),
        tape="host" if "residuals" in point.on_host else "device",
    )


def _share_again(point: Point) -> float:
    """Return the share of a layer's parameters whose products backward computes again."""
    layer = point.shape.layers[0]
    before, _ = layer.params_around_attention(point.shape.hidden)
    ffn = layer.params - layer.attention_params
    again = {"layers": layer.params, "qkv and ffn": before + ffn, "ffn": ffn, "none": 0}
    return again[point.again] / layer.params
