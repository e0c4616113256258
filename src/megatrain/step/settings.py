"""How a step runs: one set of settings for config, plan, schedule, engine and report.

A field has the name of its key in `train`, `memory` or `optim`; `update` follows from
train.max_grad_norm, and `tier` is possible with memory.disk.
The config gives some of them, the plan chooses the others, the engine takes them all.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from megatrain.step.shape import StepShape

CHUNK_TOKENS = 4096
"""Larger chunks of logits are not faster."""
PART_ELEMENTS = 2**22
"""Logits that the CPU scores at once: 16 MiB in fp32, a size that malloc does not map each time."""
DEVICE_PART_ELEMENTS = 2**25
"""The same for an accelerator: a tenth of a millisecond of work for each kernel, in 128 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Everything about a step that does not depend on the model, the data or the device."""

    micro_batch_tokens: int = 8192
    """Tokens that the device processes at a time."""
    slots: int = 2
    """Slots that layers rotate through; those beyond two keep the last layers for backward."""
    tape: Literal["device", "host"] = "device"
    tape_slots: int = 2
    """Device ring between compute and a host tape."""
    update: Literal["in_backward", "late", "second_backward"] = "late"
    """When the optimizer updates a block: as its gradient arrives, once all norms are known, or as
    its gradient arrives in a second backward, with the norms of the first."""
    state: Literal["fp32", "bf16", "8bit"] = "fp32"
    """How exactly the optimizer keeps its states; masters are fp32 in all of them."""
    tier: Literal["none", "states"] = "none"
    """The part on disk between updates: nothing, or remainders and states."""
    chunk_tokens: int = CHUNK_TOKENS
    """Tokens whose logits exist at a time."""
    kept_layers: int = 0
    """Top layers whose activations stay on the device: backward does not compute them again."""
    tile_tokens: int | None = None
    """Tokens that a layer computes at a time, but for its attention; None: the full row."""
    expert_pages: int = 1
    """Parts in which the experts of a layer visit the device while it computes; 1: at once."""
    grad_slots: Literal[1, 2] = 2
    """Gradient slots that layers rotate through; with one, compute waits for each drain."""
    gather_embedding: bool = False
    """Send the rows of a step's tokens to the device, not the full table."""
    router_aux_loss: float = 0.0
    """Coefficient of the load-balancing loss of all experts (models/balance.py)."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """The engine skips the step, or raises NonFiniteStep."""
    compile: bool = False
    """Let torch compile the layers, those of equal structure once (models/compiled.py)."""
    kernels: Literal["none", "liger"] = "none"
    """Fused kernels for norms, rotations and feed-forward on a device (engine/compute/fused.py)."""
    products: Literal["plain", "fp8"] = "plain"
    """How linear modules of layers multiply (engine/compute/products.py)."""
    deterministic: bool = False
    """Only kernels that give the same bits each time (devices/deterministic.py)."""
    seed: int = 0
    """Seed for dropout."""

    def changed(self, **changes: Any) -> StepSettings:
        """Return a copy with these fields changed."""
        return replace(self, **changes)

    def forward_alone(self, micro_batch_tokens: int) -> StepSettings:
        """Return the settings of another model's pass over the same rows, which never goes back."""
        return StepSettings(
            micro_batch_tokens=micro_batch_tokens,
            chunk_tokens=self.chunk_tokens,
            compile=self.compile,
            deterministic=self.deterministic,
        )

    def facts(self) -> dict[str, Any]:
        """Return the settings by name."""
        return asdict(self)

    @property
    def keeps_activations(self) -> bool:
        """Whether some layers keep their activations for backward."""
        return self.kept_layers > 0

    @property
    def gradients_stay(self) -> bool:
        """Whether each gradient waits for its update in the store, and not in a ring."""
        return self.update == "late"

    def shape(
        self, *, num_blocks: int, copying: bool, updates: bool = True, **model: Any
    ) -> StepShape:
        """Return the shape of a step; without `updates` its gradients stay in the store.

        `model` has the other fields of StepShape: what the model and the batch decide. Experts come
        in pages where they are fetched by one rank; the engine refuses others.
        """
        pages = self.expert_pages > 1 and copying and not model.get("divided", False)
        return StepShape(
            num_blocks=num_blocks,
            slots=self.slots,
            grad_slots=self.grad_slots,
            kept_layers=self.kept_layers,
            pages=pages,
            tape=self.tape,
            tape_slots=self.tape_slots,
            copying=copying,
            update=self.update if updates else "none",
            tier=self.tier if updates else "none",
            gather_embedding=self.gather_embedding and copying,
            **model,
        )
