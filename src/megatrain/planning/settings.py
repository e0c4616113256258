"""What a plan decides: every setting that moves memory or time, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from megatrain.planning.workload import Workload
from megatrain.step.shape import StepShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One way to run a workload."""

    micro_tokens: int
    """Tokens the device computes at a time."""
    slots: int = 2
    """Slots that layers rotate through; those beyond two keep the last layers for backward."""
    tape: Literal["device", "host"] = "device"
    update: Literal["in_backward", "late"] = "late"
    chunk_tokens: int = 4096
    """Tokens whose logits exist at a time."""
    gather_embedding: bool = False
    num_tape_slots: int = 2

    def changed(self, **changes: Any) -> Settings:
        """Return other settings."""
        return replace(self, **changes)

    def facts(self) -> dict[str, Any]:
        """Return the settings by name."""
        return asdict(self)

    def step_shape(self, workload: Workload, *, unified: bool) -> StepShape:
        """Return the shape of a step of `workload`."""
        model = workload.model
        return StepShape(
            num_blocks=model.num_blocks,
            num_micro=workload.num_micro(self.micro_tokens),
            num_slots=self.slots,
            tape=self.tape,
            num_tape_slots=self.num_tape_slots,
            copying=not unified,
            update=self.update,
            tied=model.tied,
            gathers=self.gather_embedding and not unified,
            trained=tuple(block.is_trained for block in model.blocks),
        )
