"""A call of a layer's own module: with weights that it does not own, and tensors by their paths.

Router logits of a mixture come with the output, recorded by transformers' own hooks, if they are
asked for (models/balance.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from transformers import DynamicCache
from transformers.utils.output_capturing import _active_collector

from megatrain.models.probing.stand_ins import Call

ROUTER_LOGITS = "router_logits"
"""The name of router logits among what transformers records."""


LayerOutput = tuple[Tensor, tuple[Tensor, ...]]
"""Hidden states, and the router logits of a mixture of experts."""


def apply_layer(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    hidden: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    routed: bool = False,
) -> LayerOutput:
    """Return the output of `module` for `hidden`, with `tensors` as its parameters.

    Router logits come with it if `routed`.
    """

    def run() -> Any:
        return functional_call(module, dict(tensors), (hidden, *args), kwargs, tie_weights=False)

    output, logits = router_logits_of(run) if routed else (run(), ())
    result = output if isinstance(output, Tensor) else output[0]
    assert isinstance(result, Tensor)
    return result, logits


def router_logits_of(run: Callable[[], Any]) -> tuple[Any, tuple[Tensor, ...]]:
    """Return what `run` returns, and the router logits of the layer that it calls."""
    found: dict[str, list[Tensor]] = {ROUTER_LOGITS: []}
    token = _active_collector.set(found)
    try:
        result = run()
    finally:
        _active_collector.reset(token)
    return result, tuple(found[ROUTER_LOGITS])


TensorPath = tuple[object, ...]
"""Keys and numbers that lead to a tensor in nested arguments, from the outside in."""


def tensors_by_path(value: Any, path: TensorPath = ()) -> Iterator[tuple[TensorPath, Tensor]]:
    """Yield every tensor inside `value`, with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_by_path(item, (*path, key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from tensors_by_path(item, (*path, number))


def with_tensors(
    value: Any, change: Callable[[TensorPath, Tensor], Any], path: TensorPath = ()
) -> Any:
    """Return `value` with what `change` makes of each of its tensors in that tensor's place."""
    if isinstance(value, Tensor):
        return change(path, value)
    if isinstance(value, dict):
        return {key: with_tensors(item, change, (*path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [with_tensors(item, change, (*path, n)) for n, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return value


def has_cache(call: Call) -> bool:
    """Return whether a layer is called with a cache."""
    return any(isinstance(given, DynamicCache) for given in (*call.args, *call.kwargs.values()))
