"""Products of experts: a group of rows for each, by weights that are there whole or in pages.

Torch's grouped product has a kernel on few cards (NVIDIA's sm90 and sm100, in bf16). Elsewhere it
asks the device for the sizes of the groups, and then multiplies group by group: the host waits
twice in the forward of a layer's experts, twice in its recompute and four times in its backward.
Here the sizes are asked for once in a forward, and kept for its second product and its backward.

No wait at all needs a kernel that torch does not have. With torch's ops either each row brings a
copy of its expert's weights, or each tile of rows does: both move more bytes than the wait costs.
Tiles of 256 rows would move 10.8 GB in the forward of a layer of Qwen3-30B-A3B at 8,192 tokens,
about 11 ms of an RTX 4090's memory against 0.1 ms for a wait (predicted).

Pages: the experts of a block need not be on the device at once. Rows are sorted by expert, so a
page, which is a range of experts, has a range of rows, and a product walks over pages: each fills
its rows of the result. All that adds over experts, the sum over a token's choices and the gradient
of its hidden states, happens behind the products, over all rows. Where torch has a kernel for
groups, a page is one call of it.

Laws (tests/models/test_experts.py; of pages: tests/engine/test_pages.py)
    1. The bits of torch's grouped product where it has no kernel.
    2. The host asks once in a forward, and never in a backward.
    3. Pages of any size give the bits of the whole, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from megatrain.models.adapters.params import AdaptedWeight
from megatrain.models.decoder import has_experts

COUNTED = "megatrain_counted_mm"
"""The name that transformers has for it."""


class Pages(Protocol):
    """The weights of a block's experts, a page at a time. Experts are numbered over all pages."""

    def walk(
        self, module: torch.nn.Module, param: str, ends: Sequence[int], *, back: bool = False
    ) -> Iterator[tuple[range, Tensor]]:
        """Yield experts and their weights, (experts, ...), of each page that has rows, in order.

        A page is valid until the next one is asked for. `ends` are where groups of rows end.
        """

    def add(self, module: torch.nn.Module, param: str, experts: range, gradient: Tensor) -> None:
        """Add to the gradient of some experts of a param. (experts, ...)"""

    def ask(self, offsets: Tensor) -> list[int]:
        """Return where groups of rows end: the host waits for the device."""

    @property
    def groups(self) -> bool:
        """Whether the device has a kernel for groups of rows."""


_PAGES: ContextVar[Pages | None] = ContextVar("pages", default=None)


@contextmanager
def in_pages(pages: Pages | None) -> Iterator[None]:
    """Let experts that compute inside, forward or backward, find their weights in `pages`."""
    token = _PAGES.set(pages)
    try:
        yield
    finally:
        _PAGES.reset(token)


def count_on_host(model: PreTrainedModel) -> None:
    """Let the experts of `model`, if it has any, multiply by groups that the host knows."""
    ALL_EXPERTS_FUNCTIONS.register(COUNTED, _counted_experts)
    if has_experts(model):
        model.set_experts_implementation(COUNTED)


