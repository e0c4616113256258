"""Two blocks of odd sizes, and gradients for them."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.engine.gradients.home_sums import HomeSums
from megatrain.engine.gradients.slot_sums import SlotSums
from megatrain.memory.layout import build_layout
from megatrain.models.decoder import Block, Param
from megatrain.optim.states import WITH_CLIP
from megatrain.step.ops import Role

BF16, FP32 = torch.bfloat16, torch.float32
Sums = HomeSums | SlotSums


def block(index: int, *shapes: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = ()) -> Block:
    return Block(
        index=index,
        role=Role.LAYER,
        params=tuple(
            Param(
                name=f"{index}.{number}",
                shape=shape,
                dtype=dtypes[number] if dtypes else BF16,
                trained=shape != (13,),
            )
            for number, shape in enumerate(shapes)
        ),
    )


# Sizes that are no multiples of the alignment; a frozen param; one in fp32 among bf16.
BLOCKS = [
    block(0, (5, 7), (13,), (3,), (130,)),
    block(1, (9, 61), (2, 2), dtypes=(BF16, FP32)),
]
LAYOUT = build_layout(BLOCKS, WITH_CLIP)
NAMES = ["0.0", "0.2", "0.3"]


def empty(num_bytes: int) -> Tensor:
    """Memory as it comes: full of what was there before."""
    return torch.full((num_bytes // 4,), float("nan")).view(torch.uint8)


def parts(seed: int, dtype: torch.dtype = BF16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    params = {param.name: param for param in BLOCKS[0].params}
    return {n: torch.randn(params[n].shape, generator=generator).to(dtype) for n in NAMES}


def drained(sums: Sums, block: int = 0) -> list[Tensor]:
    """The sums as they are drained, into memory full of something else."""
    segments = LAYOUT.trained_segments(block)
    targets = [torch.full((segment.num_elements,), float("nan")) for segment in segments]
    sums.drain(0, block, list(zip(segments, targets, strict=True)))
    return targets


def read(sums: Sums) -> dict[str, Tensor]:
    """The sums of block 0 by param, where an update will look for them."""
    (flat,) = drained(sums)
    places = [LAYOUT.places[name] for name in NAMES]
    return {
        p.param.name: flat[p.start : p.start + p.param.num_elements].view(p.param.shape)
        for p in places
    }
