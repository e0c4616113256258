"""Laws of policy_gradient.py: the formulas, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.errors import BatchError, ConfigError
from megatrain.losses.head import IGNORED
from megatrain.losses.loss import LossInputs
from megatrain.losses.policy_gradient import PolicyGradient, group_advantages

SHAPE = (4, 7)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"clip": 0.1, "clip_high": 0.3, "kl": 0.2},
    {"aggregation": "grpo", "kl": 0.1, "kl_ratio": False},
    {"aggregation": "dr_grpo", "max_tokens": 9},
    {"aggregation": "grpo", "kind": "sequence", "clip": 0.05, "kl": 0.1},
    {"kind": "cispo", "clip_high": 1.3, "kl": 0.1},
]


def made(seed: int = 0) -> tuple[LossInputs, Tensor]:
    """Inputs of rows with 6, 3, 1 and no targets, and log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.full(SHAPE, IGNORED)
    for row, num_trained in enumerate((6, 3, 1, 0)):
        targets[row, :num_trained] = 5
    logprobs, old, reference = (
        torch.where(targets != IGNORED, -torch.rand(SHAPE, generator=generator), 0.0)
        for _ in range(3)
    )
    advantages = torch.randn(SHAPE, generator=generator)
    extra = {"advantages": advantages, "old_logprobs": old, "reference": reference}
    return LossInputs(targets=targets, extra=extra), logprobs


def made_loss(settings: dict[str, Any]) -> PolicyGradient:
    """The loss of settings, whose `kind` is the ratio."""
    given = dict(settings)
    kind = given.pop("kind", "token")
    return PolicyGradient(**given, ratio=kind)


def by_hand(
    inputs: LossInputs,
    logprobs: Tensor,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    kl: float = 0.0,
    kl_ratio: bool = True,
    aggregation: str = "dapo",
    max_tokens: int = 0,
    kind: str = "token",
) -> tuple[float, dict[str, float]]:
    """The mean loss and figures, token by token, in Python's own numbers."""
    high = clip if clip_high is None else clip_high
    rows: list[list[dict[str, float]]] = []
    for row in range(len(logprobs)):
        tokens = []
        trained = inputs.targets[row] != IGNORED
        apart = (logprobs.double() - inputs.extra["old_logprobs"])[row][trained]
        for place in (inputs.targets[row] != IGNORED).nonzero().view(-1).tolist():
            now, old, reference, advantage = (
                float(tensor[row, place])
                for tensor in (logprobs, *(inputs.extra[n] for n in
                               ("old_logprobs", "reference", "advantages")))
            )  # fmt: skip
            ratio = math.exp(float(apart.mean()) if kind == "sequence" else now - old)
            best = 1 + high if advantage > 0 else 1 - clip
            is_clipped = ratio > best if advantage > 0 else ratio < best
            kl_now = math.exp(reference - now) - (reference - now) - 1
            kl_now *= ratio if kl_ratio else 1.0
            loss = -advantage * (best if is_clipped else ratio) + kl * kl_now
            if kind == "cispo":
                is_clipped = ratio > high and advantage > 0
                loss = -min(ratio, high) * advantage * now + kl * kl_now
            tokens.append(
                {"loss": loss, "ratio": ratio, "clip_fraction": float(is_clipped), "kl": kl_now}
            )
        rows += [tokens] if tokens else []

    def mean(name: str) -> float:
        if aggregation == "dapo":
            every = [token[name] for tokens in rows for token in tokens]
            return sum(every) / len(every)
        each = [sum(token[name] for token in tokens) / len(tokens) for tokens in rows]
        return sum(each) / len(each)

    loss = mean("loss")
    if aggregation == "dr_grpo":
        loss = sum(t["loss"] for tokens in rows for t in tokens) / max_tokens / len(rows)
    return loss, {name: mean(name) for name in ("ratio", "clip_fraction", *(["kl"] if kl else []))}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_figures_are_those_of_the_formula(settings: dict[str, Any], seed: int) -> None:
    inputs, logprobs = made(seed)
    loss = made_loss(settings)
    value = loss.value(inputs, logprobs.double())
    num_units = loss.count(inputs)
    expected, figures = by_hand(inputs, logprobs, **settings)
    assert float(value.total) / num_units == pytest.approx(expected, rel=1e-6)
    assert {n: float(f) / num_units for n, f in value.figures.items()} == pytest.approx(figures)


