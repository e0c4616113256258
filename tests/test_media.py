"""Items of media and their digests."""

from __future__ import annotations

import torch

from megatrain.media import MediaItem


def test_a_digest_tells_apart_kinds_names_dtypes_shapes_and_bytes() -> None:
    zeros = torch.zeros(1, 3, 4, 4)
    items = [
        MediaItem.of("image", {"pixel_values": zeros}),
        MediaItem.of("audio", {"pixel_values": zeros}),
        MediaItem.of("image", {"pixels": zeros}),
        MediaItem.of("image", {"pixel_values": zeros.int()}),
        MediaItem.of("image", {"pixel_values": zeros.view(3, 1, 4, 4)}),
        MediaItem.of("image", {"pixel_values": zeros.index_fill(3, torch.tensor([2]), 1.0)}),
        MediaItem.of("image", {"pixel_values": zeros, "image_sizes": torch.tensor([[4, 4]])}),
    ]
    assert len({item.digest for item in items}) == len(items)
    turned = {"image_sizes": torch.tensor([[4, 4]]), "pixel_values": zeros.mT.contiguous()}
    assert MediaItem.of("image", turned).digest == items[-1].digest
