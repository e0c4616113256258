"""Losses of heads that score texts: classes, and rewards that rank pairs.

A text has one target, at its last token: the number of its class, or 0 where the head has one
label (`scored_batch` in batch.py puts it there).

    Classes   cross-entropy
    Reward    -log sigmoid(reward of the chosen - reward of the rejected): texts 2n and 2n + 1

Laws (tests/engine/test_classes.py)
    1. Losses are those of transformers and TRL: a mean over texts, or pairs, of a step.
    2. A target that the head has no label for is refused.
"""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatrain.errors import BatchError
from megatrain.losses.head import IGNORED
from megatrain.losses.leaves import Wanted
from megatrain.losses.loss import Loss, LossInputs, LossValue


class Classes(Loss):
    """Cross-entropy of each text's class. Figure: `accuracy`."""

    def __init__(self, num_labels: int) -> None:
        self._num_labels = num_labels
        self.wanted = Wanted(top_k=1)

    def count(self, inputs: LossInputs) -> int:
        targets = inputs.targets[inputs.targets != IGNORED]
        outside = targets[targets >= self._num_labels]
        if len(outside):
            raise BatchError(f"class {int(outside[0])} is not among {self._num_labels} labels")
        return len(targets)

    def value(self, inputs: LossInputs, logprobs: Tensor) -> LossValue:
        assert inputs.leaves is not None
        assert inputs.leaves.tokens is not None
        trained = inputs.targets != IGNORED
        right = (inputs.leaves.tokens[..., 0] == inputs.targets) & trained
        return LossValue(total=-logprobs.sum(), figures={"accuracy": right.sum()})


class Reward(Loss):
    """Bradley-Terry loss of pairs of rows: the first of two is preferred.

    Figures: `rewards/accuracies`, `rewards/margins`, `rewards/chosen` and `rewards/rejected`.
    """

    wanted: ClassVar[Wanted] = Wanted(top_k=1)  # type: ignore[misc]  # of every object

    def count(self, inputs: LossInputs) -> int:
        trained = (inputs.targets != IGNORED).sum(1)
        if len(trained) % 2 or bool((trained != 1).any()):
            raise BatchError(
                f"{len(trained)} rows with {trained.tolist()} targets are not pairs of texts: both "
                "rows of a pair are in one micro-batch, each with a target at its last token"
            )
        if bool((inputs.targets[inputs.targets != IGNORED] != 0).any()):
            raise BatchError("a reward has one label: targets are 0")
        return len(trained) // 2

    def value(self, inputs: LossInputs, logprobs: Tensor) -> LossValue:
        assert inputs.leaves is not None
        assert inputs.leaves.logits is not None
        chosen, rejected = inputs.leaves.logits.sum((1, 2)).view(-1, 2).unbind(1)
        losses = -F.logsigmoid(chosen - rejected)
        figures = {
            "rewards/chosen": chosen.sum(),
            "rewards/rejected": rejected.sum(),
            "rewards/margins": (chosen - rejected).sum(),
            "rewards/accuracies": (chosen > rejected).sum(),
        }
        return LossValue(total=losses.sum(), figures=figures, of_units=losses)