def product_params(module: torch.nn.Module) -> tuple[str, str]:
    """Return the params of a mixture that its two products read, in order."""
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def _counted_experts(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    with _KnownGroups(module, _PAGES.get()):
        output: Tensor = grouped_mm_experts_forward(module, *args, **kwargs)
        return output


class _KnownGroups(TorchFunctionMode):
    """Multiplies by groups of one forward; its products have the same."""

    def __init__(self, module: torch.nn.Module | None = None, pages: Pages | None = None) -> None:
        """`pages` have the weights of `module`; None: products are given weights that are whole."""
        super().__init__()
        self._pages = pages
        self._known: tuple[Tensor, list[int]] | None = None
        self._read = iter(
            [(module, param) for param in product_params(module)] if module is not None else []
        )

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
        offsets, pages = (kwargs or {})["offs"], self._pages
        if self._known is None or self._known[0] is not offsets:
            asked = ask_device(offsets) if pages is None else pages.ask(offsets)
            self._known = offsets, asked
        ends = self._known[1]
        if pages is None:
            return _GroupedProduct.apply(rows, weights, ends)  # type: ignore[no-untyped-call]
        groups = _Groups(ends, offsets if pages.groups else None)
        read = _Read(*next(self._read), groups)
        return _PagedProduct.apply(rows, weights, read)  # type: ignore[no-untyped-call]


def ask_device(offsets: Tensor) -> list[int]:
    """Return where groups of rows end: the host waits for the device."""
    ends: list[int] = offsets.tolist()
    return ends


class _GroupedProduct(torch.autograd.Function):
    """(rows, k) by (experts, k, n): each group of rows with its expert's matrix."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: list[int]) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.groups = _Groups(ends)
        product = rows.new_empty(rows.shape[0], weights.shape[2])
        ctx.groups.multiply(rows, weights, product)
        return product

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,), (rows, weights) = grads, ctx.saved_tensors
        wants_rows, wants_weights, _ = ctx.needs_input_grad
        of_rows = torch.empty_like(rows) if wants_rows else None
        of_weights = None
        if of_rows is not None:
            ctx.groups.multiply(grad, weights.transpose(-2, -1), of_rows)
        if wants_weights:
            of_weights = ctx.groups.gradient(rows, grad, weights)
        return of_rows, of_weights, None


@dataclass(frozen=True, slots=True)
class _Groups:
    """Groups of rows, one for each expert."""

    ends: list[int]
    """Where they end."""
    offsets: Tensor | None = None
    """The same on a device that has a kernel for groups. (experts,)"""

    def multiply(
        self, rows: Tensor, weights: Tensor, product: Tensor, experts: range | None = None
    ) -> None:
        """Fill the rows of `product` that some experts have; `weights` are theirs alone."""
        experts = experts or range(len(self.ends))
        if self.offsets is None:
            for expert, group in self._each(experts):
                torch.mm(rows[group], weights[expert - experts.start], out=product[group])
            return
        span = self.span(experts)
        offsets = self._within(self.offsets, experts)
        product[span] = torch._grouped_mm(rows[span], weights, offs=offsets)

    def gradient(
        self, rows: Tensor, grad: Tensor, weights: Tensor, experts: range | None = None
    ) -> Tensor:
        """Return the gradient of some experts' `weights`, laid out as they are."""
        experts = experts or range(len(self.ends))
        found: Tensor
        if self.offsets is None:
            found = torch.zeros_like(weights)
            for expert, group in self._each(experts):
                torch.mm(rows[group].t(), grad[group], out=found[expert - experts.start])
            return found
        span = self.span(experts)
        offsets = self._within(self.offsets, experts)
        if weights.stride(-1) == 1:
            found = torch._grouped_mm(rows[span].t(), grad[span], offs=offsets)
            return found
        found = torch._grouped_mm(grad[span].t(), rows[span], offs=offsets)
        return found.transpose(-2, -1)

    def span(self, experts: range) -> slice:
        """Return the rows of some experts."""
        return slice(self.ends[experts.start - 1] if experts.start else 0, self.ends[experts[-1]])

    def _within(self, offsets: Tensor, experts: range) -> Tensor:
        within: Tensor = offsets[experts.start : experts.stop] - self.span(experts).start
        return within

    def _each(self, experts: range) -> Iterator[tuple[int, slice]]:
        """Yield experts that have rows, and their rows."""
        for expert in experts:
            group = self.span(range(expert, expert + 1))
            if group.stop > group.start:
                yield expert, group


@dataclass(frozen=True, slots=True)
class _Read:
    """A param of a mixture that a product reads in pages."""

    module: torch.nn.Module
    param: str
    groups: _Groups

    def pages(self, *, back: bool = False) -> Iterator[tuple[range, Tensor]]:
        """Yield experts and weights of each page that has rows, as products take them."""
        for experts, weights in _pages().walk(self.module, self.param, self.groups.ends, back=back):
            yield experts, weights if self.module.is_transposed else weights.transpose(-2, -1)

    def add(self, experts: range, gradient: Tensor) -> None:
        if not self.module.is_transposed:
            gradient = gradient.transpose(-2, -1)
        _pages().add(self.module, self.param, experts, gradient)


def _pages() -> Pages:
    pages = _PAGES.get()
    assert pages is not None, "experts compute outside of an op that has their pages"
    return pages


class _PagedProduct(torch.autograd.Function):
    """The same product, page by page. Gradients of weights leave with their page.

    In backward pages are those of the op that goes back, which may not be the one that computed.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, stand_in: Tensor, read: _Read) -> Tensor:
        """`stand_in` has the shape of all experts' weights, and no values."""
        ctx.save_for_backward(rows)
        ctx.read = read
        product = rows.new_empty(rows.shape[0], stand_in.shape[2])
        for experts, weights in read.pages():
            read.groups.multiply(rows, weights, product, experts)
        return product

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        (grad,), (rows,), read = grads, ctx.saved_tensors, ctx.read
        wants_rows, wants_weights, _ = ctx.needs_input_grad
        of_rows = torch.empty_like(rows) if wants_rows else None
        for experts, weights in read.pages(back=True):
            if of_rows is not None:
                read.groups.multiply(grad, weights.transpose(-2, -1), of_rows, experts)
            if wants_weights:
                read.add(experts, read.groups.gradient(rows, grad, weights, experts))
        return of_rows, None, None
