"""Overlap never changes a result: the engine on lanes against the one-op-at-a-time reference.

    python -m proofs.interleavings [--json] [--count 10000] [--first 0] [--seconds 36000]

A case is a function of its number: a tiny model, places (slots of weights and of gradients, tape,
ring, views or copies, what is on disk), an update policy, three steps of unequal micro-batches,
perhaps an evaluation, and how each lane dawdles. It is played on lanes, and by the reference with
all in memory, from the same weights. Every loss and norm, and every byte of the store must be
equal: gradients after each step, or weights, remainders and moments at the end. A case that differs
or fails is told by its number: `--first NUMBER --count 1` plays it again,
with the same delays (though not the same timing of the machine).
"""

from __future__ import annotations

import random
import traceback
from dataclasses import asdict, replace

from proofs.numbered import run as run_numbered
from testkit.worlds import SORTS, Case, Shapes, world_of


def case_of(number: int) -> Case:
    """Return a case at random, the same for the same number."""
    source = random.Random(number)

    def shapes() -> Shapes:
        return tuple(
            (source.randint(1, 2), source.randint(3, 8)) for _ in range(source.randint(1, 4))
        )

    sort = source.choice(list(SORTS))
    return Case(
        sort=sort,
        steps=tuple(shapes() for _ in range(3)),
        update=source.choice(["none", "in_backward", "late"]),
        slots=source.randint(2, 4),
        tape=source.choice(["device", "host"]),
        tape_slots=source.randint(2, 4),
        copying=source.random() < 0.75,
        evaluates_after=tuple(n for n in range(3) if source.random() < 0.15),
        timing=number,
        tier=source.choice(["none", "states"]),
        grad_slots=source.randint(1, 2),
        kept_layers=source.randint(0, 2),
    )


def faults_of(number: int) -> list[str]:
    """Return what differs between lanes and reference in a case; what was raised, if anything."""
    case = case_of(number)
    world = world_of(case.sort)
    try:
        simple = replace(case, tier="none", grad_slots=2, kept_layers=0)
        plain = world.play(simple, reference=True)
        return world.play(case).differences(plain)
    except Exception:
        return [traceback.format_exc()]


if __name__ == "__main__":
    assert __doc__ is not None
    run_numbered(__doc__.splitlines()[0], faults_of, lambda number: asdict(case_of(number)))
