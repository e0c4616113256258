"""No race on an accelerator: its own lanes on a simulated one, against the reference on the CPU.

    python -m proofs.races [--json] [--count 10000] [--first 0] [--seconds 36000]

A case is a function of its number: one of six tiny families, precision, optimizer, update policy,
places of tape, weights and moments, micro-batches (plain, padded or packed), full rows or tiles,
experts whole or in pages, registered or staged copies, and when the device does what it was given:
as late as it may, at once, or at any time in between. Bits must be those of the reference, no two
streams or threads may touch a byte unordered, nothing may be freed while in use, and in a second
step of the same shapes no lane may wait for the device, but once in a forward of experts in pages.
`--first NUMBER --count 1` plays a case again.
"""

from __future__ import annotations

import functools
import random
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import (
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.models.decoder import COMPUTE_DTYPES
from proofs.numbered import run as run_numbered
from testkit.simulated.accelerator import Policy, Simulator
from testkit.simulated.watched import WatchedOptimizer, watched
from testkit.worlds import SIZES, Case, Outcome, Shapes, Sort, Tiered, World

NUM_LAYERS = 4
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS: Mapping[str, Callable[..., PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
    "gemma2": functools.partial(Gemma2Config, sliding_window=4, query_pre_attn_scalar=16),
    "mixtral": functools.partial(MixtralConfig, **EXPERTS),
    "gpt_oss": functools.partial(GptOssConfig, sliding_window=4, **EXPERTS),
    "qwen3_next": functools.partial(
        Qwen3NextConfig,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"] * 2,
    ),
}

TIED = {"gemma2"}
MIXTURES = {"mixtral", "gpt_oss", "qwen3_next"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A case, and how the accelerator plays it."""

    family: str
    dtype: str
    case: Case
    policy: Policy
    seed: int
    staged: bool = False
    """No host memory can be registered."""
    optimizer: str = "adamw"
    gather_embedding: bool = False
    """Of the embedding only rows visit the device."""


@functools.cache
def world_of(family: str, dtype: str, optimizer: str = "adamw") -> World:
    """Return a tiny model of a family, made once."""
    config = CONFIGS[family]
    return World(
        Sort(
            config=lambda: config(**SIZES, num_hidden_layers=NUM_LAYERS),
            dtype=dtype,  # type: ignore[arg-type]
            optimizer=optimizer,
        )
    )


def run_of(number: int) -> Run:
    """Return a run at random, the same for the same number."""
    source = random.Random(number)

    def shapes() -> Shapes:
        return tuple(
            (source.randint(1, 2), source.randint(4, 6)) for _ in range(source.randint(1, 2))
        )

    once = shapes()
    case = Case(
        sort="",
        steps=(once, source.choice([once, shapes()])),
        update=source.choice(["none", "in_backward", "in_backward", "late", "late"]),
        slots=source.choice([2, 2, 3, NUM_LAYERS]),
        tape=source.choice(["device", "host"]),
        tape_slots=source.randint(2, 4),
        evaluates_after=tuple(n for n in range(2) if source.random() < 0.1),
        form=source.choice(["plain", "padded", "packed", "flat"]),
    )
    family = list(CONFIGS)[number % len(CONFIGS)]
    run = Run(
        family=family,
        dtype=source.choice(list(COMPUTE_DTYPES)),
        case=case,
        policy=source.choice(["late", "random", "random", "early"]),
        seed=number,
        staged=source.random() < 0.15,
        gather_embedding=family not in TIED and source.random() < 0.3,
    )
    tiers: list[Tiered] = ["none", "states"]
    tier = source.choice(tiers)
    grad_slots = source.randint(1, 2)
    case = replace(case, tier=tier, grad_slots=grad_slots)
    case = replace(case, tile_tokens=source.choice([None, None, 4]))
    if case.tile_tokens is None:
        case = replace(case, kept_layers=source.randint(0, NUM_LAYERS))
    if family in MIXTURES:
        case = replace(case, expert_pages=source.choice([1, 2, 3, 4]))
    whole = case.expert_pages == 1
    if whole:
        run = replace(run, optimizer="muon" if source.random() < 0.3 else "adamw")
    return replace(run, case=case)


def play(run: Run, simulator: Simulator, **changes: Any) -> Outcome:
    """Return the outcome of a run on the simulated accelerator."""
    world = world_of(run.family, run.dtype, run.optimizer)
    optimizer = None
    if run.case.update != "none":
        optimizer = WatchedOptimizer(world.optimizer(), simulator)
    device = AcceleratorDevice(simulator, piece_bytes=4096, ring_buffer_bytes=1000)
    with watched(simulator), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "host memory:")
        settings: dict[str, Any] = {"device": device, "lanes": None, "optimizer": optimizer}
        settings |= {"gather_embedding": run.gather_embedding}
        return world.play(run.case, **settings | changes)


def reference(run: Run) -> Outcome:
    """Return the outcome of a run on the CPU, one op at a time, with nothing on disk."""
    case = replace(run.case, tier="none", grad_slots=2, kept_layers=0, expert_pages=1)
    return world_of(run.family, run.dtype, run.optimizer).play(case, reference=True)


def simulator_of(run: Run) -> Simulator:
    return Simulator(run.seed, run.policy, registers=not run.staged)


def faults_of(run: Run) -> list[str]:
    """Return what is wrong in a run: differences, races, what was raised."""
    simulator = simulator_of(run)
    try:
        differences = play(run, simulator).differences(reference(run))
    except Exception:
        return [traceback.format_exc()]
    return [*differences, *simulator.races, *map(repr, simulator.failures)]


if __name__ == "__main__":
    assert __doc__ is not None
    run_numbered(
        __doc__.splitlines()[0],
        lambda number: faults_of(run_of(number)),
        lambda number: asdict(run_of(number)),
    )
