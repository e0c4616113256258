"""The load-balancing loss of a mixture of experts, while its layers stream.

    loss = experts x sum over experts of share x probability

    share         how often the expert is among the top_k of a router, per token and layer
    probability   mean of the router's softmax over the same tokens and layers

Both are means over all layers and over all tokens of a step, whatever its micro-batches; padding is
left out. A share has no gradient. So forward keeps no router logits: it adds up two vectors with
one number per expert. When it has ended, the gradient of the sum of probabilities is one vector,
the same for all layers and tokens. Backward recomputes a layer's logits anyway, and starts from
that vector too.

Which tensors are router logits, the number of experts and top_k are what the model's own forward
says; its own function is compared with ours before training.

Laws (tests/models/test_balance.py, tests/engine/test_balance.py)
    1. Loss and gradients are those of the plain model with `output_router_logits`.
    2. A model whose own function computes something else has no balancing here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from megatrain.models.layer_call import ROUTER_LOGITS
from megatrain.models.probing.stand_ins import head_replaced, layers_replaced, stand_in_weights

_OWN_FUNCTION = "load_balancing_loss_func"
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
MAX_EXPERTS = 1 << 14
"""Per layer. The check against the model's own function makes a few rows of so many numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balancing:
    """A model's load-balancing loss: how many experts there are, chosen, and its coefficient."""

    num_experts: int
    top_k: int
    coefficient: float
    """Factor of the loss in the model's own code."""