@pytest.mark.parametrize(
    "changed",
    [
        {"clip": 0.05},
        {"kl": 0.3},
        {"aggregation": "grpo"},
        {"kl_ratio": False},
        {"kind": "sequence"},
        {"kind": "cispo", "clip_high": 5.0},
    ],
)
def test_another_formula_would_be_noticed(changed: dict[str, Any]) -> None:
    inputs, logprobs = made()
    loss = PolicyGradient(kl=0.1)
    found = float(loss.value(inputs, logprobs.double()).total) / loss.count(inputs)
    assert by_hand(inputs, logprobs, **{"kl": 0.1, **changed})[0] != pytest.approx(found, rel=1e-3)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_on_the_policy_that_drew_the_answers_a_token_has_its_advantage(
    settings: dict[str, Any],
) -> None:
    inputs, logprobs = made()
    extra = {**inputs.extra, "old_logprobs": logprobs, "reference": logprobs}
    inputs = LossInputs(targets=inputs.targets, extra=extra)
    loss = made_loss(settings)
    found = loss.weights(inputs, logprobs, 1)
    assert float(found.figures["ratio"]) == pytest.approx(loss.count(inputs))
    assert float(found.figures["clip_fraction"]) == 0.0
    trained = inputs.targets != IGNORED
    lengths = {"grpo": trained.sum(1, keepdim=True), "dr_grpo": torch.full((4, 1), 9)}.get(
        settings.get("aggregation", "dapo"), torch.ones(4, 1)
    )
    advantages = torch.where(trained, extra["advantages"], 0.0)
    if settings.get("kind") == "sequence":  # all tokens of an answer share its ratio
        means = advantages.sum(1, keepdim=True) / trained.sum(1, keepdim=True).clamp(min=1)
        advantages = torch.where(trained, means, 0.0)
    expected = torch.where(trained, -advantages / lengths, 0.0)
    torch.testing.assert_close(found.weights, expected)


def test_what_is_clipped_has_no_gradient() -> None:
    targets = torch.full((1, 4), 5)
    ratios = torch.tensor([[1.3, 0.7, 1.3, 0.7]])
    extra = {
        "advantages": torch.tensor([[1.0, 1.0, -1.0, -1.0]]),
        "old_logprobs": torch.full((1, 4), -1.0),
    }
    inputs = LossInputs(targets=targets, extra=extra)
    found = PolicyGradient(clip=0.2).weights(inputs, ratios.log() - 1, 1)
    assert (found.weights != 0).tolist() == [[False, True, True, False]]
    assert float(found.figures["clip_fraction"]) == 2


def test_what_is_beside_the_targets_is_not_read() -> None:
    inputs, logprobs = made()
    trained = inputs.targets != IGNORED
    spoilt = {n: torch.where(trained, t, math.nan) for n, t in inputs.extra.items()}
    loss = PolicyGradient(kl=0.1)
    clean = loss.weights(inputs, logprobs, 1)
    found = loss.weights(LossInputs(targets=inputs.targets, extra=spoilt), logprobs, 1)
    assert torch.equal(found.weights, clean.weights)
    assert torch.equal(found.loss, clean.loss)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("advantages", lambda t: t[:, :1], r"advantages is \(4, 1\), input_ids \(4, 7\); both"),
        ("advantages", lambda t: t * math.nan, "advantages of a trained token is not finite"),
        ("old_logprobs", lambda t: t - math.inf, "old_logprobs of a trained token is not finite"),
        ("reference", lambda t: t + 2, "reference of a trained token is above 0"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name: str, change: Any, message: str) -> None:
    inputs, _ = made()
    extra = {**inputs.extra, name: change(inputs.extra[name])}
    with pytest.raises(BatchError, match=message):
        PolicyGradient(kl=0.1).count(LossInputs(targets=inputs.targets, extra=extra))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip": 0.0}, "clip is 0; give a number above 0"),
        ({"clip_high": -1.0}, "clip_high is -1; give a number above 0"),
        ({"kl": math.nan}, "kl is nan; give 0"),
        ({"aggregation": "bnpo"}, "aggregation is 'bnpo'; give one of dapo, grpo, dr_grpo"),
        ({"aggregation": "dr_grpo"}, "max_tokens is None and aggregation 'dr_grpo'"),
        ({"max_tokens": 5}, "max_tokens is 5 and aggregation 'dapo'"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PolicyGradient(**settings)


def test_advantages_compare_the_answers_of_a_group() -> None:
    scaled = group_advantages([1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5], 4)
    spread = math.sqrt(1 / 3) + 1e-4
    assert scaled == pytest.approx(
        [0.5 / spread, -0.5 / spread, -0.5 / spread, 0.5 / spread] + [0] * 4
    )
    assert group_advantages([3.0, 1.0], 2, scaled=False) == [1.0, -1.0]


@pytest.mark.parametrize(
    ("rewards", "group_size", "message"),
    [
        ([1.0, 0.0, 1.0], 2, "3 rewards are not groups of 2"),
        ([1.0, 0.0], 1, "2 rewards are not groups of 1"),
        ([1.0, math.nan], 2, "reward 1 is nan"),
    ],
)
def test_rewards_that_are_no_groups_are_refused(
    rewards: list[float], group_size: int, message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        group_advantages(rewards, group_size)
