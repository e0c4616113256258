"""Groups of params with a learning rate or a decay of their own, by patterns of names.

A group's rate is a factor on the learning rate of the run, so it follows the same schedule. LoRA+
is such a group: the halves of adapters that begin at zero, `*lora_B*`, sixteen times as fast.

Laws (tests/optim/test_groups.py)
    1. Params of a group are updated as by an optimizer with its rate and decay; others as without.
    2. A pattern without a trained param, and a param in two groups, are refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatrain.errors import ConfigError
from megatrain.models.decoder import Param
from megatrain.models.patterns import check_patterns, matches

SETTING = "optim.groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroup:
    """Params that are updated in a way of their own."""

    params: tuple[str, ...]
    """Name patterns."""
    lr_ratio: float = 1.0
    """Factor on the learning rate."""
    weight_decay: float | None = None
    """In place of the optimizer's, for all of its params; None: as without the group."""


def grouped(groups: Sequence[ParamGroup], params: Collection[Param]) -> dict[str, ParamGroup]:
    """Return the group of each trained param that is in one, by name. Raises ConfigError."""
    trained = [param for param in params if param.trained]
    names = {param.name: param.aliases for param in trained}
    found: dict[str, ParamGroup] = {}
    for group in groups:
        check_patterns(SETTING, group.params, names, "trained parameter")
        for name in names:
            if not matches(name, group.params):
                continue
            if name in found:
                both = " and ".join(", ".join(one.params) for one in (found[name], group))
                raise ConfigError(
                    f"{SETTING}: {name} is in two groups, {both}. Give each parameter one group."
                )
            found[name] = group
    return found
