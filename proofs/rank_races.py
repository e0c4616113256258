"""No race among ranks: lanes on simulated accelerators, one for each, against ranks on the CPU.

    python -m proofs.rank_races [--json] [--count 500] [--first 0] [--seconds 36000]

A case is a function of its number: 2 or 4 ranks of a tiny model of one of four families, precision,
update policy, states, places of tape, weights and gradients, one to five micro-batches (so that
some ranks have none), perhaps evaluations, size of the exchange's buffers, registered or staged
copies, and when each device does what it was given. Bits must be those of the ranks on the CPU,
which tests/engine/test_rank_exactness.py holds against plain PyTorch; on no rank may two streams or
threads touch a byte unordered.
`--first NUMBER --count 1` plays a case again.
"""

from __future__ import annotations

import random
import traceback
import warnings
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.engine import exchange
from megatrain.ranks.ranks import Ranks
from proofs.numbered import run as run_numbered
from testkit.rank_training import Found, RankCase, differing, joined, ranks_of, trained_by
from testkit.simulated.accelerator import Policy, Simulator
from testkit.simulated.ranks import Several
from testkit.simulated.watched import WatchedOptimizer

TINY = (
    ("num_hidden_layers", 2), ("hidden_size", 32), ("intermediate_size", 32), ("vocab_size", 304),
    ("num_attention_heads", 2), ("num_key_value_heads", 2),
)  # fmt: skip
FAMILIES = ("llama", "gemma2", "mixtral", "qwen3")
SHAPES = ((1, 9), (2, 8), (1, 12), (1, 8), (1, 10))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """A case, and how the accelerators play it."""

    case: RankCase
    policies: tuple[Policy, ...]
    """By rank."""
    seed: int
    staged: bool = False
    exchange_bytes: int = 1 << 20


def run_of(number: int) -> RankRun:
    """Return a run at random, the same for the same number."""
    draw = random.Random(number)
    size = draw.choice([2, 2, 4])
    family = FAMILIES[number % len(FAMILIES)]
    policies: list[Policy] = ["late", "random", "random", "early"]
    case = RankCase(
        family=family,
        size=size,
        shapes=SHAPES[: draw.randint(1, 5 if size == 4 else 3)],
        form=draw.choice(["plain", "padded", "packed"]),
        update=draw.choice(["late", "in_backward"]),
        state=draw.choice(["fp32", "fp32", "bf16", "8bit"]),
        dtype=draw.choice(["bf16", "fp32"]),
        num_steps=2,
        evaluates=draw.random() < 0.2,
        config=TINY,
        settings=(
            ("slots", draw.choice([2, 3])),
            ("grad_slots", draw.choice([1, 2])),
            ("tape", draw.choice(["device", "host"])),
            ("router_aux_loss", 0.1 if family == "mixtral" else 0.0),
            ("kept_layers", number % 3),
        ),
    )
    return RankRun(
        case=case,
        policies=tuple(draw.choice(policies) for _ in range(size)),
        seed=number,
        staged=draw.random() < 0.15,
        exchange_bytes=draw.choice([1 << 20, 4096]),
    )


def play(run: RankRun, deadline_s: float = 120.0) -> tuple[list[Found], list[Simulator]]:
    """Return what each rank found on its simulated accelerator, and those."""
    several, model = Several(), run.case.model()
    simulators = [
        Simulator(run.seed + rank, policy, registers=not run.staged, meet_s=deadline_s)
        for rank, policy in enumerate(run.policies)
    ]

    def work(ranks: Ranks, simulator: Simulator) -> Found:
        device = AcceleratorDevice(simulator, piece_bytes=4096, ring_buffer_bytes=1000)
        optimizer = WatchedOptimizer(run.case.optimizer(), simulator)
        parts: dict[str, Any] = {"device": device, "optimizer": optimizer}
        return trained_by(ranks, run.case, model, deadline_s=deadline_s, **parts)

    with several.watched(), warnings.catch_warnings(), _exchanging(run):
        warnings.filterwarnings("ignore", "host memory:")
        return several.run(run.case.size, simulators.__getitem__, work), simulators


def _exchanging(run: RankRun) -> Any:
    return mock.patch.object(exchange, "EXCHANGE_BYTES", run.exchange_bytes)


def faults_of(run: RankRun) -> list[str]:
    """Return what is wrong in a run: differences, races, what was raised."""
    try:
        expected = ranks_of(run.case)
        found, simulators = play(run)
    except Exception:
        return [traceback.format_exc()]
    faults = [f"rank {r}" for r, one in enumerate(found) if one.results != expected[0].results]
    faults += [f"eval {r}" for r, one in enumerate(found) if one.evaluated != expected[0].evaluated]
    faults += differing(joined(found), joined(expected))
    for rank, simulator in enumerate(simulators):
        faults += [f"rank {rank}: {race}" for race in simulator.races]
        faults += [f"rank {rank}: {failure!r}" for failure in simulator.failures]
    return faults


if __name__ == "__main__":
    assert __doc__ is not None
    run_numbered(
        __doc__.splitlines()[0],
        lambda number: faults_of(run_of(number)),
        lambda number: asdict(run_of(number)),
    )
