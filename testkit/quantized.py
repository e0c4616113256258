"""Tiny model folders in fp8, mxfp4 and int4, and what transformers makes of them.

The values come from transformers' own quantizer (fp8) or are drawn at random (mxfp4, int4: every
byte is a pair of weights). `dequantized` loads a folder by `from_pretrained`, dequantized: the
oracle.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from testkit.families import tiny_model

FILE = "model.safetensors"


def edit(folder: Path, **changes: Any) -> None:
    """Change keys of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def save_fp8(
    folder: Path,
    family: str = "llama",
    block: tuple[int, int] | None = (16, 32),
    scale_fmt: str = "float",
    **sizes: Any,
) -> None:
    """Write a tiny model whose projections are in fp8, with a scale per block or per matrix."""
    tiny_model(family, torch.bfloat16, **sizes).save_pretrained(folder)
    how = SimpleNamespace(weight_block_size=block, scale_fmt=scale_fmt)
    quantize = Fp8Quantize(SimpleNamespace(quantization_config=how))
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / FILE).items():
        if "proj" in name and name.endswith(".weight"):
            made = quantize.convert({name: tensor})
            if block is None:
                made[f"{name}_scale_inv"] = made[f"{name}_scale_inv"].reshape(())
                made[name.replace("weight", "activation_scale")] = torch.ones(())
            tensors |= made
        else:
            tensors[name] = tensor
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    settings = {"quant_method": "fp8", "weight_block_size": block, "scale_fmt": scale_fmt}
    activation = "dynamic" if block else "static"
    edit(folder, quantization_config=settings | {"activation_scheme": activation})


def save_mxfp4(folder: Path, **sizes: Any) -> None:
    """Write a tiny gpt_oss whose experts are in mxfp4, with every exponent that weights have."""
    tiny_model("gpt_oss", torch.bfloat16, **sizes).save_pretrained(folder)
    tensors = load_file(folder / FILE)
    random = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32, 16)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
        scales = torch.randint(110, 130, shape[:-1], dtype=torch.uint8, generator=random)
        scales.view(-1)[:6] = torch.tensor([0, 1, 2, 100, 126, 251], dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    edit(folder, quantization_config={"quant_method": "mxfp4"})


def save_int4(folder: Path, family: str = "deepseek_v3", group: int = 16, **sizes: Any) -> None:
    """Write a tiny model whose experts are in int4, packed as compressed-tensors packs them."""
    tiny_model(family, torch.bfloat16, **sizes).save_pretrained(folder)
    tensors = load_file(folder / FILE)
    random = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if ".experts." in name]:
        rows, columns = tensors.pop(name).shape
        least, most = -(2**31), 2**31
        packed = torch.randint(least, most, (rows, columns // 8), generator=random)
        scales = torch.rand((rows, columns // group), generator=random) / 50
        tensors |= {
            f"{name}_packed": packed.int(),
            f"{name}_scale": scales.bfloat16(),
            f"{name}_shape": torch.tensor([rows, columns]),
        }
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    scheme = {"targets": ["Linear"], "weights": weights | {"group_size": group}}
    how = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    edit(folder, quantization_config=how | {"config_groups": {"group_0": scheme}})


def dequantized(folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Return the weights that transformers gives."""
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    how = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}[method](dequantize=True)
    # It asks for accelerate, which places models on devices, and takes no part in the values.
    asked = "transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available"
    with patch(asked, lambda: True):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=how)
    return dict(model.state_dict())
