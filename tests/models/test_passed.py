"""Calls of layers: what gradients go back through is a leaf, and its gradients wait, once."""

from __future__ import annotations

from collections import UserDict

import torch
from torch import Tensor

from megatrain.models.passed import LayerCalls
from megatrain.models.probing.stand_ins import Call


def _calls(num_layers: int) -> tuple[LayerCalls, UserDict[str, tuple[Tensor, ...]]]:
    """Return calls whose first argument was looked up, and the mapping that they share."""
    shared: UserDict[str, tuple[Tensor, ...]] = UserDict()
    table = torch.ones(1, 3, num_layers, 2)
    calls = [
        Call(layer=layer, args=(table[:, :, layer],), kwargs={"shared": shared})
        for layer in range(num_layers)
    ]
    paths = [frozenset({(0, 0)})] * num_layers
    return LayerCalls(calls, paths, lambda tensor, purpose: tensor, trains_front=True), shared


def test_gradients_of_a_shared_tensor_wait_for_the_layer_that_made_it() -> None:
    calls, shared = _calls(3)
    shared["kind"] = (torch.ones(2),)
    calls.after_forward(0)
    for _ in range(2):  # a second backward finds nothing of the first
        for layer, number in ((2, 4.0), (1, 0.5)):
            link = calls.linked(layer, passes_gradient=True)
            (leaf,) = link.call.kwargs["shared"]["kind"]
            assert leaf.requires_grad
            assert link.outputs() == []
            link.give({("kind", (0,)): torch.full((2,), number)})
        link = calls.linked(0, passes_gradient=True)
        assert not link.call.kwargs["shared"]
        made = torch.ones(2)
        link.call.kwargs["shared"]["kind"] = (made,)
        ((output, gradient),) = link.outputs()
        assert output is made
        assert gradient.tolist() == [4.5, 4.5]
        assert link.outputs() == []
    assert shared["kind"][0].tolist() == [1.0, 1.0]


def test_gradients_of_looked_up_tensors_wait_for_the_front() -> None:
    calls, _ = _calls(2)
    for layer in (1, 0):
        link = calls.linked(layer, passes_gradient=True)
        assert link.call.args[0] is link.leaves[layer, (0, 0)]
        link.give({(layer, (0, 0)): torch.full((1, 3, 2), float(layer + 1))})
    again = [calls[0], calls[1]]
    assert [float(d.max()) for _, d in calls.front_outputs(again)] == [1.0, 2.0]
    assert calls.front_outputs(again) == []


def test_nothing_below_that_is_trained_needs_no_gradient() -> None:
    calls, _ = _calls(2)
    link = calls.linked(1, passes_gradient=False)
    assert not any(leaf.requires_grad for leaf in link.leaves.values())
