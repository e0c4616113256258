"""Rows with media for tiny joint models, and the same rows for transformers alone.

Items are random tensors of the names and shapes that each family's processor gives. Sizes differ
from item to item where a family lets them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel

from megatrain.batch import MicroBatch
from megatrain.media import TOKEN_TYPES, MediaItem, MediaKind
from megatrain.models.documents import attending_as_ever
from testkit.joint_families import tiny_joint_config

IMAGE, VIDEO, AUDIO, OPEN, CLOSE = 300, 301, 302, 303, 304
TOKENS: dict[MediaKind, int] = {"image": IMAGE, "audio": AUDIO}
Made = tuple[MediaItem, int]
"""An item, and how many tokens stand for it."""


def _grid(draw: torch.Generator, number: int) -> Made:
    height, width = ((4, 6), (2, 4), (8, 4))[number % 3]
    pixels = torch.randn(height * width, 3 * 2 * 14 * 14, generator=draw)
    tensors = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}
    return MediaItem.of("image", tensors), height * width // 4


def _square(side: int, tokens: int) -> Any:
    def make(draw: torch.Generator, number: int) -> Made:
        pixels = torch.randn(1, 3, side, side, generator=draw)
        return MediaItem.of("image", {"pixel_values": pixels}), tokens

    return make


def _tiles(draw: torch.Generator, number: int) -> Made:
    tiles = 1 + number % 3
    return MediaItem.of("image", {"pixel_values": torch.randn(tiles, 3, 56, 56, generator=draw)}), (
        4 * tiles
    )


def _any_size(draw: torch.Generator, number: int) -> Made:
    height, width = ((56, 84), (28, 56), (84, 28))[number % 3]
    tensors = {
        "pixel_values": torch.randn(1, 3, height, width, generator=draw),
        "image_sizes": torch.tensor([[height, width]]),
    }
    return MediaItem.of("image", tensors), height * width // 28**2


def _patches(draw: torch.Generator, number: int) -> Made:
    columns, rows = ((6, 3), (3, 3), (6, 6))[number % 3]
    places = torch.full((1, 36, 2), -1)
    count = rows * columns
    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
    places[0, :count] = grid
    pixels = torch.zeros(1, 36, 3 * 14 * 14)
    pixels[0, :count] = torch.randn(count, 3 * 14 * 14, generator=draw)
    tensors = {"pixel_values": pixels, "image_position_ids": places}
    return MediaItem.of("image", tensors), count // 9


def _mel(draw: torch.Generator, number: int) -> Made:
    features = torch.randn(1, 8, 32, generator=draw)
    return MediaItem.of("audio", {"input_features": features}), 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaFamily:
    """A family with media: what its tiny config needs, and how its items are made."""

    makers: Sequence[Callable[[torch.Generator, int], Made]]
    own: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    audio: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None
    """The family in transformers, if its name is another."""


def _rope(sections: list[int], **more: Any) -> dict[str, Any]:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections, **more}
    return {"rope_parameters": parameters}


_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
MEDIA_FAMILIES: dict[str, MediaFamily] = {
    "qwen2_5_vl": MediaFamily(
        makers=(_grid,), own=_IDS, vision={"fullatt_block_indexes": [1]}
    ),
    "qwen3_vl": MediaFamily(
        makers=(_grid,), own=_IDS, text=_rope([3, 3, 2]),
        vision={"deepstack_visual_indexes": [0, 1]},
    ),
    "qwen3_5": MediaFamily(
        makers=(_grid,), own=_IDS, text=_rope([2, 1, 1], partial_rotary_factor=0.5),
    ),
    "gemma3": MediaFamily(
        makers=(_square(56, 4),), own={"image_token_index": IMAGE, "mm_tokens_per_image": 4},
        vision={"image_size": 56},
        text={"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gemma4": MediaFamily(
        makers=(_patches,), own={**_IDS, "audio_token_id": AUDIO},
        text={"use_bidirectional_attention": "vision"},
    ),
    "llama4": MediaFamily(
        makers=(_tiles,), own={"image_token_index": IMAGE},
        vision={
            "image_size": 56, "intermediate_size": 128, "projector_input_dim": 32,
            "projector_output_dim": 32, "vision_output_dim": 32,
        },
    ),
    "mistral3": MediaFamily(
        makers=(_any_size,), own={"image_token_index": IMAGE}, vision={"image_size": 112},
    ),
    "voxtral": MediaFamily(
        makers=(_mel,), own={"audio_token_id": AUDIO},
        audio={"max_source_positions": 16, "num_mel_bins": 8, "intermediate_size": 128},
    ),
}  # fmt: skip


def media_config(family: str) -> PreTrainedConfig:
    """Return a small configuration of a joint family whose towers take our items."""
    facts = MEDIA_FAMILIES[family]
    config = copy.deepcopy(tiny_joint_config(facts.base or family))
    fields = config.to_dict()
    for part, changes in {
        "text_config": facts.text, "vision_config": facts.vision, "audio_config": facts.audio,
    }.items():  # fmt: skip
        if changes:
            fields[part] = {**fields[part], **changes}
    return type(config).from_dict({**fields, **facts.own})


def save_media_model(folder: Path, family: str, dtype: torch.dtype) -> Path:
    """Save a random joint model that takes our items; return the folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForMultimodalLM.from_config(media_config(family), dtype=dtype)
        inside = {id(param) for param in model.get_decoder().parameters()}
        for param in model.parameters():  # fresh towers hardly tell one image from another
            if param.dim() > 1 and id(param) not in inside:
                param.data.mul_(4.0)
                if not param.any():
                    param.data.normal_(std=0.1)
    model.save_pretrained(folder, max_shard_size="400KB")
    return folder


