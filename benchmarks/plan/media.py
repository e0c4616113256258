"""The plan's memory for rows with images against what was held: joint models of two families.

Each configuration takes two steps in a process of its own, with the images of the next step in
memory as in a run. On the host the figure is what was resident at most, and what libraries hold is
that of a tiny model of the same kind; on testkit/host_gpu it is what torch had allocated of the
device.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig

from benchmarks.plan.configurations import plain_profile
from benchmarks.plan.memory import compared, errors_of, held_on_host, peak_bytes
from benchmarks.weights import fill_small
from megatrain.batch import MicroBatch
from megatrain.devices.device import CpuDevice, Device
from megatrain.media import TOKEN_TYPES, MediaItem
from megatrain.memory.kinds import store_kinds
from megatrain.memory.layout import build_layout
from megatrain.memory.ledger import Ledger
from megatrain.memory.store import Store
from megatrain.models.build import build_decoder
from megatrain.models.decoder import Decoder
from megatrain.models.probing.feature_cost import outputs_without_numbers
from megatrain.models.towers import MediaTraining
from megatrain.optim.adamw import AdamW
from megatrain.optim.states import STATES
from megatrain.planning.memory.predicted import predicted_ledger
from megatrain.planning.model.skeleton import shape_of
from megatrain.planning.workload import Workload
from megatrain.run.opening.media_shape import media_shape
from megatrain.step.settings import StepSettings
from testkit.engines import make_engine
from testkit.joint_media import IMAGE, media_config

FAMILIES = ("qwen2_5_vl", "gemma3")
GIVING_SOON = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
"""Activations of small images are small."""
PATCH = 14
IMAGE_TOKENS = 64
"""Of an image with 16 x 16 patches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfiguration:
    """A joint model, a batch with images, and how to run it."""

    family: str
    media: MediaTraining
    device: Literal["views", "hostgpu"]
    hidden: int = 512
    layers: int = 4
    tower: int = 512
    tower_layers: int = 8
    rows: int = 2
    images: int = 3
    """Of each row."""
    length: int = 256
    num_micro: int = 1

    def __str__(self) -> str:
        text, tower = f"{self.hidden}x{self.layers}", f"{self.tower}x{self.tower_layers}"
        batch = f"{self.num_micro}x{self.rows}x{self.length} with {self.images} images a row"
        return f"{self.family} {self.media}, text {text} tower {tower}, {batch}, {self.device}"


def media_configurations() -> list[MediaConfiguration]:
    """Return what is trained of towers, by family and device, and other sizes of each."""
    found = []
    for family in FAMILIES:
        for media in ("frozen", "projector", "all"):
            for device in ("views", "hostgpu"):
                one = MediaConfiguration(family=family, media=media, device=device)
                found.append(one)
        deep = replace(one, tower_layers=16, num_micro=2)
        found += [replace(deep, device=device) for device in ("views", "hostgpu")]
    return found


