"""Five chained steps of one family with PEFT's adapters, and with ours."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain import AdamW, Engine, HostModel, load_model
from megatrain.memory.kinds import TensorKind
from megatrain.models.adapters.lora import LoraConfig
from testkit.adamw_by_hand import HandAdamW
from testkit.families import save_tiny
from testkit.plain import load_plain, make_batch, plain_gradients, seed_like_engine
from testkit.plain_lora import drawn_like, named_as_ours

RATE, DECAY = 1e-2, 0.1
LORA = LoraConfig(rank=4, alpha=6)
BATCHES = [
    make_batch([(2, 24)], seed=1),
    make_batch([(2, 24), (1, 17), (3, 9)], seed=2, padded=True),
    make_batch([(2, 24), (1, 31)], seed=3, packed=True),
    make_batch([(1, 40)], seed=4),
    make_batch([(3, 12), (2, 20)], seed=5),
]
ATTENTION = {"doge": "eager"}
"""Whose sdpa computes a forward that wants gradients with another kernel than one that does not."""


@dataclass(slots=True, kw_only=True)
class Compared:
    """What was found of a family."""

    family: str
    num_modules: int = 0
    not_in_peft: int = 0
    """Modules that PEFT adapts only by the name of their weight, with other operations."""
    num_adapters: int = 0
    num_gradients: int = 0
    """That were compared, over all steps."""
    left_out: list[str] = field(default_factory=list)
    own_loss_difference: float = 0.0
    """Of the loss that transformers computes from labels by itself, at most: it sums otherwise."""
    faults: list[str] = field(default_factory=list)


def compare(family: str) -> dict[str, Any]:
    """Return what agrees and what does not."""
    found = Compared(family=family)
    with tempfile.TemporaryDirectory(prefix="megatrain-adapters-") as path:
        folder = save_tiny(Path(path), family, torch.float32)
        attention = ATTENTION.get(family)
        home = load_model(folder, dtype="fp32", lora=LORA, attn=attention)
        theirs = load_plain(folder, torch.float32, attention)
        _compare_targets(home, theirs, found)
        kept = _kept_by_peft(home, theirs)
        if len(kept) < found.num_modules:
            found.not_in_peft = found.num_modules - len(kept)
            home = load_model(
                folder, dtype="fp32", lora=replace(LORA, target_modules=kept), attn=attention
            )
        _train_both(home, theirs, found)
    return {name: getattr(found, name) for name in Compared.__dataclass_fields__}


def _compare_targets(home: HostModel, model: PreTrainedModel, found: Compared) -> None:
    """Note where PEFT's all-linear differs from ours without a word of ours about it."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers

    adapters = home.decoder.adapters
    assert adapters is not None
    chosen = _maybe_include_all_linear_layers(LoraConfig(target_modules="all-linear"), model)
    within = {name for name in chosen.target_modules if name.startswith(home.decoder.layers_path)}
    known = {_kind(f"{name}.weight") for name in within - set(adapters.modules)}
    unsaid = known - {_kind(name) for name in adapters.left_out}
    if unsaid or set(adapters.modules) - within:
        found.faults.append(
            f"all-linear: {sorted(unsaid)} {sorted(set(adapters.modules) - within)}"
        )
    found.num_modules, found.left_out = len(adapters.modules), list(adapters.left_out)


def _kept_by_peft(home: HostModel, model: PreTrainedModel) -> tuple[str, ...]:
    """Return the adapted modules that PEFT leaves in its config for this family."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    assert home.decoder.adapters is not None
    config = LoraConfig(target_modules=list(home.decoder.adapters.modules))
    convert_peft_config_for_transformers(config, model, None)
    return tuple(sorted(config.target_modules))


def _kind(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _train_both(home: HostModel, model: PreTrainedModel, found: Compared) -> None:
    from peft import LoraConfig, get_peft_model

    adapters, store = home.decoder.adapters, home.store
    assert adapters is not None
    config = LoraConfig(
        r=LORA.rank,
        lora_alpha=LORA.alpha,
        lora_dropout=0.0,
        target_modules=list(adapters.modules),
        task_type="CAUSAL_LM",
    )
    theirs = get_peft_model(model, config).get_base_model().train()
    params = named_as_ours(dict(theirs.named_parameters()))
    names = [param.name for param in home.decoder.params if param.is_adapter]
    found.num_adapters = len(names)
    if set(params) != set(names):
        found.faults.append(f"adapters: {sorted(set(params) ^ set(names))[:4]}")
        return
    for name, values in drawn_like(
        {n: store.param(n, TensorKind.HI) for n in names}, seed=4
    ).items():
        store.param(name, TensorKind.HI).copy_(values)
        params[name].data.copy_(values)
    seed_like_engine(theirs, home.decoder.layers_path)  # phimoe draws random numbers
    by_hand = HandAdamW({n: p.detach() for n, p in params.items()}, lr=RATE, weight_decay=DECAY)
    optimizer = AdamW(learning_rate=RATE, weight_decay=DECAY)
    with Engine(home.decoder, store, optimizer=optimizer) as engine:
        for number, batch in enumerate(BATCHES, start=1):
            losses, gradients = plain_gradients(theirs, batch, step=number)
            ours = list(engine.step(batch).micro_losses)
            gradients = named_as_ours(gradients)
            found.faults += _step_faults(number, losses, ours, gradients, home)
            found.num_gradients += len(gradients)
            if len(batch) == 1:
                own = _own_loss(theirs, batch[0], number)
                found.own_loss_difference = max(found.own_loss_difference, abs(own - sum(ours)))
            by_hand.update(gradients, number)
            for name, param in params.items():
                param.data.copy_(by_hand.masters[name])
        engine.synchronize()
    moved = [n for n in names if not torch.equal(store.param(n, TensorKind.HI), by_hand.masters[n])]
    if moved:
        found.faults.append(f"weights after all steps: {moved[:4]}")


def _step_faults(
    number: int,
    losses: list[float],
    ours: list[float],
    gradients: dict[str, Tensor],
    home: HostModel,
) -> list[str]:
    faults = [] if losses == ours else [f"step {number}: losses {losses} and {ours}"]
    wrong = [
        name
        for name, gradient in gradients.items()
        if not torch.equal(gradient, home.store.param(name, TensorKind.GRAD))
    ]
    return faults + ([f"step {number}: {len(wrong)} gradients, {wrong[:3]}"] if wrong else [])


def _own_loss(model: PreTrainedModel, micro: Any, number: int) -> float:
    model._drawn_for = (number, 0)
    with torch.no_grad():
        inputs = {"input_ids": micro.input_ids, "labels": micro.labels}
        return float(model(**inputs, use_cache=False).loss)
