"""Published speeds as data (points.toml)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from megatrain.planning.catalog.asked_machines import find_machine
from megatrain.planning.catalog.known_models import find_known_model
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.model.shapes import ModelShape

HOST_BYTES = 4 << 40
"""Enough for each of the models: memory is not what is compared here."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One published speed."""

    system: str
    """Whose schedule it is: one of SYSTEMS."""
    source: str
    model: str
    machine: str
    step: int
    """Tokens of an optimizer step."""
    micro: int = 0
    """Tokens that the device has at a time; 0: those of the step."""
    sequence: int = 1024
    tokens_per_s: float = 0.0
    tflops: float = 0.0
    step_s: float = 0.0
    counted: Literal["6P", "recompute"] = "6P"
    """FLOPs per token of `tflops`: 6P, or 8P and full attention four times."""
    fused: bool = False
    on_host: tuple[str, ...] = ()
    """Of LLMQ, what its options put into host memory."""
    again: Literal["layers", "qkv and ffn", "ffn", "none"] = "layers"
    """What backward computes again."""
    step_is_assumed: bool = False
    fp16_sums: bool = False
    """Products add up in fp16, which GeForce cards do at twice the rate of their data sheets."""
    changes: dict[str, Any] = field(default_factory=dict)
    """In what their machine differs from the reference."""

    @property
    def name(self) -> str:
        model = self.model.rpartition("/")[2]
        return f"{self.system} {model} {self.machine} {self.step}/{self.micro_tokens}"

    @property
    def micro_tokens(self) -> int:
        return self.micro or self.step

    @cached_property
    def shape(self) -> ModelShape:
        return find_known_model(self.model).shape.renamed(self.model)

    @cached_property
    def profile(self) -> MachineProfile:
        """The machine as they use it."""
        if not self.fp16_sums:
            return self.exact_profile
        profile = self.exact_profile
        forward, backward = (
            tuple(rate._replace(flops=2 * rate.flops) for rate in rates)
            for rates in (profile.forward_flops, profile.backward_flops)
        )
        return profile.changed(forward_flops=forward, backward_flops=backward)

    @cached_property
    def exact_profile(self) -> MachineProfile:
        """The machine as we use it: sums in fp32."""
        machine, _ = find_machine(self.machine)
        return machine.profile(ram_bytes=HOST_BYTES).changed(**self.changes)

    @property
    def published(self) -> float:
        """Tokens per second."""
        if self.tokens_per_s:
            return self.tokens_per_s
        if self.step_s:
            return self.step / self.step_s
        return self.tflops * 1e12 / self._flops_per_token

    @property
    def _flops_per_token(self) -> float:
        if self.counted == "6P":
            return 6.0 * self.shape.params
        attention = 16.0 * self.shape.num_layers * self.shape.hidden * self.sequence
        return 8.0 * self.shape.params + attention


_TABLES: dict[str, Any] = tomllib.loads(
    (Path(__file__).parent / "points.toml").read_text(encoding="utf-8")
)
SOURCES: Mapping[str, str] = _TABLES["sources"]
POINTS = tuple(
    Point(**{**row, "on_host": tuple(row.get("on_host", ()))}) for row in _TABLES["point"]
)
EXPLAINED: Mapping[str, str] = _TABLES["explained"]
"""By the name of a point, why its prediction is far from it."""
LEFT_OUT: Mapping[str, str] = _TABLES["left_out"]
"""Figures that were found, and why they are not points."""
