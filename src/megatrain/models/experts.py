"""Products of experts on devices without a kernel for groups of rows: two waits instead of eight.

Torch's grouped product has a kernel on few cards (NVIDIA's sm90 and sm100, in bf16). Elsewhere it
asks the device for the sizes of the groups, and then multiplies group by group: the host waits
twice in the forward of a layer's experts, twice in its recompute and four times in its backward.
Here the sizes are asked for once in a forward, and kept for its second product and its backward.

No wait at all needs a kernel that torch does not have. With torch's ops either each row brings a
copy of its expert's weights, or each tile of rows does: both move more bytes than the wait costs
(journal/2026-11.md).

Laws (tests/models/test_experts.py)
    1. The bits of torch's grouped product where it has no kernel.
    2. The host asks once in a forward, and never in a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from megatrain.models.adapters.params import AdaptedWeight

COUNTED = "megatrain_counted_mm"
"""The name that transformers has for it."""


def count_on_host(model: PreTrainedModel) -> None:
    """Let the experts of `model`, if it has any, multiply by groups that the host knows."""
    ALL_EXPERTS_FUNCTIONS.register(COUNTED, _counted_experts)
    if has_experts(model):
        model.set_experts_implementation(COUNTED)


def has_experts(model: PreTrainedModel) -> bool:
    """Return whether the model's code multiplies by groups of rows."""
    return any(hasattr(module, "_is_expert_parallel") for module in model.modules())


def _counted_experts(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    with _KnownGroups():
        output: Tensor = grouped_mm_experts_forward(module, *args, **kwargs)
        return output


class _KnownGroups(TorchFunctionMode):
    """Multiplies by groups of one forward; its products have the same."""

    def __init__(self) -> None:
        super().__init__()
        self._known: tuple[Tensor, list[int]] | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not torch._grouped_mm:
            return func(*args, **kwargs or {})
        rows, weights = args
        if isinstance(weights, AdaptedWeight):
            own = self.__torch_function__(func, types, (rows, weights.weight), kwargs)
            ends = self._known[1]  # type: ignore[index]  # of the product with its own weights
            return weights.beside(own, rows, lambda a, b: _GroupedProduct.apply(a, b, ends))  # type: ignore[no-untyped-call]
        offsets = (kwargs or {})["offs"]
        if self._known is None or self._known[0] is not offsets:
            self._known = offsets, ask_device(offsets)
        return _GroupedProduct.apply(rows, weights, self._known[1])  # type: ignore[no-untyped-call]


def ask_device(offsets: Tensor) -> list[int]:
    """Return where groups of rows end: the host waits for the device."""
    ends: list[int] = offsets.tolist()
    return ends


class _GroupedProduct(torch.autograd.Function):
    """(rows, k) by (experts, k, n): each group of rows with its expert's matrix."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: list[int]) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.ends = ends
        product = rows.new_empty(rows.shape[0], weights.shape[2])
        for expert, group in _groups(ends):
            torch.mm(rows[group], weights[expert], out=product[group])
        return product

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,), (rows, weights) = grads, ctx.saved_tensors
        wants_rows, wants_weights, _ = ctx.needs_input_grad
        of_rows = torch.empty_like(rows) if wants_rows else None
        of_weights = torch.zeros_like(weights) if wants_weights else None
        for expert, group in _groups(ctx.ends):
            if of_rows is not None:
                torch.mm(grad[group], weights[expert].t(), out=of_rows[group])
            if of_weights is not None:
                torch.mm(rows[group].t(), grad[group], out=of_weights[expert])
        return of_rows, of_weights, None


def _groups(ends: list[int]) -> Iterator[tuple[int, slice]]:
    """Yield experts that have rows, and their rows."""
    for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if end > begin:
            yield expert, slice(begin, end)
