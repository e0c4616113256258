"""Attention that no fused kernel does: its scores pass through memory, and that takes time."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from megatrain.planning.catalog.known_models import find_known_model
from megatrain.planning.costs import BACKWARD_SCORE_ELEMENTS, SCORE_ELEMENTS, Costs
from megatrain.planning.estimate import estimate
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings
from testkit.machines import SERVER

HEADS, TOKENS, WIDTH = 2, 512, 4
SCORES = HEADS * TOKENS * TOKENS
SETTINGS = StepSettings(micro_batch_tokens=2048)
_VIEWS = ("view", "expand", "slice.", "transpose", "detach", "alias", "unsqueeze", "t.", "_unsafe")


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements of scores that ops read and write."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not str(func).removeprefix("aten.").startswith(_VIEWS):
            tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, Tensor)]
            self.num_elements += sum(t.numel() for t in tensors if t.numel() >= SCORES)
        return out


def test_the_passes_over_scores_are_those_of_the_library() -> None:
    """Counted in transformers' own attention of gpt-oss, forward and backward."""
    query, key, value = (torch.randn(1, HEADS, TOKENS, WIDTH, requires_grad=True) for _ in range(3))
    mask = torch.zeros(1, 1, TOKENS, TOKENS)
    module: Any = SimpleNamespace(
        num_key_value_groups=1, sinks=torch.zeros(HEADS, requires_grad=True), training=True
    )
    with Traffic() as forward:  # type: ignore[no-untyped-call]
        out, _ = eager_attention_forward(module, query, key, value, mask, scaling=0.5)
    with Traffic() as backward:  # type: ignore[no-untyped-call]
        out.sum().backward()
    assert forward.num_elements / SCORES == pytest.approx(SCORE_ELEMENTS, abs=1.5)
    assert backward.num_elements / SCORES == pytest.approx(BACKWARD_SCORE_ELEMENTS, abs=3)


@pytest.mark.parametrize("name", ["openai/gpt-oss-120b", "google/gemma-2-9b"])
def test_families_without_a_fused_kernel_pay_in_every_layer(name: str) -> None:
    """Layers with a window compute and move the full square too."""
    shape = find_known_model(name).shape
    workload = Workload(model=shape, step_tokens=2048)
    costs, fused = (
        Costs(SERVER, each, SETTINGS)
        for each in (workload, replace(workload, attn="flash_attention_2"))
    )
    for layer in shape.structures:
        assert layer.attention is not None
        scores = layer.attention.heads * 2048 * 2048
        for backward, num_bytes in ((False, 26), (True, 40)):
            moved = costs.score_seconds(layer, 2048, backward=backward)
            assert moved == pytest.approx(num_bytes * scores / SERVER.device_bytes_per_s)
            assert costs.attention_seconds(layer, 2048, backward=backward) > moved
            assert fused.score_seconds(layer, 2048, backward=backward) == 0
        assert costs.attention_flops(layer, 2048) >= fused.attention_flops(layer, 2048)


def test_eager_attention_that_is_asked_for_is_slower_than_a_fused_kernel() -> None:
    usual, eager = (
        estimate("Qwen3-8B", settings, gpu="H100 SXM", ram="256GB")
        for settings in ([], ["model.attn=eager"])
    )
    assert eager.tokens_per_s < 0.8 * usual.tokens_per_s
