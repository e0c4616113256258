"""Heads that score texts: transformers' own models, trained as they are in plain PyTorch."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from megatrain import load_model
from megatrain.batch import MicroBatch, scored_batch
from megatrain.disk.hf.model import HostModel
from megatrain.errors import BatchError, ConfigError
from megatrain.losses.classes import Classes, Reward
from megatrain.losses.loss import Loss
from megatrain.memory.kinds import Kind
from megatrain.models.adapters.lora import Lora
from megatrain.optim.adamw import AdamW
from megatrain.optim.optimizer import decays
from testkit.engines import make_engine
from testkit.families import save_tiny

STEPS = 50
SCORE_WEIGHT = "score.weight"
CASES = [
    ("llama", 3, 1e-5, 1e-8),
    ("llama", 3, 1e-3, 1e-4),  # an epsilon that hides the rounding of gradients near zero
    ("llama", 1, 1e-5, 1e-8),
    ("gemma2", 3, 1e-5, 1e-8),
    ("mixtral", 1, 1e-5, 1e-8),
]
"""Family, labels, learning rate and AdamW's epsilon."""


def texts_of(step: int, num_labels: int) -> list[MicroBatch]:
    """Return two micro-batches of texts of several lengths; a longer text is the better one."""
    generator = torch.Generator().manual_seed(step)
    batch = []
    for lengths in ((7, 4), (5, 3, 6, 2)):
        texts = [torch.randint(3, 60, (n,), generator=generator).tolist() for n in lengths]
        targets = [0 if num_labels == 1 else n % num_labels for n in lengths]
        batch.append(scored_batch(texts, targets, pad_token=0))
    return batch


def loss_of(num_labels: int) -> Loss:
    return Reward() if num_labels == 1 else Classes(num_labels)


def plain_loss(model: PreTrainedModel, batch: list[MicroBatch], num_labels: int) -> torch.Tensor:
    """Return the loss of a step by transformers' own forward, which finds last tokens itself."""
    logits, classes = [], []
    for micro in batch:
        logits.append(model(input_ids=micro.input_ids, attention_mask=micro.attention_mask).logits)
        classes.append(micro.labels.max(1).values)
    if num_labels == 1:
        chosen, rejected = torch.cat(logits).view(-1, 2).unbind(1)
        return -F.logsigmoid(chosen - rejected).mean()
    return F.cross_entropy(torch.cat(logits), torch.cat(classes))


def both(family: str, folder: Path, num_labels: int) -> tuple[HostModel, PreTrainedModel]:
    """Return a model with a new head, and transformers' own with the same weights."""
    save_tiny(folder / "base", family, torch.float32)
    path = folder / "base" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": 0}))
    home = load_model(folder / "base", dtype="fp32", num_labels=num_labels)
    home.export(folder / "start")
    return home, AutoModelForSequenceClassification.from_pretrained(folder / "start").train()


def apart(
    family: str,
    folder: Path,
    num_labels: int,
    rate: float = 1e-5,
    eps: float = 1e-8,
    **changes: Any,
) -> list[float]:
    """Return how far losses, and weights at the end, are from those of plain PyTorch."""
    home, plain = both(family, folder, num_labels)
    decayed = {param.name: decays(param) for param in home.decoder.params}
    named = dict(plain.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if decayed[n] is part], "weight_decay": 0.1 * part}
        for part in (True, False)
    ]
    theirs = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=eps)
    ours = AdamW(learning_rate=rate, eps=eps, weight_decay=0.1, **changes)
    loss, found = loss_of(num_labels), []
    with make_engine(home.decoder, home.store, optimizer=ours, loss=loss) as engine:
        for step in range(STEPS):
            batch = texts_of(step % 7, num_labels)
            expected = plain_loss(plain, batch, num_labels)
            theirs.zero_grad()
            expected.backward()  # type: ignore[no-untyped-call]
            theirs.step()
            found.append(abs(engine.step(batch).loss - float(expected.detach())))
        engine.settle()
    for name, param in named.items():
        weight, expected = home.store.param(name, Kind.HI).view(param.shape), param.detach()
        found.append(float((weight - expected).norm() / expected.norm()))
    return found


@pytest.mark.merge
@pytest.mark.parametrize(("family", "num_labels", "rate", "eps"), CASES)
def test_fifty_steps_are_those_of_transformers(
    family: str, num_labels: int, rate: float, eps: float, tmp_path: Path
) -> None:
    assert max(apart(family, tmp_path, num_labels, rate, eps)) < 1e-6


@pytest.mark.merge
@pytest.mark.parametrize("num_labels", [1, 3])
def test_gradients_are_those_of_double_precision(num_labels: int, tmp_path: Path) -> None:
    """Weights at a high rate cannot show it: AdamW makes whole steps of gradients near zero."""
    home, plain = both("llama", tmp_path, num_labels)
    batch = texts_of(0, num_labels)
    plain_loss(plain.double(), batch, num_labels).backward()  # type: ignore[no-untyped-call]
    with make_engine(home.decoder, home.store, loss=loss_of(num_labels)) as engine:
        engine.step(batch)
    for name, param in plain.named_parameters():
        assert param.grad is not None
        found = home.store.param(name, Kind.GRAD).view(param.shape)
        assert (found - param.grad).norm() < 1e-6 * param.grad.norm()


