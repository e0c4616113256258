"""A joint model trained on text, by the engine and by transformers alone: what differs.

The other side is the joint model as `from_pretrained` makes it, under ordinary autograd, with
AdamW by hand on separate masters. Then the export: text as trained, everything else as the source
has it, byte for byte, and the joint class loads it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForMultimodalLM, PreTrainedModel

from megatrain import load_model
from megatrain.disk.hf.model import HostModel
from megatrain.engine.engine import Engine
from megatrain.memory.kinds import TensorKind
from megatrain.memory.master import split_into
from megatrain.models.isolation import ISOLATES
from megatrain.models.multimodal import parts_of
from megatrain.optim.adamw import AdamW
from megatrain.optim.optimizer import decays
from testkit.adamw_by_hand import HandAdamW
from testkit.joint_families import save_tiny_joint
from testkit.plain import make_batch, plain_gradients

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
RATE, DECAY = 1e-2, 0.1
BATCHES = [
    make_batch([(2, 24)], seed=1),
    make_batch([(2, 24), (1, 17), (3, 9)], seed=2, padded=True),
    make_batch([(2, 24), (1, 31)], seed=3),
]
PACKED = [make_batch([(1, 24), (1, 31)], seed=4, packed=True)]


def load_plain_joint(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return the joint model as transformers loads it, in training mode."""
    model: PreTrainedModel = AutoModelForMultimodalLM.from_pretrained(folder, dtype=dtype)
    return model.train()


def joint_faults(
    family: str,
    dtype: Literal["bf16", "fp32"],
    folder: Path,
    spoil: Callable[[HostModel], None] = lambda model: None,
) -> list[str]:
    """Train a tiny `family` both ways; return what differs. `spoil` may change it on the way."""
    source = save_tiny_joint(folder / "source", family, DTYPES[dtype])
    model = load_model(source, dtype=dtype)
    faults = _training_faults(model, load_plain_joint(source, DTYPES[dtype]), family)
    spoil(model)
    model.export(folder / "export", shard_bytes=150_000)
    return [*faults, *_export_faults(model, source, folder / "export", DTYPES[dtype])]


def _training_faults(model: HostModel, plain: PreTrainedModel, family: str) -> list[str]:
    faults: list[str] = []
    store, params = model.store, model.decoder.params
    names = {param.name for param in params}
    weights = {name: param for name, param in plain.named_parameters() if name in names}
    by_name = {param.name: param for param in params}
    hand = HandAdamW(
        {name: param.detach().float() for name, param in weights.items()},
        lr=RATE,
        weight_decay=DECAY,
        decays=lambda name: decays(by_name[name]),
    )
    batches = BATCHES + (PACKED if family in ISOLATES else [])
    optimizer = AdamW(learning_rate=RATE, weight_decay=DECAY)
    with Engine(model.decoder, store, optimizer=optimizer) as engine:
        for number, batch in enumerate(batches, start=1):
            losses, gradients = plain_gradients(plain, batch, step=number)
            result = engine.step(batch)
            if list(result.micro_losses) != losses:
                faults.append(f"step {number}: losses {result.micro_losses} and {losses}")
            found = {name: store.param(name, TensorKind.GRAD) for name in names}
            faults += [
                f"step {number}: gradient of {name}"
                for name in sorted(names)
                if not torch.equal(found[name], gradients[name])
            ]
            faults += [
                f"step {number}: {name} is carried and has a gradient"
                for name, gradient in gradients.items()
                if name not in names and gradient.any()
            ]
            hand.update({name: gradients[name] for name in names}, number)
            for name, param in weights.items():
                param.data.copy_(_rounded(hand.masters[name], param.dtype))
        engine.synchronize()
    faults += [
        f"master of {name}"
        for name in sorted(names)
        if not torch.equal(store.master(name), hand.masters[name])
    ]
    return faults


def _rounded(master: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight that compute sees of a master: itself, or rounded half up to bf16."""
    if dtype is torch.float32:
        return master
    hi, lo = torch.empty_like(master, dtype=dtype), torch.empty_like(master, dtype=torch.int16)
    split_into(master, hi, lo)
    return hi


def _export_faults(model: HostModel, source: Path, export: Path, dtype: torch.dtype) -> list[str]:
    faults = []
    before, after = folder_bytes(source), folder_bytes(export)
    names = {tensor.name for tensor in model.beside}
    if not names and parts_of(model.decoder.config.model_type):
        faults.append("nothing is carried")
    faults += [
        f"{name} is carried and has changed" for name in names if before[name] != after.get(name)
    ]
    if before.keys() != after.keys():
        faults.append(f"names of tensors differ: {sorted(before.keys() ^ after.keys())[:4]}")
    loaded, info = AutoModelForMultimodalLM.from_pretrained(
        export, dtype=dtype, output_loading_info=True
    )
    faults += [f"{kind}: {found}" for kind, found in info.items() if found]
    state = loaded.state_dict()
    plain = load_plain_joint(source, dtype).state_dict()
    for param in model.decoder.params:
        if not torch.equal(state[param.name], model.store.param(param.name, TensorKind.HI)):
            faults.append(f"{param.name} in the export")
        if (
            param.trained
            and len(param.shape) > 1
            and torch.equal(state[param.name], plain[param.name])
        ):
            faults.append(f"{param.name} has not moved")
    for param in model.decoder.carried:
        if not torch.equal(state[param.name], plain[param.name]):
            faults.append(f"{param.name} is carried and loads otherwise")
    return faults


def folder_bytes(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Return dtype and bytes of each tensor in a folder, by the safetensors library."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                found[name] = (str(tensor.dtype), raw)
    return found
