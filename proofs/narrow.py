"""Narrow forms against the packages that have them: bitsandbytes' nf4 and packed int4.

    python -m proofs.narrow [--json] [--spoiled]

Run this in an environment of its own, with one thread (OMP_NUM_THREADS=1: the mean of many scales
depends on how threads divide them):

    pip install torch==2.13.0                                  # the build for CPUs is enough
    pip install -e . && pip install bitsandbytes==0.50.2 compressed-tensors==0.20.0

Of matrices of several shapes and distributions, our bytes of nf4 with double scales must be those
of bitsandbytes' CPU kernels, and so must the widened weights in bf16 and fp32. Of matrices that
compressed-tensors packs to int4, our widened weights must be those of its own decompression. A
number of columns that 64 does not divide is left out for bf16: the vector kernel of bitsandbytes
then takes another block's scale, unlike its own kernels for other processors. `--spoiled` changes
one byte of each, and must end with 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megatrain.disk.hf.narrowing import narrow_nf4
from megatrain.models.widening import widened
from megatrain.narrow import Matrices, nf4_on_load

SHAPES = ((512, 512), (96, 64), (2048, 4096), (64, 128), (3000, 1024))
KINDS = ("normal", "wild", "zeros", "constant", "zero rows")


def main() -> int:
    """Compare; return 1 if anything differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--spoiled", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        **{
            f"nf4 {s[0]}x{s[1]} {k}": _nf4(s, k, spoiled=asked.spoiled)
            for s in SHAPES
            for k in KINDS
        },
        **{f"int4 group {g}": _int4(g, spoiled=asked.spoiled) for g in (16, 32, 128)},
    }
    wrong = [name for name, faults in found.items() if faults]
    if asked.json:
        print(
            json.dumps({"cases": len(found), "differing": {n: found[n] for n in wrong}}, indent=1)
        )
    else:
        print(f"{len(found) - len(wrong)} of {len(found)} cases have the same bits")
        for name in wrong:
            print(f"  {name}: {', '.join(found[name])}")
    return 1 if wrong else 0


def _weight(shape: tuple[int, int], kind: str) -> Tensor:
    random = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(shape, generator=random) * 0.02
    match kind:
        case "wild":
            weight *= torch.exp(3 * torch.randn(shape, generator=random))
        case "zeros":
            weight.zero_()
        case "constant":
            weight.fill_(0.5)
        case "zero rows":
            weight[: shape[0] // 3] = 0
    return weight


def _nf4(shape: tuple[int, int], kind: str, *, spoiled: bool) -> list[str]:
    """Return which of our arrays and weights differ from those of bitsandbytes."""
    functions: Any = import_module("bitsandbytes.functional")
    faults = []
    for dtype in (torch.bfloat16, torch.float32):
        weight = _weight(shape, kind).to(dtype)
        packed, state = functions.quantize_4bit(
            weight, blocksize=64, quant_type="nf4", compress_statistics=True
        )
        theirs = {
            "values": packed.view(-1),
            "scales": state.absmax,
            "scales_of_scales": state.state2.absmax,
            "offset": state.offset.view(1),
        }
        matrices, ours = nf4_on_load(shape), {}
        data = torch.zeros(matrices.num_bytes, dtype=torch.uint8)
        for name, first, numbers in narrow_nf4(iter(torch.split(weight.view(-1), 777))):
            begin = matrices.arrays[name].start + first * numbers.element_size()
            data[begin : begin + numbers.nbytes] = numbers.contiguous().view(torch.uint8)
        if spoiled:
            data[5] ^= 16
        for name, array in matrices.arrays.items():
            ours[name] = data[array.start : array.stop].view(getattr(torch, array.dtype))
        faults += [name for name, one in theirs.items() if not torch.equal(ours[name], one)]
        wide = widened((matrices,), data, shape, dtype)
        if not torch.equal(wide, functions.dequantize_4bit(packed, state)):
            faults.append(f"weights in {dtype}")
    return faults


def _int4(group: int, *, spoiled: bool) -> list[str]:
    """Return whether our weights differ from those of compressed-tensors."""
    packing: Any = import_module("compressed_tensors.compressors.pack_quantized.helpers")
    rows, columns = 96, 256
    random = torch.Generator().manual_seed(group)
    values = torch.randint(-8, 8, (rows, columns), dtype=torch.int8, generator=random)
    scales = (torch.rand((rows, columns // group), generator=random) / 50).bfloat16()
    packed = packing.pack_to_int32(values, 4)
    unpacked = packing.unpack_from_int32(packed, 4, torch.Size((rows, columns)))
    wanted = unpacked.view(rows, -1, group).to(scales.dtype) * scales[..., None]
    matrices = Matrices(
        method="int4", count=1, rows=rows, columns=columns, block=(1, group), scale="bfloat16"
    )
    data = torch.zeros(matrices.num_bytes, dtype=torch.uint8)
    arrays = matrices.arrays
    data[: arrays["values"].stop] = packed.contiguous().view(torch.uint8).view(-1)
    data[arrays["scales"].start : arrays["scales"].stop] = scales.view(torch.uint8).view(-1)
    if spoiled:
        data[5] ^= 16
    wide = widened((matrices,), data, (rows, columns), torch.bfloat16)
    return [] if torch.equal(wide, wanted.view(rows, columns)) else ["weights"]


if __name__ == "__main__":
    sys.exit(main())
