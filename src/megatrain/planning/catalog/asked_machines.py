"""The machine that a person means by `--gpu`: a known card, or one of so much memory.

Law (tests/planning/catalog/test_asked_machines.py): `--gpu` takes a name as people write it, or
a size.
"""

from __future__ import annotations

import re

from megatrain.config.quantities import read_bytes
from megatrain.errors import ConfigError
from megatrain.planning.catalog.reference_machines import GIB, MACHINES, ReferenceMachine

_SIZE = re.compile(r"\d+(\.\d+)? ?[gt]i?b", re.I)


def find_machine(text: str) -> tuple[ReferenceMachine, int | None]:
    """Return the machine that `--gpu` means, and its device memory if a size was given.

    A size means the slowest card that has it, so that the answer holds for any. Raises ConfigError.
    """
    if _SIZE.fullmatch(text.strip()):
        size = read_bytes(text)
        return _slowest_with(size), size
    plain = _plain(text)
    for machine in MACHINES:
        if plain in {_plain(machine.name), *machine.aliases}:
            return machine, None
    near = [machine.name for machine in MACHINES if plain and plain in _plain(machine.name)]
    if len(near) > 1:
        raise ConfigError(f"--gpu {text[:60]}: could be {' or '.join(near)}. Give one of them")
    names = ", ".join(machine.name for machine in MACHINES)
    raise ConfigError(
        f"--gpu {text[:60]}: unknown. Give the memory of its card, like 8GB: the slowest known "
        f"card of that size is meant. Or give one of: {names}"
    )


def _slowest_with(num_bytes: int) -> ReferenceMachine:
    """Return the slowest card with so much memory; the largest one if none has."""
    cards = [machine for machine in MACHINES if not machine.integrated]
    enough = [card for card in cards if card.memory_gib * GIB >= num_bytes]
    least = min((card.memory_gib for card in enough), default=None)
    if least is None:
        return max(cards, key=lambda card: card.memory_gib)
    return min((c for c in enough if c.memory_gib == least), key=lambda card: card.sustained)


def _plain(text: str) -> str:
    stripped = re.sub(r"[^a-z0-9]", "", text.lower())
    return re.sub(r"^(nvidia|amd|geforce|instinct|rtx(?=\d))+", "", stripped)
