"""Rewards train as under ordinary autograd: two steps of the engine against the resident model.

The second step is on the answers of the first: its ratios are no longer 1, and some are clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import PreTrainedModel

from megatrain import PolicyGradient, load_model
from megatrain.batch import MicroBatch
from megatrain.losses.loss import Loss
from megatrain.memory.kinds import Kind
from megatrain.optim.adamw import AdamW
from megatrain.optim.optimizer import decays
from testkit.engines import make_engine
from testkit.families import save_tiny
from testkit.plain import load_plain, make_batch, plain_gradients
from tests.engine.test_exactness import DECAY, DTYPES, RATE, PlainTraining, differing

CLIP, HIGH, KL = 0.05, 0.1, 0.04
MOST = 30
Aggregation = Literal["dapo", "grpo", "dr_grpo"]


def given(batch: Sequence[MicroBatch], logprobs: Sequence[Tensor]) -> list[MicroBatch]:
    """Return answers that were drawn with about these log-probabilities, with advantages."""
    generator = torch.Generator().manual_seed(7)
    return [
        micro.with_extra(
            advantages=torch.randn(micro.labels.shape, generator=generator),
            old_logprobs=known + 0.02 * torch.randn(known.shape, generator=generator),
            reference=known - torch.rand(known.shape, generator=generator),
        )
        for micro, known in zip(batch, logprobs, strict=True)
    ]


def plain_loss(
    batch: Sequence[MicroBatch], aggregation: Aggregation
) -> Callable[[Tensor, MicroBatch], Tensor]:
    """The loss as one would write it: -min(ratio x advantage, clipped x advantage) + KL."""
    targets = [F.pad(micro.labels[:, 1:], (0, 1), value=-100) for micro in batch]
    if aggregation == "dapo":
        num_units = sum(int((one != -100).sum()) for one in targets)
    else:
        num_units = sum(len(one) for one in targets)

    def loss(logprobs: Tensor, micro: MicroBatch) -> Tensor:
        mask = (F.pad(micro.labels[:, 1:], (0, 1), value=-100) != -100).float()
        advantages = micro.extra["advantages"] * mask
        ratio = torch.exp((logprobs - micro.extra["old_logprobs"]) * mask)
        clipped = torch.clamp(ratio, 1 - CLIP, 1 + HIGH)
        losses = -torch.min(ratio * advantages, clipped * advantages)
        behind = (micro.extra["reference"] - logprobs) * mask
        losses = losses + KL * ((torch.exp(behind) - behind - 1) * ratio)
        parts = {"dapo": mask, "grpo": mask / mask.sum(1, keepdim=True), "dr_grpo": mask / MOST}
        return (losses * parts[aggregation]).sum() / num_units

    return loss


def differences(
    folder: Path,
    family: str,
    dtype: Literal["fp32", "bf16"],
    aggregation: Aggregation,
    loss: Loss,
    temperature: float = 1.0,
) -> tuple[list[str], list[float]]:
    """Return what differs from the resident model, and how much is clipped in each step."""
    save_tiny(folder, family, DTYPES[dtype])
    model = load_model(folder, dtype=dtype)
    store, params = model.store, model.decoder.params
    plain = PlainTraining(load_plain(folder, DTYPES[dtype]), {p.name: decays(p) for p in params})
    divide_logits(plain.model, temperature)
    found: list[str] = []
    clipped: list[float] = []
    optimizer = AdamW(learning_rate=RATE, weight_decay=DECAY)
    with make_engine(model.decoder, store, optimizer=optimizer, update="late", loss=loss) as engine:
        batch = make_batch([(2, 24), (5, 9)], seed=2, padded=True)
        batch = given(batch, engine.logprobs(batch, temperature=temperature))
        for number in range(2):
            expected = plain_loss(batch, aggregation)
            losses, gradients = plain_gradients(plain.model, batch, loss_of=expected)
            result = engine.step(batch)
            clipped.append(result.figures["clip_fraction"])
            if list(result.micro_losses) != losses:
                found.append(f"losses of step {number}")
            ours = {p.name: store.param(p.name, Kind.GRAD) for p in params}
            found += [f"{n} of step {number}" for n in differing(gradients, ours)]
            plain.update(gradients)
    return found, clipped


def divide_logits(model: PreTrainedModel, temperature: float) -> None:
    """Let a plain model return logits divided by the sampling temperature, in fp32."""

    def divide(_module: torch.nn.Module, _given: object, output: Any) -> Any:
        output.logits = output.logits.float() / temperature
        return output

    if temperature != 1:
        model.register_forward_hook(divide)


def loss_of(aggregation: Aggregation, **changes: Any) -> PolicyGradient:
    settings = {"clip": CLIP, "clip_high": HIGH, "kl": KL, "aggregation": aggregation}
    most = MOST if aggregation == "dr_grpo" else None
    return PolicyGradient(**{**settings, "max_tokens": most, **changes})


@pytest.mark.parametrize(
    ("family", "dtype", "aggregation"),
    [
        ("llama", "fp32", "dapo"),
        ("llama", "fp32", "grpo"),
        ("gemma2", "bf16", "dr_grpo"),
        ("gpt2", "fp32", "grpo"),
    ],
)
def test_two_steps_equal_the_resident_model(
    family: str, dtype: Any, aggregation: Any, tmp_path: Path
) -> None:
    found, clipped = differences(tmp_path, family, dtype, aggregation, loss_of(aggregation))
    assert found == []
    assert 0 < clipped[1] < 1


@pytest.mark.parametrize(("family", "temperature"), [("llama", 0.7), ("gemma2", 1.5)])
def test_logits_are_divided_by_the_sampling_temperature(
    family: str, temperature: float, tmp_path: Path
) -> None:
    """gemma2 caps its logits first: the cap is part of the model, the temperature is not."""
    loss = loss_of("dapo", temperature=temperature)
    found, clipped = differences(tmp_path, family, "fp32", "dapo", loss, temperature)
    assert found == []
    assert 0 < clipped[1] < 1


def test_a_loss_at_another_temperature_would_be_noticed(tmp_path: Path) -> None:
    found, _ = differences(tmp_path, "llama", "fp32", "dapo", loss_of("dapo"), 0.7)
    assert "model.norm.weight of step 0" in found


@pytest.mark.parametrize("changed", [{"clip": 0.01}, {"clip_high": None}, {"kl_ratio": False}])
def test_another_loss_would_be_noticed(changed: dict[str, Any], tmp_path: Path) -> None:
    found, _ = differences(tmp_path, "llama", "fp32", "dapo", loss_of("dapo", **changed))
    assert "model.norm.weight of step 1" in found


@pytest.mark.parametrize("aggregation", ["dapo", "grpo"])
def test_micro_batches_change_rounding_alone(aggregation: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", torch.float32)
    model = load_model(tmp_path, dtype="fp32")
    (whole,) = make_batch([(6, 12)], padded=True)
    with make_engine(model.decoder, model.store, update="none", loss=loss_of(aggregation)) as ours:
        (whole,) = given([whole], ours.logprobs([whole]))
        expected = ours.step([whole])
        found = ours.step([whole.mapped(lambda t: t[:1]), whole.mapped(lambda t: t[1:])])
    assert found.loss == pytest.approx(expected.loss, rel=1e-4)
    assert found.figures == pytest.approx(expected.figures, rel=1e-5)
