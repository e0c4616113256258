"""Models whose head scores a text and not its next token: classes, or one number as a reward.

They are transformers' own ForSequenceClassification classes: the text decoder, and `score`, a
linear module over its last hidden states, read at the last token of a text. For the engine `score`
is an output projection whose vocabulary is the labels. A folder of a language model gets such a
head when it is read with a number of labels; exports are folders of the class.

Laws (tests/engine/test_classes.py)
    1. 50 steps have losses and weights of transformers' model within 1e-6, and the gradients of a
       step are as near to those of double precision.
    2. AutoModelForSequenceClassification loads an export without a warning.
    3. A model that scores texts keeps its head and the names of its labels.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from megatrain.errors import ConfigError
from megatrain.models.config_json import parse_config

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


def with_labels(config_json: bytes, num_labels: int) -> bytes:
    """Return a config.json for a head with so many labels; one that is there stays as it is.

    Raises ConfigError if the family has no such head, or another number of labels.
    """
    if num_labels < 1:
        raise ConfigError(f"num_labels is {num_labels}; give 1 for a reward, or more for classes.")
    config = parse_config(config_json)
    if scores_texts(config):
        if config.num_labels != num_labels:
            raise ConfigError(
                f"num_labels is {num_labels}, and the model has {config.num_labels} already. Leave "
                "num_labels out, or start from the language model."
            )
        return config_json
    fields: dict[str, Any] = json.loads(config_json)
    family = fields.get("model_type", "")
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(family)
    if name is None:
        raise ConfigError(
            f"num_labels is {num_labels}: transformers has no model that classifies with "
            f"{family or 'this family'}."
        )
    labels = {str(number): f"LABEL_{number}" for number in range(num_labels)}
    fields |= {
        "architectures": [name],
        "id2label": labels,
        "label2id": {label: int(number) for number, label in labels.items()},
    }
    if fields.get("pad_token_id") is None:  # it tells transformers where a text ends
        end = fields.get("eos_token_id")
        fields["pad_token_id"] = end[0] if isinstance(end, list) else end
    return json.dumps(fields, indent=2).encode()


def first_scores(shape: tuple[int, ...], config: PreTrainedConfig) -> Tensor:
    """Return the values that a new head starts with, in fp32: always the same, as transformers'."""
    generator = torch.Generator().manual_seed(0)
    text = config.get_text_config()
    spread = float(getattr(text, "initializer_range", 0.02))
    return torch.randn(shape, generator=generator) * spread
