"""A model that a trainer holds in place of the real one: its class and config, and no weights.

Its parameters are on the meta device. A call returns the leaves that an engine computes; with
`fused_lm_head=True` they have the names that TRL's trainers read, else there is a loss alone, as of
any causal model of transformers. What would need all logits of all tokens is refused.

Laws (tests/integrations/test_stand_in.py)
    1. Log-probabilities, entropies, mean logits and hits are those of transformers' model.
    2. A keyword that the engine cannot honor is refused by name.
    3. What is saved loads in transformers, with the tokens that the trainer has set.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput, SequenceClassifierOutput
from transformers.utils import ModelOutput

from megatrain.batch import MicroBatch
from megatrain.disk.hf.model import HostModel
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError
from megatrain.integrations.turns import Call, ask, is_in_turn
from megatrain.losses.head import IGNORED
from megatrain.losses.leaves import TokenOutputs, TokenOutputSpec
from megatrain.model_files import GENERATION_NAME
from megatrain.models.build import build_skeleton
from megatrain.models.classes import scores_texts

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of a config that trainers change to agree with the tokenizer."""
_DERIVED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
"""Where the documents of packed rows begin, which position_ids say too."""
_WITHOUT_EFFECT = {"use_cache", "return_dict", "margin"}
"""A margin between two rewards is for TRL's loss; its trainer gives it the model, too."""


class Serves(Protocol):
    """What stands behind a stand-in."""

    home: HostModel
    trains: bool

    @property
    def engine(self) -> Engine: ...

    def answer(self, calls: Sequence[Call], /) -> Sequence[TokenOutputs]: ...


def make_stand_in(serves: Serves, name: str, wanted: TokenOutputSpec) -> PreTrainedModel:
    """Return a model of the class and config that is at home. `name` is where its tokenizer is."""
    decoder = serves.home.decoder
    config = copy.deepcopy(decoder.config)
    config._name_or_path = name
    model = build_skeleton(config, decoder.model.dtype, attn=None)
    trained = {param.name for param in decoder.params if param.trained}
    for found, param in model.named_parameters():
        param.requires_grad_(serves.trains and found in trained)
    carried = serves.home.carried.get(GENERATION_NAME)
    if carried is not None and model.can_generate():
        model.generation_config = GenerationConfig.from_dict(json.loads(carried))
    kind = type(model)
    forward = functools.wraps(kind.forward)(StandIn.forward)
    model.__class__ = type(kind.__name__, (StandIn, kind), {"forward": forward})
    model.serves, model.wanted = serves, wanted
    return model


