"""The device memory of steps with images is that of the plan within 3 %, whatever is trained."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from benchmarks.plan.configurations import plain_profile
from benchmarks.plan.memory import MEMORY_TARGETS
from benchmarks.weights import fill_small
from megatrain.batch import MicroBatch
from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.devices.runtime import TorchRuntime
from megatrain.media import TOKEN_TYPES, MediaItem
from megatrain.memory.kinds import store_kinds
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.models.build import build_decoder
from megatrain.models.towers import MediaTraining
from megatrain.optim.adamw import AdamW
from megatrain.optim.states import STATES
from megatrain.planning.memory.predicted import predicted_ledger
from megatrain.planning.model.shapes import MediaShape, ModelShape
from megatrain.planning.model.skeleton import shape_of
from megatrain.planning.workload import Workload
from megatrain.run.opening.media_shape import CountedMedia, media_shape
from megatrain.step.settings import StepSettings
from testkit.engines import make_engine
from testkit.joint_media import IMAGE, media_config

pytest.importorskip("testkit.host_gpu", exc_type=ImportError)

from testkit.host_gpu import control

pytestmark = [pytest.mark.hostgpu, pytest.mark.merge]

FAMILIES = ("qwen2_5_vl", "gemma3")
PATCH = 14
IMAGE_TOKENS = 64
"""Of an image with 16 x 16 patches."""
ROWS, IMAGES, LENGTH = 2, 3, 256
"""Rows of a step, images of a row, and its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Two steps of a joint model on rows with images."""

    family: str
    media: MediaTraining
    hidden: int = 512
    layers: int = 4
    tower: int = 256
    tower_layers: int = 4

    @property
    def settings(self) -> StepSettings:
        return StepSettings(
            micro_batch_tokens=ROWS * LENGTH, update="late", slots=2, chunk_tokens=64
        )

    @property
    def config(self) -> PreTrainedConfig:
        fields = copy.deepcopy(media_config(self.family)).to_dict()
        heads = self.tower // 64
        sizes = {"hidden_size": self.tower, "intermediate_size": 3 * self.tower}
        fields["vision_config"] |= sizes | {"patch_size": PATCH}
        if self.family == "gemma3":
            tower = {"num_attention_heads": heads, "num_hidden_layers": self.tower_layers}
            fields["vision_config"] |= tower | {"image_size": 16 * PATCH}
            fields["mm_tokens_per_image"] = IMAGE_TOKENS
        else:
            full = list(range(3, self.tower_layers, 4))
            tower = {"num_heads": heads, "depth": self.tower_layers}
            more = {"fullatt_block_indexes": full, "out_hidden_size": self.hidden}
            fields["vision_config"] |= tower | more
        kinds = ["sliding_attention", "full_attention"] * self.layers
        text: dict[str, Any] = {
            "hidden_size": self.hidden, "intermediate_size": 3 * self.hidden, "head_dim": 64,
            "num_hidden_layers": self.layers, "num_attention_heads": self.hidden // 64,
            "num_key_value_heads": self.hidden // 128, "vocab_size": 8192,
            "max_position_embeddings": LENGTH,
        }  # fmt: skip
        text["layer_types"] = (
            kinds[: self.layers] if self.family == "gemma3" else ["full_attention"] * self.layers
        )
        if self.family != "gemma3":
            del text["head_dim"]
            sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
            text["rope_parameters"] = sections
        fields["text_config"] |= text
        return type(media_config(self.family)).from_dict(fields)

    def item(self, seed: int) -> MediaItem:
        draw = torch.Generator().manual_seed(seed)
        if self.family == "gemma3":
            tensors = {"pixel_values": torch.randn(1, 3, 16 * PATCH, 16 * PATCH, generator=draw)}
        else:
            pixels = torch.randn(256, 3 * 2 * PATCH * PATCH, generator=draw)
            tensors = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 16, 16]])}
        return MediaItem(kind="image", tensors=tensors, digest=str(seed))

    def batch(self, seed: int) -> list[MicroBatch]:
        """Return a step whose images are as in no other."""
        image, words = torch.full((IMAGE_TOKENS,), IMAGE), torch.arange(3, 3 + LENGTH)
        between = LENGTH // IMAGES - IMAGE_TOKENS
        row = torch.cat([part for _ in range(IMAGES) for part in (image, words[:between])])
        ids = torch.cat([row, words[: LENGTH - len(row)]]).repeat(ROWS, 1)
        types = (ids == IMAGE).long() * TOKEN_TYPES["image"]
        seeds = iter(range(seed * 1000, (seed + 1) * 1000))
        return [
            MicroBatch(
                input_ids=ids,
                labels=ids.masked_fill(types != 0, -100),
                mm_token_type_ids=types,
                media=[[self.item(next(seeds)) for _ in range(IMAGES)] for _ in ids],
            )
        ]

    def planned_over_measured(self, media: MediaShape | None = None) -> float:
        """Return the plan's bytes of the device over the most that torch allocated."""
        control.start_anew()
        torch.accelerator.reset_peak_memory_stats(1)
        decoder = build_decoder(self.config, "bf16", media=self.media)
        planned = self._planned_bytes(shape_of(decoder).with_media(media or self.shape()))
        store = Store(
            build_layout(decoder.blocks, store_kinds(STATES["adamw"]["fp32"], waits=True))
        )
        fill_small(store, decoder, torch.Generator().manual_seed(0))
        optimizer = AdamW(learning_rate=1e-5, max_grad_norm=1.0, state="fp32")
        device = AcceleratorDevice(TorchRuntime.find("hostgpu:1"))
        with make_engine(
            decoder, store, optimizer=optimizer, device=device, **self.settings.facts()
        ) as engine:
            for batch in (self.batch(0), self.batch(1)):
                engine.step(batch)
        return planned / int(torch.accelerator.max_memory_allocated(1))

    def shape(self) -> MediaShape:
        counted = CountedMedia(
            documents=((LENGTH, IMAGES * IMAGE_TOKENS),), largest="", largest_tokens=IMAGE_TOKENS
        )
        decoder = build_decoder(self.config, "bf16", media=self.media)
        return media_shape(decoder, counted, self.item(0))

    def _planned_bytes(self, model: ModelShape) -> int:
        workload = Workload(model=model, step_tokens=ROWS * LENGTH, sequence=LENGTH)
        profile = plain_profile(0).changed(unified=False, device_bytes=1 << 40)
        ledger = predicted_ledger(profile, workload, self.settings)
        reserve = sum(x.num_bytes for x in ledger.lines if x.purpose == "libraries and driver")
        return ledger.total("device") - reserve


@pytest.mark.parametrize("media", ["frozen", "projector", "all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_peak_of_steps_with_images_is_planned(family: str, media: MediaTraining) -> None:
    found = Steps(family=family, media=media).planned_over_measured()
    assert found == pytest.approx(1, abs=MEMORY_TARGETS["worst"])
