"""Rows with media: loss and gradients are those of transformers' joint model.

Features are those of one item after another, and so they are on the other side: bits are equal. A
processor gives transformers all items of a batch at once; its products have other shapes then, and
losses and gradients are within 1e-6 of the norm of all gradients, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForMultimodalLM, PreTrainedModel

from megatrain import load_model
from megatrain.batch import MicroBatch
from megatrain.devices.device import CpuDevice
from megatrain.disk.hf.model import HostModel
from megatrain.errors import BatchError
from megatrain.losses.loss import NEXT_TOKEN, Loss
from megatrain.losses.preferences import Dpo
from megatrain.media import MediaItem
from megatrain.memory.kinds import TensorKind
from megatrain.models import towers
from megatrain.models.isolation import ISOLATES
from megatrain.models.towers import MediaTraining, positions_by_axis
from testkit.engines import make_engine
from testkit.joint_media import (
    IMAGE,
    MEDIA_FAMILIES,
    media_batch,
    media_documents,
    one_by_one,
    plain_inputs,
    save_media_model,
)
from testkit.pair_loss import plain_pair_loss, with_pairs
from testkit.plain import plain_gradients

NEAR = 1e-6
ILL_CONDITIONED = {"gemma4": 50}
"""Its text makes 2e-5 of a difference of 1e-7 in features."""


class Sides:
    """A tiny joint model in the engine and in transformers."""

    def __init__(self, folder: Path, family: str, media: MediaTraining) -> None:
        source = save_media_model(folder, family, torch.float32)
        self.model: HostModel = load_model(source, dtype="fp32", media=media)
        found = AutoModelForMultimodalLM.from_pretrained(source, dtype=torch.float32)
        self.plain: PreTrainedModel = found.train()

    def difference(
        self,
        given: Sequence[MicroBatch],
        batch: Sequence[MicroBatch],
        *,
        at_once: bool = False,
        loss_of: Callable[[Tensor, MicroBatch], Tensor] | None = None,
        loss: Loss = NEXT_TOKEN,
        **settings: Any,
    ) -> tuple[float, float]:
        """Return how losses and gradients differ: of `given` here, of `batch` in transformers.

        `loss_of` is the `loss` under ordinary autograd.
        """
        with nullcontext() if at_once else one_by_one(self.plain):
            losses, wanted = plain_gradients(
                self.plain, batch, loss_of=loss_of, inputs_of=plain_inputs
            )
        with make_engine(self.model.decoder, self.model.store, loss=loss, **settings) as engine:
            result = engine.step(given)
            engine.synchronize()
            trained = [param.name for param in self.model.decoder.params if param.trained]
            found = {
                name: self.model.store.param(name, TensorKind.GRAD).view_as(wanted[name])
                for name in trained
            }
        whole = torch.stack([wanted[name].norm() for name in trained]).norm()
        apart = [(found[name] - wanted[name]).norm() / whole for name in trained]
        lost = max(abs(a - b) for a, b in zip(result.micro_losses, losses, strict=True))
        return lost, float(max(apart))


def _batch(family: str, *, packed: bool) -> list[MicroBatch]:
    counts = [[2, 1, 0], [0, 3]]
    return [
        media_batch(media_documents(family, one, seed=3 + number), packed=packed)
        for number, one in enumerate(counts)
    ]


def _cases() -> list[Any]:
    cases = []
    for family in MEDIA_FAMILIES:
        for packed in (False, True):
            if packed and family not in ISOLATES:
                continue  # attention, or a state, does not keep documents apart
            marks = () if family == "qwen3_vl" and packed else (pytest.mark.merge,)
            cases.append(pytest.param(family, packed, marks=marks, id=f"{family}-{packed}"))
    return cases


@pytest.mark.parametrize(("family", "packed"), _cases())
def test_a_frozen_tower_gives_the_gradients_of_the_plain_model(
    family: str, packed: bool, tmp_path: Path
) -> None:
    sides, batch = Sides(tmp_path, family, "projector"), _batch(family, packed=packed)
    assert sides.difference(batch, batch) == (0.0, 0.0)


@pytest.mark.merge
@pytest.mark.parametrize(("family", "packed"), _cases())
def test_a_trained_tower_gives_the_gradients_of_the_plain_model(
    family: str, packed: bool, tmp_path: Path
) -> None:
    sides, batch = Sides(tmp_path, family, "all"), _batch(family, packed=packed)
    assert sides.difference(batch, batch) == (0.0, 0.0)


@pytest.mark.merge
@pytest.mark.parametrize(
    ("device", "settings", "near"),
    [
        (CpuDevice(copying=True), {"tape": "device", "slots": 2}, 0.0),
        (CpuDevice(), {"kept_layers": 2}, 0.0),
        (CpuDevice(), {"tile_tokens": 8}, NEAR),
    ],
)
def test_features_of_several_levels_go_back_however_a_step_is_played(
    device: CpuDevice, settings: dict[str, Any], near: float, tmp_path: Path
) -> None:
    sides, batch = Sides(tmp_path, "qwen3_vl", "projector"), _batch("qwen3_vl", packed=True)
    found = sides.difference(batch, batch, device=device, **settings)
    assert max(found) <= near


@pytest.mark.merge
@pytest.mark.parametrize("family", MEDIA_FAMILIES)
def test_items_of_a_batch_together_give_nearly_the_same(family: str, tmp_path: Path) -> None:
    sides, batch = Sides(tmp_path, family, "all"), _batch(family, packed=False)
    loss, apart = sides.difference(batch, batch, at_once=True)
    assert loss <= NEAR
    assert apart <= NEAR * ILL_CONDITIONED.get(family, 1)


def _pairs(family: str, *, packed: bool) -> list[MicroBatch]:
    """Return two pairs of answers, each about the images of one prompt."""
    prompts = media_documents(family, [2, 1], seed=3)
    documents = []
    for ids, types, items in prompts:
        for answer in (torch.tensor([7, 8, 9]), torch.tensor([11, 12, 13, 14])):
            whole = torch.cat([ids, answer])
            documents.append((whole, torch.cat([types, torch.zeros_like(answer)]), items))
    return with_pairs([media_batch(documents, packed=packed)])


@pytest.mark.merge
@pytest.mark.parametrize(
    ("family", "media", "packed"),
    [("qwen2_5_vl", "projector", False), ("gemma3", "projector", True), ("gemma3", "all", False)],
)
def test_preferences_about_images_give_the_gradients_of_the_plain_model(
    family: str, media: MediaTraining, packed: bool, tmp_path: Path
) -> None:
    sides, batch = Sides(tmp_path, family, media), _pairs(family, packed=packed)
    both: dict[str, Any] = {"loss": Dpo(), "loss_of": plain_pair_loss(batch)}

    assert max(sides.difference(batch, batch, **both)) <= NEAR
    chosen, rejected, *others = batch[0].media
    turned = [MediaItem.of(one.kind, _turned(one)) for one in rejected]
    other = replace(batch[0], media=[chosen, turned, *others])
    assert max(sides.difference([other], batch, **both)) > 10 * NEAR


def _turned(item: MediaItem) -> dict[str, Tensor]:
    """Return the tensors of another picture of the same size."""
    return {name: -t if t.is_floating_point() else t for name, t in item.tensors.items()}


def test_images_swapped_between_rows_are_noticed(tmp_path: Path) -> None:
    sides, batch = Sides(tmp_path, "gemma3", "projector"), _batch("gemma3", packed=True)[:1]
    (one, *others), (other,), none = batch[0].media
    swapped = replace(batch[0], media=[[other, *others], [one], none])
    assert max(sides.difference([swapped], batch)) > 10 * NEAR


def test_a_shifted_position_and_a_dropped_token_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides, batch = Sides(tmp_path, "qwen2_5_vl", "projector"), _batch("qwen2_5_vl", packed=True)
    ids = batch[0].input_ids.clone()
    ids[0, (ids[0] == IMAGE).nonzero()[0]] = 7
    with pytest.raises(ValueError, match="do not match"):
        sides.difference([replace(batch[0], input_ids=ids)], batch[:1])
    own = positions_by_axis

    def shifted(*asked: Any) -> Any:
        axes = own(*asked)
        assert axes is not None
        axes[1, 7] += 1
        return axes

    monkeypatch.setattr(towers, "positions_by_axis", shifted)
    assert max(sides.difference(batch[:1], batch[:1])) > 10 * NEAR


def test_a_batch_whose_media_are_not_those_of_its_tokens_is_refused(tmp_path: Path) -> None:
    sides, (micro, _) = Sides(tmp_path, "gemma3", "projector"), _batch("gemma3", packed=True)
    for media, message in (
        (micro.media[:2], "2 lists of media for 3 documents"),
        ([*micro.media[:1], [], []], "stand for image, its media are none"),
    ):
        with pytest.raises(BatchError, match=message):
            sides.difference([replace(micro, media=media)], [micro])
