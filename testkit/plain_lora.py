"""LoRA as a textbook has it, on the resident model: the other side of the adapters' equalities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class HandLora(nn.Module):
    """A module, and beside it two linear ones, of which only these are trained."""

    def __init__(
        self, module: nn.Module, a: Tensor, b: Tensor, *, scaling: float, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.module, self.scaling = module, scaling
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.lora_A, self.lora_B = (_linear(matrix) for matrix in (a, b))

    @property
    def weight(self) -> object:
        return self.module.weight  # some models look at its dtype

    def forward(self, given: Tensor) -> Tensor:
        # The module first: the order of operations is that in which gradients of `given` add up.
        output: Tensor = self.module(given)
        beside: Tensor = self.lora_B(self.lora_A(self.dropout(given)))
        return output + beside * self.scaling


def _linear(matrix: Tensor) -> nn.Linear:
    linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, dtype=matrix.dtype)
    linear.weight.data.copy_(matrix)
    return linear


def adapt_plainly(
    model: PreTrainedModel,
    modules: Sequence[str],
    values: Mapping[str, Tensor],
    *,
    scaling: float,
    dropout: float = 0.0,
) -> None:
    """Freeze the model, and give it adapters with these values, by our names."""
    model.requires_grad_(False)
    for path in modules:
        parent, _, name = path.rpartition(".")
        adapted = HandLora(
            model.get_submodule(path),
            values[f"{path}.lora_A"],
            values[f"{path}.lora_B"],
            scaling=scaling,
            dropout=dropout,
        )
        setattr(model.get_submodule(parent), name, adapted.train(model.training))


def named_as_ours(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of adapters by our names: also those of PEFT, whatever it puts between."""
    return {
        f"{name.partition('.lora_')[0]}.lora_{name.partition('.lora_')[2][0]}": tensor
        for name, tensor in gradients.items()
        if ".lora_" in name
    }


def drawn_like(values: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return other values for adapters, none of them zero, so that all of their gradients count."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(value.shape, generator=generator).mul_(0.1).to(value.dtype)
        for name, value in values.items()
    }
