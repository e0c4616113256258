"""Ranks train to the bits of one process that plays all of them with plain PyTorch."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.batch import MicroBatch
from megatrain.engine.exchange import Exchange
from megatrain.memory.layout import overlap
from megatrain.models.adapters.lora import LoraConfig
from testkit.adamw_by_hand import global_norm
from testkit.cases import at_a_push
from testkit.plain import next_token_loss, plain_gradients
from testkit.rank_training import RankCase, differing, joined, ranks_of, virtual_of
from testkit.virtual_ranks import VirtualRanks

DROPOUT = (("resid_pdrop", 0.2), ("attn_pdrop", 0.2), ("embd_pdrop", 0.2))
FROZEN = ("model.embed_tokens.*", "model.layers.0.*", "model.layers.2.*", "*mlp.up_proj*")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {},
    "gpt2": {"config": DROPOUT},
    "mixtral": {},
    "qwen3": {},
    "phi": {},
    "falcon": {},
    "bloom": {},
    "jamba": {},
    "gpt_oss": {},
    "deepseek_v3": {},
    "olmo2": {"frozen": FROZEN},
    "qwen2": {"lora": LoraConfig(rank=4, alpha=6, dropout=0.25)},
}
"""Tied and untied; positions learned, rotary, in part or linear; experts; latent, windowed or no
attention; dropout; blocks and params that are not trained; adapters."""
SIZES = (1, 2, 3, 4, 8)
SHAPES = ((2, 12), (1, 17), (3, 9), (1, 10), (2, 11))
CASES = list(itertools.product(FAMILIES, SIZES, ("late", "in_backward")))


def case_of(number: int) -> RankCase:
    """Return a case: what CASES leaves open is drawn, the same for the same number."""
    family, size, update = CASES[number]
    draw = random.Random(number)
    return RankCase(
        family=family,
        size=size,
        update=update,
        shapes=SHAPES[: draw.choice([1, 2, 3, 5])],
        form=draw.choice(["plain", "padded", "packed"]),
        state=draw.choice(["fp32", "bf16", "8bit"]),
        dtype=draw.choice(["bf16", "bf16", "fp32"]),
        evaluates=draw.random() < 0.3,
        settings=(
            ("tape", draw.choice(["device", "host"])),
            ("slots", draw.choice([2, 3])),
            ("grad_slots", draw.choice([1, 2])),
            ("kept_layers", draw.choice([0, 1, 2])),
        ),
        **FAMILIES[family],
    )


def faults_of(case: RankCase, virtual: VirtualRanks) -> list[str]:
    """Return where ranks differ from each other, or from what `virtual` has."""
    found = ranks_of(case)
    faults = [f"rank {r}" for r, one in enumerate(found) if one.results != found[0].results]
    faults += [f"eval {r}" for r, one in enumerate(found) if one.evaluated != found[0].evaluated]
    for number, (batch, result) in enumerate(zip(case.batches, found[0].results, strict=True)):
        losses, gradients = virtual.gradients(batch)
        if list(result.micro_losses) != losses:
            faults.append(f"losses of step {number}")
        scale = 1.0
        if case.update == "late":
            assert result.grad_norm is not None
            if not math.isclose(result.grad_norm, global_norm(gradients.values()), rel_tol=1e-9):
                faults.append(f"norm of step {number}")
            scale = case.optimizer().clip_factor(result.grad_norm)
        virtual.update(gradients, scale)
    return faults + differing(joined(found), virtual.state())


@pytest.mark.few(1)
@pytest.mark.parametrize("number", at_a_push(range(len(CASES)), 5))
def test_ranks_have_the_bits_of_virtual_ranks(number: int) -> None:
    case = case_of(number)
    assert faults_of(case, virtual_of(case)) == []


Breaks = Callable[[pytest.MonkeyPatch], None]


def another_order_of_ranks(patch: pytest.MonkeyPatch) -> None:
    real = VirtualRanks._added_up
    patch.setattr(VirtualRanks, "_added_up", lambda self, name, got: real(self, name, got[::-1]))


def a_missing_rank(patch: pytest.MonkeyPatch) -> None:
    real = VirtualRanks._added_up
    patch.setattr(VirtualRanks, "_added_up", lambda self, name, got: real(self, name, got[:-1]))


def an_own_part_that_is_not_rounded(patch: pytest.MonkeyPatch) -> None:
    """As if what does not go over the wire needed no rounding."""
    real = Exchange.add_up

    def add_up(
        self: Exchange, total: Tensor, elements: range, parts: Any, dtype: torch.dtype
    ) -> int:
        own = overlap(elements, parts[self._ranks.owner.rank])
        span = slice(own.start - elements.start, own.stop - elements.start)
        lost = total[span] - total[span].to(dtype)
        num_bytes = real(self, total, elements, parts, dtype)
        total[span] += lost
        return num_bytes

    patch.setattr(Exchange, "add_up", add_up)


def the_divisor_of_a_rank(patch: pytest.MonkeyPatch) -> None:
    def of_rank(self: VirtualRanks, batch: Sequence[MicroBatch], numbers: Sequence[int]) -> Any:
        own = [batch[number] for number in numbers]
        return plain_gradients(self._model, own, self._number, next_token_loss(own), numbers)

    patch.setattr(VirtualRanks, "_of_rank", of_rank)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("break_it", "dtype"),
    [
        (another_order_of_ranks, "fp32"),  # a sum of three in bf16 is nearly always exact
        (a_missing_rank, "bf16"),
        (an_own_part_that_is_not_rounded, "bf16"),
        (the_divisor_of_a_rank, "bf16"),
    ],
)
def test_a_difference_would_be_noticed(
    break_it: Breaks, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = RankCase(size=3, shapes=SHAPES, num_steps=1, dtype=dtype)
    assert faults_of(case, virtual_of(case)) == []
    break_it(monkeypatch)
    assert faults_of(case, virtual_of(case)) != []