def media_documents(
    family: str, counts: Sequence[int], seed: int = 1
) -> list[tuple[Tensor, Tensor, list[MediaItem]]]:
    """Return documents with so many items each: tokens, types and items."""
    draw = torch.Generator().manual_seed(seed)
    makers = MEDIA_FAMILIES[family].makers
    documents, number = [], 0
    for count in counts:
        parts, items = [torch.randint(3, 290, (4,), generator=draw)], []
        for _ in range(count):
            item, tokens = makers[number % len(makers)](draw, number)
            number += 1
            between = int(torch.randint(2, 6, (), generator=draw))
            parts += [
                torch.tensor([OPEN]),
                torch.full((tokens,), TOKENS[item.kind]),
                torch.tensor([CLOSE]),
                torch.randint(3, 290, (between,), generator=draw),
            ]
            items.append(item)
        ids = torch.cat(parts)
        types = torch.zeros_like(ids)
        for kind, token in TOKENS.items():
            types[ids == token] = TOKEN_TYPES[kind]
        documents.append((ids, types, items))
    return documents


def media_batch(
    documents: Sequence[tuple[Tensor, Tensor, list[MediaItem]]], *, packed: bool
) -> MicroBatch:
    """Return documents as one micro-batch: a flat row, or a row each."""
    media = [items for _, _, items in documents]
    labels = [ids.masked_fill(types != 0, -100) for ids, types, _ in documents]
    for one in labels:
        one[:2] = -100
    if packed:
        return MicroBatch(
            input_ids=torch.cat([ids for ids, _, _ in documents])[None],
            labels=torch.cat(labels)[None],
            position_ids=torch.cat([torch.arange(len(ids)) for ids, _, _ in documents])[None],
            mm_token_type_ids=torch.cat([types for _, types, _ in documents])[None],
            media=media,
        )
    longest = max(len(ids) for ids, _, _ in documents)

    def rows(parts: Sequence[Tensor], value: int) -> Tensor:
        return torch.stack([F.pad(part, (0, longest - len(part)), value=value) for part in parts])

    return MicroBatch(
        input_ids=rows([ids for ids, _, _ in documents], 0),
        labels=rows(labels, -100),
        attention_mask=rows([torch.ones_like(ids) for ids, _, _ in documents], 0),
        mm_token_type_ids=rows([types for _, types, _ in documents], 0),
        media=media,
    )


