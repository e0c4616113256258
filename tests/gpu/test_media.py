"""Steps with media on an accelerator have the bits of the resident model there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMultimodalLM, PreTrainedModel

from megatrain import load_model
from megatrain.batch import MicroBatch
from megatrain.memory.kinds import TensorKind
from megatrain.models.decoder import Decoder
from megatrain.models.towers import MediaTraining, media_given
from testkit.engines import make_engine
from testkit.joint_media import (
    media_batch,
    media_documents,
    plain_inputs,
    save_media_model,
)
from testkit.plain import plain_gradients
from tests.gpu.rigs import Rig, SimulatedRig
from tests.gpu.test_exactness import differing


@pytest.mark.thorough
@pytest.mark.parametrize("media", ["projector", "frozen", "all"])
def test_steps_with_media_have_the_bits_of_the_resident_model(
    rig: Rig, media: MediaTraining, tmp_path: Path
) -> None:
    if isinstance(rig, SimulatedRig):
        pytest.skip("the model lists sizes on the device, and the simulator sees no such read")
    family = "qwen3_vl"
    source = save_media_model(tmp_path, family, torch.float32)
    model = load_model(source, dtype="fp32", attn="eager", media=media)
    batch = [media_batch(media_documents(family, [2, 1, 0], seed=3), packed=True)]
    plain = AutoModelForMultimodalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation={"text_config": "eager"}
    )
    plain = plain.to(rig.torch_device).train()
    with _given(plain, model.decoder, batch):
        losses, gradients = plain_gradients(plain, batch, inputs_of=plain_inputs)
    with (
        rig.running(model.store, seed=1) as accelerator,
        make_engine(model.decoder, model.store, device=accelerator, tape="host") as engine,
    ):
        result = engine.step(batch)
        trained = [param.name for param in model.decoder.params if param.trained]
        found = {name: model.store.param(name, TensorKind.GRAD) for name in trained}
        assert list(result.micro_losses) == losses
        assert differing({name: gradients[name] for name in trained}, found) == []


@contextmanager
def _given(plain: PreTrainedModel, decoder: Decoder, batch: Sequence[MicroBatch]) -> Iterator[None]:
    """Let the plain model make its features of one item after another, as steps do."""
    assert decoder.towers is not None
    items = [
        replace(item, tensors={n: one.to(plain.device) for n, one in item.tensors.items()})
        for micro in batch
        for document in micro.media
        for item in document
    ]
    with media_given(plain, decoder.towers, items):
        yield