@pytest.mark.merge
def test_another_average_of_squares_would_be_noticed(tmp_path: Path) -> None:
    assert max(apart("llama", tmp_path, 3, betas=(0.9, 0.999))) > 1e-5


@pytest.mark.parametrize("num_labels", [1, 3])
def test_an_export_loads_without_a_warning(
    num_labels: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path / "base", "llama", torch.float32)
    home = load_model(tmp_path / "base", dtype="fp32", num_labels=num_labels)
    home.export(tmp_path / "made")
    with warnings.catch_warnings(), caplog.at_level("WARNING"):
        warnings.simplefilter("error")
        model, report = AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "made", output_loading_info=True
        )
    assert (caplog.text, [*report["missing_keys"], *report["unexpected_keys"]]) == ("", [])
    assert model.score.weight.shape[0] == model.config.num_labels == num_labels
    again = load_model(tmp_path / "made", dtype="fp32")
    for param in home.decoder.params:
        one, other = (each.store.param(param.name, Kind.HI) for each in (home, again))
        assert torch.equal(one, other)


def test_a_new_head_is_trained_and_saved_beside_adapters(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", "llama", torch.float32)
    home = load_model(tmp_path / "base", dtype="fp32", num_labels=1, lora=Lora(rank=2, alpha=4))
    assert [p.name for p in home.decoder.params if p.trained and not p.is_adapter] == [SCORE_WEIGHT]
    home.store.param(SCORE_WEIGHT, Kind.HI).fill_(0.5)
    home.export(tmp_path / "made")
    config = json.loads((tmp_path / "made" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    found = load_file(tmp_path / "made" / "adapter_model.safetensors")
    assert bool((found[f"base_model.model.{SCORE_WEIGHT}"] == 0.5).all())
    again = load_model(tmp_path / "made", dtype="fp32")
    assert bool((again.store.param(SCORE_WEIGHT, Kind.HI) == 0.5).all())


def test_adapters_of_a_model_with_a_head_are_not_those_of_a_language_model(tmp_path: Path) -> None:
    """PEFT's class for these would ask the model for what generates."""
    save_tiny(tmp_path / "base", "llama", torch.float32)
    load_model(tmp_path / "base", dtype="fp32", num_labels=2).export(tmp_path / "scores")
    home = load_model(tmp_path / "scores", dtype="fp32", lora=Lora(rank=2, alpha=4))
    home.export(tmp_path / "made")
    config = json.loads((tmp_path / "made" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == (None, None)
    assert not hasattr(AutoModelForSequenceClassification.from_pretrained(tmp_path / "scores"),
                       "prepare_inputs_for_generation")  # fmt: skip
    load_model(tmp_path / "made", dtype="fp32")


def test_a_head_that_is_there_keeps_the_names_of_its_labels(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", "llama", torch.float32)
    load_model(tmp_path / "base", dtype="fp32", num_labels=2).export(tmp_path / "made")
    path = tmp_path / "made" / "config.json"
    named = {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    home = load_model(tmp_path / "made", dtype="fp32", num_labels=2)
    assert json.loads(home.config_json)["id2label"] == named["id2label"]
    with pytest.raises(ConfigError, match=r"^num_labels is 3, and the model has 2 .*"):
        load_model(tmp_path / "made", num_labels=3)


@pytest.mark.merge
def test_an_evaluation_reports_how_many_are_right(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", torch.float32)
    home = load_model(tmp_path, dtype="fp32", num_labels=3)
    optimizer = AdamW(learning_rate=3e-3)
    with make_engine(home.decoder, home.store, optimizer=optimizer, loss=Classes(3)) as engine:
        for _ in range(30):
            engine.step(texts_of(0, 3))
        engine.evaluate(texts_of(0, 3))
    assert engine.figures["accuracy"] == 1.0


def test_what_cannot_be_scored_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", torch.float32)
    with pytest.raises(ConfigError, match=r"^num_labels is 0; give 1 for a reward, or more .*"):
        load_model(tmp_path, num_labels=0)
    home = load_model(tmp_path, dtype="fp32", num_labels=2)
    batch = [scored_batch([[5, 6], [7]], [0, 4], pad_token=0)]
    with make_engine(home.decoder, home.store, loss=Classes(2)) as engine:
        with pytest.raises(BatchError, match=r"^micro-batch 0: class 4 is not among 2 labels$"):
            engine.step(batch)
        engine.loss = Reward()
        with pytest.raises(BatchError, match=r"^micro-batch 0: 1 rows with \[1\] targets are not "):
            engine.step([scored_batch([[5, 6]], [0], pad_token=0)])
    with pytest.raises(BatchError, match=r"^2 texts and 1 targets; give one for each, .*"):
        scored_batch([[5], [6]], [0], pad_token=0)