class _Run:
    """What a configuration stands for."""

    def __init__(self, asked: MediaConfiguration) -> None:
        self.asked = asked
        self.decoder: Decoder = build_decoder(self._config, "bf16", media=asked.media)
        self.settings = StepSettings(
            micro_batch_tokens=asked.rows * asked.length, update="late", slots=2, chunk_tokens=64
        )

    @property
    def _config(self) -> PreTrainedConfig:
        asked, fields = self.asked, copy.deepcopy(media_config(self.asked.family)).to_dict()
        heads = asked.tower // 64
        sizes = {"hidden_size": asked.tower, "intermediate_size": 3 * asked.tower}
        fields["vision_config"] |= sizes | {"patch_size": PATCH}
        if asked.family == "gemma3":
            tower = {"num_attention_heads": heads, "num_hidden_layers": asked.tower_layers}
            fields["vision_config"] |= tower | {"image_size": 16 * PATCH}
            fields["mm_tokens_per_image"] = IMAGE_TOKENS
        else:
            full = list(range(3, asked.tower_layers, 4))
            tower = {"num_heads": heads, "depth": asked.tower_layers}
            more = {"fullatt_block_indexes": full, "out_hidden_size": asked.hidden}
            fields["vision_config"] |= tower | more
        kinds = ["sliding_attention", "full_attention"] * asked.layers
        text: dict[str, Any] = {
            "hidden_size": asked.hidden, "intermediate_size": 3 * asked.hidden, "head_dim": 64,
            "num_hidden_layers": asked.layers, "num_attention_heads": asked.hidden // 64,
            "num_key_value_heads": asked.hidden // 128, "vocab_size": 8192,
            "max_position_embeddings": asked.length,
        }  # fmt: skip
        text["layer_types"] = (
            kinds[: asked.layers] if asked.family == "gemma3" else ["full_attention"] * asked.layers
        )
        if asked.family != "gemma3":
            del text["head_dim"]
            sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
            text["rope_parameters"] = sections
        fields["text_config"] |= text
        return type(media_config(asked.family)).from_dict(fields)

    def _item(self, seed: int) -> MediaItem:
        draw = torch.Generator().manual_seed(seed)
        if self.asked.family == "gemma3":
            tensors = {"pixel_values": torch.randn(1, 3, 16 * PATCH, 16 * PATCH, generator=draw)}
        else:
            pixels = torch.randn(256, 3 * 2 * PATCH * PATCH, generator=draw)
            tensors = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 16, 16]])}
        item = MediaItem(kind="image", tensors=tensors, digest=str(seed))
        towers = self.decoder.towers
        assert towers is not None
        if not towers.modules:
            return item
        outputs = outputs_without_numbers(self._whole.model, towers, item)
        made = tuple(
            torch.randn(one.shape, generator=draw).to(one.dtype) for one in outputs.tensors
        )
        shapes = {
            name: one if not one.is_floating_point() else one.new_zeros(()).expand(one.shape)
            for name, one in tensors.items()
        }
        return replace(item, tensors=shapes, outputs=replace(outputs, tensors=made))

    @cached_property
    def _whole(self) -> Decoder:
        return build_decoder(self._config, "bf16", media="all")

    def batch(self, seed: int) -> list[MicroBatch]:
        """Return a step whose images are as in no other."""
        asked = self.asked
        image, words = torch.full((IMAGE_TOKENS,), IMAGE), torch.arange(3, 3 + asked.length)
        between = asked.length // asked.images - IMAGE_TOKENS
        row = torch.cat([part for _ in range(asked.images) for part in (image, words[:between])])
        ids = torch.cat([row, words[: asked.length - len(row)]]).repeat(asked.rows, 1)
        types = (ids == IMAGE).long() * TOKEN_TYPES["image"]
        seeds = iter(range(seed * 1000, (seed + 1) * 1000))
        return [
            MicroBatch(
                input_ids=ids,
                labels=ids.masked_fill(types != 0, -100),
                token_types=types,
                media=[[self._item(next(seeds)) for _ in range(asked.images)] for _ in ids],
            )
            for _ in range(asked.num_micro)
        ]

    def ledger(self, base_bytes: int) -> Ledger:
        """Return what the plan says of it."""
        asked, item = self.asked, self._item(0)
        documents = [(asked.length, asked.images * IMAGE_TOKENS)]
        media = media_shape(self.decoder, documents, [(item, IMAGE_TOKENS)])
        model = shape_of(self.decoder).with_media(media)
        tokens = asked.num_micro * asked.rows * asked.length
        workload = Workload(model=model, step_tokens=tokens, sequence=asked.length)
        profile = plain_profile(base_bytes).changed(unified=asked.device == "views")
        if asked.device == "hostgpu":
            profile = profile.changed(device_bytes=1 << 40)
        return predicted_ledger(profile, workload, self.settings)

    def steps(self) -> int:
        """Take two steps; return the most bytes that were held."""
        kinds = store_kinds(STATES["adamw"]["fp32"], waits=True)
        store = Store(build_layout(self.decoder.blocks, kinds))
        fill_small(store, self.decoder, torch.Generator().manual_seed(0))
        optimizer = AdamW(learning_rate=1e-5, max_grad_norm=1.0, state="fp32")
        with make_engine(
            self.decoder, store, optimizer=optimizer, device=_device(self.asked.device),
            **self.settings.facts(),
        ) as engine:  # fmt: skip
            batches = [self.batch(0), self.batch(1)]
            for batch in batches:
                engine.step(batch)
        if self.asked.device == "hostgpu":
            return int(torch.accelerator.max_memory_allocated(1))
        return peak_bytes()


def _device(name: str) -> Device:
    if name != "hostgpu":
        return CpuDevice()
    from megatrain.devices.accelerator import Accelerator
    from megatrain.devices.runtime import TorchRuntime
    from testkit import host_gpu  # noqa: F401

    return Accelerator(TorchRuntime.find("hostgpu:1"))


def measure_media(environment: Mapping[str, str], only: str = "") -> dict[str, object]:
    """Return the figures with --media; `only` those whose name has this in it."""
    rows: list[dict[str, object]] = []
    for asked in media_configurations():
        if only not in str(asked):
            continue
        measured = _alone(asked, environment)
        if asked.device == "hostgpu":
            needed = _without_reserve(_Run(asked).ledger(0))
        else:  # with what libraries hold that have done all this once
            tiny = replace(asked, hidden=128, layers=1, tower=128, tower_layers=1, rows=1)
            base = _alone(tiny, environment) - held_on_host(_Run(tiny).ledger(0))
            needed = held_on_host(_Run(asked).ledger(base))
        rows.append({"configuration": str(asked)} | compared(needed, measured))
        print(rows[-1], file=sys.stderr, flush=True)
    return errors_of(rows)


def device_bytes(asked: MediaConfiguration) -> tuple[int, int]:
    """Return the device memory of two steps: by the plan, and what torch allocated at most."""
    run = _Run(asked)
    return _without_reserve(run.ledger(0)), run.steps()


def _without_reserve(ledger: Ledger) -> int:
    """Return what torch allocates of the device."""
    reserve = sum(x.num_bytes for x in ledger.lines if x.purpose == "libraries and driver")
    return ledger.total("device") - reserve


def _alone(asked: MediaConfiguration, environment: Mapping[str, str]) -> int:
    command = [sys.executable, "-m", "benchmarks.plan", "--media-alone", json.dumps(asdict(asked))]
    variables = {**os.environ, **environment}
    output = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=variables
    ).stdout
    return int(output)


def run_media_alone(told: str) -> int:
    """Return the most bytes that a configuration held."""
    return _Run(MediaConfiguration(**json.loads(told))).steps()
