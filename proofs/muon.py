"""Muon, streamed, against torch.optim.Muon over the resident model.

    python -m proofs.muon [--json] [--steps 300] [--family llama]

A tiny model in fp32 is trained for so many steps by the engine and by plain PyTorch: torch's own
Muon for the matrices of layers, AdamW as a textbook has it for all other params. Gradients are
clipped by their global norm. Experts of a mixture go one at a time here: a product of several at
once has other last bits.

weight_difference     the largest difference of a weight at the end
never_orthogonalized  the same without Newton-Schulz: the comparison would notice
micro_batches         params whose bits depend on whether a step is one micro-batch or it twice
bytes_per_parameter   of a bf16 matrix in the store, with bf16 momentum and waiting gradients
exposed               by plan, of a step of 32k tokens of Qwen3-8B with bf16 states on each machine:
                      seconds of a step with Muon and with AdamW, seconds of Newton-Schulz, and
                      the share of these that the step is longer; predicted
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers.utils import logging

from megatrain import Muon, load_model
from megatrain.engine.gradients import directions
from megatrain.memory.kinds import Kind, store_kinds
from megatrain.optim import muon
from megatrain.optim.states import STATES
from megatrain.planning.catalog.asked_machines import find_machine
from megatrain.planning.catalog.known_models import find_known_model
from megatrain.planning.search import Search
from megatrain.planning.simulate import simulate
from megatrain.planning.workload import Workload
from megatrain.step.ops import OpKind
from megatrain.step.settings import StepSettings
from testkit.engines import make_engine
from testkit.families import save_tiny
from testkit.plain import load_plain, make_batch
from testkit.plain_muon import trained_by_torch

RATE, DECAY, CLIP = 1e-3, 0.1, 1.0
MACHINES = ("RTX 4090", "H100 SXM")


def optimizer(**changes: Any) -> Muon:
    return Muon(learning_rate=RATE, weight_decay=DECAY, max_grad_norm=CLIP, **changes)


def batches(num_steps: int) -> list[Any]:
    """Return a few batches, again and again."""
    several = [make_batch([(2, 16), (1, 11)], seed=number) for number in range(8)]
    return [several[number % 8] for number in range(num_steps)]


def streamed(folder: Path, steps: list[Any]) -> dict[str, Tensor]:
    """Return the weights that the engine trains, through device slots."""
    home = load_model(folder, dtype="fp32", kinds=store_kinds(STATES["muon"]["fp32"], waits=True))
    with make_engine(home.decoder, home.store, optimizer=optimizer()) as engine:
        for batch in steps:
            engine.step(batch)
    return {name: home.store.param(name, Kind.HI).clone() for name in home.store.layout.places}


def resident(folder: Path, steps: list[Any]) -> dict[str, Tensor]:
    """Return the weights that torch trains."""
    home, model = load_model(folder, dtype="fp32"), load_plain(folder, torch.float32)
    clip = optimizer().clip_factor
    return trained_by_torch(model, home.decoder, steps, clip, rate=RATE, weight_decay=DECAY)


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - value).abs().max()) for name, value in other.items())


def compared(folder: Path, num_steps: int) -> dict[str, Any]:
    """Return how far weights are apart, as they are and without Newton-Schulz."""
    muon.AT_ONCE = 1
    expected = resident(folder, batches(num_steps))
    found = {"weight_difference": furthest(streamed(folder, batches(num_steps)), expected)}
    with mock.patch.object(directions, "orthogonalize"):
        found["never_orthogonalized"] = furthest(streamed(folder, batches(num_steps)), expected)
    return found


def depending_on_micro_batches(folder: Path) -> list[str]:
    """Return the params whose bits differ if each step's micro-batch comes twice."""
    once = [make_batch([(2, 16)], seed=number) for number in range(20)]
    one, two = streamed(folder, once), streamed(folder, [[*batch, *batch] for batch in once])
    return [name for name in one if not torch.equal(one[name], two[name])]


def bytes_per_parameter(folder: Path) -> float:
    """Return the bytes of a matrix in a store, by its number of parameters."""
    kinds = store_kinds(STATES["muon"]["bf16"], waits=True)
    store = load_model(folder, dtype="bf16", kinds=kinds).store
    place = next(p for name, p in store.layout.places.items() if name.endswith("q_proj.weight"))
    total = sum(place.extent(kind).num_bytes for kind in store.kinds if place.has(kind))
    return total / place.param.num_elements


def planned(machine: str) -> dict[str, float]:
    """Return a step of 32k tokens with Muon and with AdamW, by plan."""
    profile = find_machine(machine)[0].profile(ram_bytes=256 << 30)
    model = find_known_model("Qwen/Qwen3-8B").shape
    seconds, orthogonalized = {}, 0.0
    for name in ("adamw", "muon"):
        shape = model.with_matrices_apart() if name == "muon" else model
        workload = Workload(model=shape, step_tokens=32768, states=STATES[name])
        settings = StepSettings(state="bf16")
        best = Search(profile, workload, settings, {"state": "set here"}).best()
        assert best is not None
        played = simulate(profile, workload, best.settings)
        seconds[name] = played.step_s
        orthogonalized = sum(
            one.end_s - one.start_s for one in played.ops if one.op.kind is OpKind.ORTHOGONALIZE
        )
    return {
        "adamw_s": seconds["adamw"],
        "muon_s": seconds["muon"],
        "newton_schulz_s": orthogonalized,
        "exposed_share": max(0.0, seconds["muon"] - seconds["adamw"]) / orthogonalized,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--family", default="llama")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = save_tiny(Path(name), given.family, torch.float32)
        found: dict[str, Any] = {"family": given.family, "steps": given.steps}
        found |= compared(folder, given.steps)
        found["micro_batches"] = depending_on_micro_batches(folder)
        found["bytes_per_parameter"] = bytes_per_parameter(folder)
    found["exposed"] = {machine: planned(machine) for machine in MACHINES}
    if given.json:
        print(json.dumps(found, indent=1))
    else:
        for key, value in found.items():
            print(f"{key:22} {value}")


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    main()