class StandIn:
    """The methods that a stand-in has in place of its class's own."""

    serves: Serves
    wanted: TokenOutputSpec
    config: Any
    generation_config: Any = None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        fused_lm_head: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        **others: Any,
    ) -> Any:
        _refuse(others)
        if input_ids is not None and scores_texts(self.config):
            return SequenceClassifierOutput(logits=self._scores(input_ids, attention_mask))
        if input_ids is None or labels is None:
            raise ConfigError(
                "the trainer calls the model without labels, for the logits of all tokens, and "
                "these are never there at once. Losses over log-probabilities work."
            )
        micro = _micro_batch(input_ids, attention_mask, position_ids, labels)
        found = _Found(self._leaves(micro), labels)
        loss = found.loss(num_items_in_batch)
        return found.fused(loss) if fused_lm_head else CausalLMOutput(loss=loss)

    def _leaves(self, micro: MicroBatch) -> TokenOutputs:
        trains = self.serves.trains and torch.is_grad_enabled()
        if trains and not is_in_turn():
            raise ConfigError(
                "a call of the model with gradients belongs into `training_step`; elsewhere call "
                "it under torch.no_grad()."
            )
        return ask(Call(model=self, micro=micro, trains=trains), self.serves.answer)

    def _scores(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the score of each text: at its last token, as transformers finds it. (rows, 1)

        A label belongs to the position before it, so there is one more token.
        """
        pad = self.config.get_text_config().pad_token_id
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = (places * (input_ids != pad)).argmax(1)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        labels = F.pad(torch.full_like(input_ids, IGNORED), (0, 1), value=IGNORED)
        labels[torch.arange(len(last)), last + 1] = 0
        longer = F.pad(input_ids, (0, 1), value=pad or 0)
        leaves = self._leaves(_micro_batch(longer, F.pad(mask, (0, 1)), None, labels))
        assert leaves.logits is not None
        return leaves.logits.sum((1, 2))[:, None].to(input_ids.device)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "forward":  # trainers wrap it: to fuse the head, to cast
            super().__setattr__(name, value)

    def to(self, *args: Any, **named: Any) -> StandIn:
        """Stay where it is: the engine moves weights."""
        return self

    def state_dict(self, *args: Any, **named: Any) -> dict[str, Tensor]:
        """Return a digest of the weights' files: TRL tells cached references apart by it."""
        digest = hashlib.sha256()
        for path in sorted(self.serves.home.weights.glob("*.safetensors*")):
            about = path.stat()
            digest.update(f"{path.name} {about.st_size} {about.st_mtime_ns}".encode())
        return {"files": torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)}

    def generate(self, *args: Any, **named: Any) -> Any:
        raise ConfigError(
            "the trainer's model has no weights and cannot generate: use "
            "`megatrain.generate(trainer.engine, prompts, max_new_tokens=...)`."
        )

    def save_pretrained(self, save_directory: str | Path, **named: Any) -> None:
        """Write the weights at home as a folder that `from_pretrained` loads."""
        self.serves.engine.synchronize()
        home = self.serves.home
        config = json.loads(home.config_json)
        ours, theirs = home.decoder.config, self.config
        for name in SPECIAL_TOKENS:
            if getattr(theirs, name, None) != getattr(ours, name, None):
                config[name] = getattr(theirs, name)
        carried = dict(home.carried)
        if self.generation_config is not None:
            generation = self.generation_config.to_json_string(use_diff=True)
            carried[GENERATION_NAME] = generation.encode()
        changed = json.dumps(config, indent=2).encode()
        replace(home, config_json=changed, carried=carried).export(save_directory)


def _refuse(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if name in _DERIVED | _WITHOUT_EFFECT or value is None or value is False:
            continue
        raise ConfigError(f"the trainer calls the model with {name}, which the engine has not.")


def _micro_batch(
    input_ids: Tensor, mask: Tensor | None, position_ids: Tensor | None, labels: Tensor
) -> MicroBatch:
    if mask is not None and bool(mask.all()):
        mask = None
    return MicroBatch(
        input_ids=input_ids.cpu(),
        labels=labels.cpu(),
        attention_mask=None if mask is None else mask.cpu(),
        position_ids=None if position_ids is None else position_ids.cpu(),
    )


@dataclass
class FusedOutput(ModelOutput):  # type: ignore[misc]
    """What TRL's fused head returns, by its names: (rows, length - 1), zero without a label."""

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None


class _Found:
    """Leaves as a trainer sees them: of all tokens but the last, on its own device."""

    def __init__(self, leaves: TokenOutputs, labels: Tensor) -> None:
        named = {name: one[:, :-1].to(labels.device) for name, one in leaves.named().items()}
        self._named, self._targets = named, labels[:, 1:]
        self._mask = self._targets != IGNORED

    def loss(self, num_items: Tensor | int | None) -> Tensor:
        """Return the mean over trained tokens, of the step if their number is given."""
        count = self._mask.sum().clamp(min=1) if num_items is None else num_items
        total: Tensor = -self._named["logprobs"].sum() / count
        return total

    def fused(self, loss: Tensor) -> FusedOutput:
        best = self._named.get("tokens")
        is_top1 = None if best is None else (best[..., 0] == self._targets) & self._mask
        return FusedOutput(
            loss=loss,
            log_probs=self._named["logprobs"],
            entropy=self._named.get("entropy"),
            mean_logits=self._named.get("mean_logits"),
            is_top1=is_top1,
            label_mask=self._mask,
        )


def dropout_of(model: nn.Module) -> dict[str, float]:
    """Return the probability of each dropout module, by name."""
    return {name: one.p for name, one in model.named_modules() if isinstance(one, nn.Dropout)}


def set_dropout(model: nn.Module, given: Mapping[str, float]) -> None:
    """Give dropout modules the probabilities of others of the same names."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and name in given:
            module.p = given[name]