def plain_inputs(model: PreTrainedModel, micro: MicroBatch) -> dict[str, Any]:
    """Return the arguments that a processor would give transformers' own model for this batch."""
    named: dict[str, list[Tensor]] = {}
    model._given = [
        replace(item, tensors={n: t.to(model.device) for n, t in item.tensors.items()})
        for items in micro.media
        for item in items
    ]
    for item in model._given:
        for name, tensor in item.tensors.items():
            named.setdefault(name, []).append(tensor)
    given: dict[str, Any] = {name: _together(tensors) for name, tensors in named.items()}
    given |= micro.inputs
    family = model.config.model_type
    if family == "gemma3":
        given["token_type_ids"] = micro.mm_token_type_ids
    elif family.startswith(("qwen", "gemma4")):
        given["mm_token_type_ids"] = micro.mm_token_type_ids
    if family.startswith("qwen") and micro.position_ids is not None:
        given["position_ids"] = _packed_positions(model, micro)
    return given


@contextmanager
def one_by_one(model: PreTrainedModel) -> Iterator[None]:
    """Let transformers' own model compute the features of one item after another.

    Its products then have the shapes of the engine's.
    """
    owner = getattr(model, "model", model)
    kinds = [kind for kind in TOKENS if hasattr(owner, f"get_{kind}_features")]
    own = {f"get_{kind}_features": getattr(owner, f"get_{kind}_features") for kind in kinds}

    def each(name: str) -> Any:
        def features(*_: Any, **__: Any) -> Any:
            kind, patched = name.split("_")[1], {one: owner.__dict__.pop(one) for one in own}
            with attending_as_ever():  # and one may call another
                outputs = [
                    own[name](**item.tensors, return_dict=True)
                    for item in model._given
                    if item.kind == kind
                ]
            owner.__dict__.update(patched)
            first = outputs[0]
            for field_name in ("pooler_output", "last_hidden_state"):
                values: list[Any] = [getattr(one, field_name, None) for one in outputs]
                if isinstance(values[0], tuple):
                    setattr(first, field_name, [part for value in values for part in value])
                elif values[0] is not None and values[0].shape[1:] == values[-1].shape[1:]:
                    setattr(first, field_name, torch.cat(values))
            if getattr(first, "deepstack_features", None) is not None:
                levels = zip(*(one.deepstack_features for one in outputs), strict=True)
                first.deepstack_features = [sum(map(tuple, level), ()) for level in levels]
            return first

        return features

    for name in own:
        owner.__dict__[name] = each(name)
    try:
        yield
    finally:
        for name in own:
            owner.__dict__.pop(name, None)


def _together(tensors: Sequence[Tensor]) -> Tensor:
    """Return items as a processor batches them: padded to the largest."""
    if tensors[0].dim() == 4:
        sizes = [max(tensor.shape[dim] for tensor in tensors) for dim in (2, 3)]
        return torch.cat(
            [F.pad(t, (0, sizes[1] - t.shape[3], 0, sizes[0] - t.shape[2])) for t in tensors]
        )
    return torch.cat(list(tensors))


def _packed_positions(model: PreTrainedModel, micro: MicroBatch) -> Tensor:
    """Return text's positions and those of each axis, document by document."""
    assert micro.position_ids is not None
    parts = []
    for document in micro.documents():
        named: dict[str, list[Tensor]] = {}
        for item in document.media[0]:
            for name, tensor in item.tensors.items():
                if name.endswith("grid_thw"):
                    named.setdefault(name, []).append(tensor.to(model.device))
        parts.append(
            model.model.get_rope_index(
                document.input_ids,
                mm_token_type_ids=document.mm_token_type_ids,
                **{name: torch.cat(tensors) for name, tensors in named.items()},
            )[0]
        )
    return torch.cat([micro.position_ids[None], torch.cat(parts, dim=2)])
