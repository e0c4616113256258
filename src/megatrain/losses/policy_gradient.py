"""Rewards as a loss: the clipped policy gradient of PPO and GRPO, over given answers.

    ratio = exp(log-probability now - log-probability when the answer was drawn)
    -min(ratio x advantage, clamp(ratio, 1 - clip, 1 + clip_high) x advantage)  + kl x KL

per token, where KL = ratio x (exp(d) - d - 1) with d = reference - log-probability: the k3
estimator, and with the ratio its gradient is that of the KL itself (DeepSeek-V3.2, TRL's default);
without (`kl_ratio=False`) it is that of GRPO's paper. How tokens add up is known by the names of
papers and of TRL's `loss_type`:

    dapo      mean over all trained tokens of the step (TRL's default)
    grpo      mean over the tokens of an answer, then over answers
    dr_grpo   sum over the tokens of an answer, divided by `max_tokens`; then mean over answers

All log-probabilities are those of the distribution that answers are drawn from: logits are divided
by the sampling temperature, as in TRL, verl and OpenRLHF.

An answer is a row that has a trained token. For dapo, rows may also be packed, unless its ratio is
that of sequences. The ratio is one of three:

    token      of each token, as above
    sequence   exp of the mean of log-ratios over an answer's tokens, for all of them (GSPO)
    cispo      of each token, limited to `clip_high` and without gradient, times the
               log-probability: -min(ratio, clip_high) x advantage x log-probability (MiniMax-M1)

`policy_loss` has the five names under which these are known.

Laws (tests/losses/test_policy_gradient.py, tests/engine/test_policy_gradient.py)
    1. Loss and gradients are those of ordinary autograd through the resident model, however the
       step is cut into micro-batches.
    2. They are those of TRL's GRPOTrainer, at any temperature (tests/integrations/
       test_policy_gradient.py, proofs/policy_gradient.py).
    3. On the policy that drew the answers the ratio is 1 and nothing is clipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from megatrain.errors import BatchError, ConfigError
from megatrain.losses.head import IGNORED
from megatrain.losses.leaves import Wanted
from megatrain.losses.loss import Loss, LossInputs, LossValue

Aggregation = Literal["dapo", "grpo", "dr_grpo"]
Ratio = Literal["token", "sequence", "cispo"]
LEAST_SPREAD = 1e-4
"""Added to the standard deviation of a group's rewards, as TRL does."""