class Routing:
    """Counts and sums over the routers of a step so far."""

    def __init__(self, balancing: Balancing, memory: Tensor | None = None) -> None:
        """`memory` is where counts and sums are to be, fp32; None: anywhere. (2, experts)"""
        self._balancing = balancing
        self._memory = memory
        self._counts: Tensor | None = None
        self._sums: Tensor | None = None
        self._num_rows = 0.0

    def add(self, logits: Sequence[Tensor], mask: Tensor | None, num_tokens: int) -> None:
        """Count the routers of one layer; of its tokens, `num_tokens` are not padding."""
        for layer_logits in logits:
            counts, sums = self._counted(layer_logits, mask)
            if self._counts is None or self._sums is None:
                self._counts, self._sums = self._kept(counts, sums)
            else:
                self._counts.add_(counts)
                self._sums.add_(sums)
            self._num_rows += num_tokens

    def _kept(self, counts: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        if self._memory is None:
            return counts, sums
        return self._memory[0].copy_(counts), self._memory[1].copy_(sums)

    def widen(self, total: Tensor, own_tokens: int, num_tokens: int) -> None:
        """Take `total`, of all ranks, for what was counted: of `num_tokens`, not `own_tokens`."""
        self._counts = total[0]
        self._sums = total[1]
        num_routers = self._num_rows / max(1, own_tokens)
        self._num_rows = num_routers * num_tokens

    def loss(self) -> Tensor:
        """Return the loss over all that was counted: top_k when experts are used evenly. ()"""
        assert self._counts is not None, "no layer has a router"
        assert self._sums is not None
        shares, means = self._counts / self._num_rows, self._sums / self._num_rows
        return (shares * means).sum() * self._balancing.num_experts

    def d_sums(self, coefficient: float) -> Tensor:
        """Return the gradient of `coefficient` x loss by the sums of probabilities. (experts,)"""
        assert self._counts is not None, "no layer has a router"
        shares = self._counts / self._num_rows
        return shares * (coefficient * self._balancing.num_experts) / self._num_rows

    def _counted(self, logits: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return how often each expert is chosen, and the sums of probabilities. (experts,) each"""
        probabilities = logits.softmax(dim=-1)
        chosen = probabilities.topk(self._balancing.top_k, dim=-1).indices
        ones = torch.ones_like(chosen, dtype=torch.float32)
        if mask is not None:
            ones = ones * mask.reshape(-1, 1)
        # Not bincount: on a device it makes the host wait.
        counts = torch.zeros(logits.shape[-1], dtype=torch.float32, device=logits.device)
        counts.scatter_add_(0, chosen.flatten(), ones.flatten())
        return counts, _summed(probabilities, mask)


def probability_sums(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Return the sum over tokens of the router's softmax, padding left out. (experts,)"""
    return _summed(logits.softmax(dim=-1), mask)


def _summed(probabilities: Tensor, mask: Tensor | None) -> Tensor:
    rows = probabilities.float()
    return (rows if mask is None else rows * mask.reshape(-1, 1).float()).sum(dim=0)


def record_router_logits(model: PreTrainedModel, layers_path: str) -> None:
    """Let `router_logits_of` record the layers of `model`, by transformers' own hooks."""
    maybe_install_capturing_hooks(_recorded_part(model, layers_path))


def has_own_balancing(model: PreTrainedModel, layers_path: str) -> bool:
    """Return whether the model's own forward has a load-balancing loss, and routers for it."""
    has_function = _OWN_FUNCTION in inspect.unwrap(type(model).forward).__globals__
    return has_function and _has_router(model, layers_path)


def find_balancing(
    model: PreTrainedModel, layers_path: str, head_path: str, num_outputs: int
) -> Balancing | None:
    """Return how the model's own forward balances experts; None if it does not, or not so."""
    if not has_own_balancing(model, layers_path):
        return None
    try:
        num_experts, top_k = _own_arguments(model, layers_path, head_path, num_outputs)
        coefficient = next(getattr(model, name) for name in _COEFFICIENTS if hasattr(model, name))
        balancing = Balancing(num_experts=num_experts, top_k=top_k, coefficient=float(coefficient))
        own = inspect.unwrap(type(model).forward).__globals__[_OWN_FUNCTION]
        return balancing if num_experts <= MAX_EXPERTS and _agrees(own, balancing) else None
    except Exception:  # a config can have any values; using the balance is then refused
        return None


def _recorded_part(model: PreTrainedModel, layers_path: str) -> PreTrainedModel:
    """Return the innermost model around the layers: the one whose forward records."""
    path = layers_path
    while path:
        path = path.rpartition(".")[0]
        part = model.get_submodule(path)
        if isinstance(part, PreTrainedModel):
            return part
    return model


def _has_router(model: PreTrainedModel, layers_path: str) -> bool:
    """Return whether any layer has a module that is recorded."""
    found = _recorded_part(model, layers_path).can_record_outputs.get(ROUTER_LOGITS, [])
    recorders = found if isinstance(found, list) else [found]
    kinds: Any = tuple(getattr(recorder, "target_class", recorder) for recorder in recorders)
    return any(isinstance(module, kinds) for module in model.get_submodule(layers_path).modules())


def _own_arguments(
    model: PreTrainedModel, layers_path: str, head_path: str, num_outputs: int
) -> tuple[int, int]:
    """Return experts and top_k as the model's forward gives them to its own function."""
    received: list[dict[str, Any]] = []
    scope = inspect.unwrap(type(model).forward).__globals__
    signature = inspect.signature(scope[_OWN_FUNCTION])

    def receive(*args: Any, **kwargs: Any) -> Tensor:
        received.append(signature.bind(*args, **kwargs).arguments)
        return torch.zeros(())

    layers = model.get_submodule(layers_path)
    assert isinstance(layers, nn.ModuleList)
    inputs = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "use_cache": False}
    with (
        torch.no_grad(),
        _replaced(scope, receive),
        _without_hooks(_recorded_part(model, layers_path)),
        layers_replaced(layers, lambda _call, hidden: hidden, num_outputs),
        head_replaced(model, head_path, lambda hidden: hidden),
    ):
        weights = stand_in_weights(model, layers_path, head_path)
        torch.func.functional_call(model, weights, kwargs={**inputs, "output_router_logits": True})
    return int(received[0]["num_experts"]), int(received[0]["top_k"])


@contextmanager
def _replaced(scope: dict[str, Any], function: Callable[..., Tensor]) -> Iterator[None]:
    own = scope[_OWN_FUNCTION]
    scope[_OWN_FUNCTION] = function
    try:
        yield
    finally:
        scope[_OWN_FUNCTION] = own


@contextmanager
def _without_hooks(part: PreTrainedModel) -> Iterator[None]:
    """Keep transformers from hooking into stand-ins as if they were the model."""
    part._output_capturing_hooks_installed = True
    try:
        yield
    finally:
        del part._output_capturing_hooks_installed


def _agrees(own: Callable[..., Tensor], balancing: Balancing) -> bool:
    """Return whether the model's own function agrees with ours, with padding and without."""
    if list(inspect.signature(own).parameters)[1:] != ["num_experts", "top_k", "attention_mask"]:
        return False
    generator = torch.Generator().manual_seed(0)
    shape = (6, balancing.num_experts)
    logits = tuple(torch.randn(shape, generator=generator) for _ in range(2))
    for mask in (None, torch.tensor([[1, 1, 1], [1, 1, 0]])):
        routing = Routing(balancing)
        for layer_logits in logits:
            routing.add([layer_logits], mask, 6 if mask is None else 5)
        expected = own(logits, balancing.num_experts, balancing.top_k, mask)
        if not torch.allclose(routing.loss(), expected, rtol=1e-6, atol=0.0):
            return False
    return True
