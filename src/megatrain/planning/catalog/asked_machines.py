"""The machine that a person means by `--gpu`: a known card, one of so much memory, or none.

Laws (tests/planning/catalog/test_asked_machines.py)
    1. `--gpu` takes a name as people write it, or a size; `none` and Apple mean the CPU.
    2. A name that is not known is answered by its memory: the refusal has the command.
"""

from __future__ import annotations

import difflib
import re

from megatrain.config.quantities import read_memory
from megatrain.errors import ConfigError
from megatrain.planning.catalog.reference_machines import GIB, MACHINES, ReferenceMachine

_SIZE = re.compile(r"\d+(\.\d+)? ?[gt]i?b", re.I)
_APPLE = re.compile(r"(apple)?m[1-9](pro|max|ultra)?|apple.*|mac(book|mini|studio|pro).*|mps")


def find_machine(text: str) -> tuple[ReferenceMachine, int | None]:
    """Return the machine that `--gpu` means, and its device memory if a size was given.

    A size means the slowest desktop card that has it, so that the answer holds for any; cards
    without units for bf16 are slower still, and have to be named. Raises ConfigError.
    """
    if _SIZE.fullmatch(text.strip()):
        size = read_memory(text)
        return _slowest_with(size), size
    plain = _plain(text)
    if is_apple(text):
        plain = "cpu"
    for machine in MACHINES:
        if plain in {_plain(machine.name), *machine.aliases, *_with_size(machine)}:
            return machine, None
    near = [machine.name for machine in MACHINES if plain and plain in _plain(machine.name)]
    if len(near) > 1:
        raise ConfigError(f"--gpu {text[:60]}: could be {' or '.join(near)}. Give one of them")
    raise ConfigError(_unknown(text, plain))


def is_apple(text: str) -> bool:
    """Return whether the name is that of a Mac, which MegaTrain uses as a CPU."""
    return _APPLE.fullmatch(_plain(text)) is not None


def _with_size(machine: ReferenceMachine) -> list[str]:
    """Return names of the machine with the memory it has: RTX 4090 24GB."""
    ending = f"{machine.memory_gib}gb"
    return [name + ending for name in (_plain(machine.name), *machine.aliases)]


def _unknown(text: str, plain: str) -> str:
    sizes = [found[0] for found in _SIZE.finditer(text)]
    own = f"its memory alone, --gpu {sizes[-1].replace(' ', '')}" if sizes else ""
    names = {_plain(machine.name): machine.name for machine in MACHINES}
    near = difflib.get_close_matches(plain[:40], names, n=3, cutoff=0.75)
    meant = f" Did you mean {' or '.join(names[each] for each in near)}?" if near else ""
    return (
        f"--gpu {text[:60]}: unknown.{meant} Give {own or 'the memory of its card, like --gpu 8GB'}"
        ": the slowest known desktop card of that size is meant. `megatrain estimate --list` has "
        f"the {len(MACHINES)} machines with names; without a GPU, give --gpu none"
    )


def _slowest_with(num_bytes: int) -> ReferenceMachine:
    """Return the slowest desktop card with so much memory; the largest card if none has."""
    cards = [each for each in MACHINES if each.bf16 and not each.integrated]
    enough = [card for card in cards if card.memory_gib * GIB >= num_bytes]
    if not enough:
        return max(cards, key=lambda card: card.memory_gib)
    desktop = [card for card in enough if card.host.endswith("desktop")]
    least = min(card.memory_gib for card in desktop or enough)
    same = [card for card in desktop or enough if card.memory_gib == least]
    return min(same, key=lambda card: card.sustained)


def _plain(text: str) -> str:
    stripped = re.sub(r"[^a-z0-9]", "", text.lower()).replace("mobile", "laptop")
    stripped = stripped.removesuffix("gpu") or stripped
    return re.sub(r"^(nvidia|amd|geforce|instinct|tesla|gtx|rtx(?=\d))+", "", stripped)
