"""Models whose head scores a text and not its next token: classes, or one number as a reward.

They are transformers' own ForSequenceClassification classes: the text decoder, and `score`, a
linear module over its last hidden states, read at the last token of a text. For the engine `score`
is an output projection whose vocabulary is the labels. A folder of a language model gets such a
head when it is read with a number of labels; exports are folders of the class.

Laws (tests/models/test_classes.py)
    1. AutoModelForSequenceClassification loads an export without a warning.
    2. A model that scores texts keeps its head and the names of its labels.
    3. Steps of TRL's RewardTrainer are those of plain PyTorch (proofs/trainers).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

_SUFFIX = "ForSequenceClassification"
SCORE = "score"
"""The module that scores, by transformers' name in every decoder."""


def scores_texts(config: PreTrainedConfig) -> bool:
    """Return whether config.json names a model that scores texts."""
    return any(str(name).endswith(_SUFFIX) for name in config.architectures or ())


def output_projection(model: PreTrainedModel) -> nn.Module | None:
    """Return the module that makes logits of the last hidden states, if the model has one."""
    found = getattr(model, SCORE, None) if scores_texts(model.config) else None
    made: nn.Module | None = found or model.get_output_embeddings()
    return made


def first_scores(shape: tuple[int, ...], config: PreTrainedConfig) -> Tensor:
    """Return the values that a new head starts with, in fp32: always the same, as transformers'."""
    generator = torch.Generator().manual_seed(0)
    text = config.get_text_config()
    spread = float(getattr(text, "initializer_range", 0.02))
    return torch.randn(shape, generator=generator) * spread