class PolicyGradient(Loss):
    """Reads `advantages`, `old_logprobs` and, with `kl`, `reference`: (rows, length) like targets.

    Position t is about the token after it, as in `Engine.logprobs`. Figures: `ratio`,
    `clip_fraction` and, with `kl`, `kl`: means over tokens (dapo), or over answers of such means.
    """

    extra_names: ClassVar[tuple[str, ...]] = ("advantages", "old_logprobs")

    def __init__(
        self,
        *,
        clip: float = 0.2,
        clip_high: float | None = None,
        kl: float = 0.0,
        kl_ratio: bool = True,
        aggregation: Aggregation = "dapo",
        max_tokens: int | None = None,
        ratio: Ratio = "token",
        temperature: float = 1.0,
    ) -> None:
        """`clip_high` None is `clip`. `max_tokens`: of an answer, for dr_grpo alone.

        `temperature` is the one that answers were drawn at; it divides the logits.
        """
        self.wanted = Wanted(temperature=temperature)
        self._low = clip
        self._high = clip if clip_high is None else clip_high
        if not 0 < self._low < 1:
            raise ConfigError(f"clip is {clip:g}; give a number above 0, below 1, like 0.2.")
        if not 0 < self._high < math.inf:
            raise ConfigError(f"clip_high is {self._high:g}; give a number above 0, like 0.28.")
        if not 0 <= kl < math.inf:
            raise ConfigError(f"kl is {kl:g}; give 0, or a positive weight like 0.04.")
        if aggregation not in get_args(Aggregation):
            known = ", ".join(get_args(Aggregation))
            raise ConfigError(f"aggregation is {aggregation!r}; give one of {known}.")
        if (aggregation == "dr_grpo") != (max_tokens is not None) or (max_tokens or 1) < 1:
            raise ConfigError(
                f"max_tokens is {max_tokens} and aggregation {aggregation!r}; dr_grpo divides by "
                "max_tokens, the most tokens that an answer may have, and no other uses it."
            )
        if ratio not in get_args(Ratio):
            raise ConfigError(f"ratio is {ratio!r}; give one of {', '.join(get_args(Ratio))}.")
        self._ratio = ratio
        self._kl = kl
        self._kl_ratio = kl_ratio
        self._aggregation = aggregation
        self._max_tokens = max_tokens
        if kl:
            self.extra_names = (*self.extra_names, "reference")  # type: ignore[misc]  # this one's

    def count(self, inputs: LossInputs) -> int:
        trained = inputs.targets != IGNORED
        for name in self.extra_names:
            tensor = inputs.extra[name]
            if tensor.shape != trained.shape:
                raise BatchError(
                    f"{name} is {tuple(tensor.shape)}, input_ids {tuple(trained.shape)}; both "
                    "must be (rows, length)"
                )
            found = tensor[trained]
            if not bool(found.isfinite().all()):
                raise BatchError(f"{name} of a trained token is not finite")
            if name != "advantages" and bool((found > 0).any()):
                raise BatchError(f"{name} of a trained token is above 0: no log-probability is")
        return int(trained.sum() if self._aggregation == "dapo" else trained.any(1).sum())

    def value(self, inputs: LossInputs, logprobs: Tensor) -> LossValue:
        trained = inputs.targets != IGNORED

        def known(tensor: Tensor) -> Tensor:
            return torch.where(trained, tensor, 0.0)

        advantages = known(inputs.extra["advantages"])
        apart = known(logprobs - inputs.extra["old_logprobs"])
        if self._ratio == "sequence":
            apart = apart.sum(1, keepdim=True) / trained.sum(1, keepdim=True).clamp(min=1)
            apart = known(apart.expand_as(logprobs))
        ratio = apart.exp()
        if self._ratio == "cispo":
            losses = -ratio.clamp(max=self._high).detach() * advantages * logprobs
            clipped = (ratio > self._high) & (advantages > 0)
        else:
            limited = ratio.clamp(1 - self._low, 1 + self._high)
            losses = -torch.minimum(ratio * advantages, limited * advantages)
            below = (ratio < 1 - self._low) & (advantages < 0)
            clipped = below | (ratio > 1 + self._high) & (advantages > 0)
        found = {"ratio": ratio, "clip_fraction": clipped.to(ratio.dtype)}
        if self._kl:
            behind = known(inputs.extra["reference"] - logprobs)
            distance = behind.exp() - behind - 1
            found["kl"] = distance * ratio if self._kl_ratio else distance
            losses = losses + self._kl * found["kl"]
        shares = self._shares(trained).to(losses.dtype)
        parts = shares if self._max_tokens is None else trained / self._max_tokens
        figures = {name: (figure * shares).sum() for name, figure in found.items()}
        return LossValue(total=(losses * parts).sum(), figures=figures)

    def _shares(self, trained: Tensor) -> Tensor:
        """Return what part of a unit each token is; 0 where there is no target."""
        if self._aggregation == "dapo":
            return trained
        return trained / trained.sum(1, keepdim=True).clamp(min=1)


def policy_loss(
    name: str,
    *,
    max_tokens: int,
    clip: float | None = None,
    clip_high: float | None = None,
    kl: float | None = None,
    temperature: float = 1.0,
) -> PolicyGradient:
    """Return the loss of a name: grpo, dr_grpo, dapo, gspo or cispo. None is the name's default.

    `max_tokens`: most tokens of an answer, which dr_grpo divides by. `temperature`: of drawing.
    """
    usual = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (0.2, 5.0)}
    low, high = usual.get(name, (0.2, None))
    if clip is not None and name in ("grpo", "dr_grpo"):
        high = clip
    aggregations: dict[str, Aggregation] = {
        "grpo": "grpo",
        "dr_grpo": "dr_grpo",
        "dapo": "dapo",
        "gspo": "grpo",
        "cispo": "dapo",
    }
    ratios: dict[str, Ratio] = {"cispo": "cispo", "gspo": "sequence"}
    aggregation = aggregations[name]
    return PolicyGradient(
        clip=low if clip is None else clip,
        clip_high=high if clip_high is None else clip_high,
        kl=kl or 0.0,
        aggregation=aggregation,
        max_tokens=max_tokens if aggregation == "dr_grpo" else None,
        ratio=ratios.get(name, "token"),
        temperature=temperature,
    )


def group_advantages(
    rewards: Sequence[float], group_size: int, *, scaled: bool = True
) -> list[float]:
    """Return by how much each reward is above the mean of its group: GRPO's advantages.

    A group is `group_size` rewards in a row: of the answers to one prompt. They are divided by the
    group's standard deviation, unless not `scaled` (Dr. GRPO). Raises BatchError.
    """
    if group_size < 2 or len(rewards) % group_size:
        raise BatchError(
            f"{len(rewards)} rewards are not groups of {group_size}; give as many rewards to each "
            "prompt, at least 2"
        )
    groups = torch.tensor(rewards, dtype=torch.float64).view(-1, group_size)
    if not bool(groups.isfinite().all()):
        number = int((~groups.isfinite()).view(-1).nonzero()[0])
        raise BatchError(f"reward {number} is {rewards[number]}: not a finite number")
    above = groups - groups.mean(1, keepdim=True)
    if scaled:
        above = above / (groups.std(1, keepdim=True) + LEAST_SPREAD)
    return [float(advantage) for advantage in above.view(-1)]
