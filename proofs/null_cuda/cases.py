"""The cases: what a step on the null device is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
LAYERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class NullCase:
    """A model, its rows and settings, and what a program does with the engine."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of StepSettings."""
    family: Literal["qwen3", "qwen3_moe"] = "qwen3"
    rows: Literal["packed", "plain"] = "packed"
    """Packed: four documents in each micro-batch. Plain: rows of two lengths."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    base: Literal["", "bf16", "nf4", "fp8"] = ""
    """Form of the frozen model under adapters; empty: all is trained."""
    does: Literal["steps", "evaluates", "samples"] = "steps"
    least: float = 0.0
    """Compute capability from which on cards can do it."""
    waits: int = 0
    """How often a lane has to wait in a step: to know how many rows an expert has."""
    is_large: bool = False
    """Whether matrices have more elements than are widened at once."""
    is_planned: bool = True
    """Whether there is a plan whose memory can be compared."""
    has_room: bool = False
    """Whether the plan may exceed the peak by more than a tenth."""

    def runs_on(self, capability: str) -> bool:
        return float(capability) >= self.least


CASES = (
    NullCase(name="packed"),
    NullCase(name="plain", rows="plain"),
    NullCase(name="offloaded activations", settings={"tape": "host"}),
    NullCase(name="updates in backward", settings={"update": "in_backward"}),
    NullCase(name="tiles", settings={"tile_tokens": 256, "tape": "host"}),
    NullCase(name="kept activations", settings={"kept_layers": 2}),
    NullCase(name="liger", settings={"kernels": "liger"}),
    # The plan counts narrow weights beside the peak of all else, and they are not there then.
    NullCase(name="fp8", settings={"products": "fp8"}, is_large=True, least=8.9, has_room=True),
    NullCase(name="muon", optimizer="muon"),
    # Three layers, which find out in forward and again when backward recomputes them.
    NullCase(
        name="expert pages",
        family="qwen3_moe",
        settings={"expert_pages": 2},
        waits=2 * 2 * LAYERS,
    ),
    NullCase(name="LoRA", base="bf16"),
    # The plan counts 64 MiB of widening, which is beside the peak too: 1 % of a real model's.
    NullCase(name="LoRA on nf4", base="nf4", is_large=True, has_room=True),
    NullCase(name="LoRA on fp8", base="fp8", is_large=True),
    NullCase(name="disk offload", settings={"tier": "states"}),
    NullCase(name="evaluation", does="evaluates", is_planned=False),
    NullCase(name="sampling", does="samples", rows="plain", is_planned=False),
)
SHORT = ("packed", "plain", "expert pages")
"""Cases of the push tier, on one capability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A change that breaks one law, and the case that shows it."""

    name: str
    case: str
    breaks: str
    """The count that rises."""


MUTANTS = (
    Mutant(name="a copy waits", case="packed", breaks="host_waits"),
    Mutant(name="memory is not registered", case="packed", breaks="pageable_copies"),
    Mutant(name="roles share a stream", case="expert pages", breaks="shared_streams"),
    Mutant(name="lanes set no device", case="packed", breaks="foreign_calls"),
)
