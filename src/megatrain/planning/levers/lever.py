"""A lever: one setting of a step that a plan chooses, and all that planning knows about it.

Its module has the values it may take, its part of memory and time as functions of the workload, the
reason for a value in words, and whether a resumed run must keep it. Search, reasons, fixes, resume
and retry walk `LEVERS` (levers/__init__.py) and know none by name; ledger and costs call a lever's
functions. So a lever is this one file, a field of StepSettings, a key of the config if a user may
set it, and the code of the engine that does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.config import Config
    from megatrain.planning.fixes import Fix
    from megatrain.planning.machine.profile import MachineProfile
    from megatrain.planning.model.shapes import ModelShape
    from megatrain.planning.search import Candidate, Search
    from megatrain.planning.workload import Workload

MOST_TOKENS = 1 << 40
"""The most tokens that a checkpoint may claim for a setting."""


class Lever:
    """A setting without choices; subclasses say what differs."""

    name: ClassVar[str]
    """The field of StepSettings."""
    key: ClassVar[str] = ""
    """The key of the config; empty: the plan alone sets it."""
    is_kept: ClassVar[bool] = False
    """The bits of a run depend on it: a resumed run keeps its value."""
    changes_forward: ClassVar[bool] = False
    """The last bits of a forward pass depend on it."""
    is_tried: ClassVar[bool] = False
    """The search tries each of its values, with the best of all others."""
    turns: ClassVar[tuple[int, int, int] | None] = None
    """Places in the three orders in which settings get memory; None: not by turns."""
    frugal_turn: ClassVar[int] = 0
    """Its place among those by whose `given_up` equally fast settings are chosen; 0: none."""
    headroom: ClassVar[Mapping[str, float]] = {}
    """Shares to keep free beside lines of the ledger, by their purpose."""
    fix_cost: ClassVar[float] = 0.0
    """Cost of `fix` (planning/fixes.py); 0: there is none."""
    fills_gap: ClassVar[bool] = False
    """Its fix gives up as much as is missing, and so comes after those of fixed size."""

    def applies(self, search: Search) -> bool:
        """Return whether a plan names it: on this machine it may differ."""
        return True

    def check(self, config: Config, model: ModelShape) -> None:
        """Raise ConfigError if the config wants of it what the model cannot have."""

    def why_not_compiled(self, config: Config) -> str:
        """Return why its value in the config forbids compiled layers; empty: it does not."""
        return ""

    def choices(self, search: Search) -> Sequence[Any]:
        """Return its values, from the best for speed to what needs least memory."""
        return [getattr(search.settings, self.name)]

    def allowed(self, search: Search) -> Sequence[Any]:
        """Return its own value if the user has set it, else its choices."""
        if self.name in search.pins:
            return [getattr(search.settings, self.name)]
        return self.choices(search)

    def least(self, search: Search) -> Sequence[Any]:
        """Return the values among which one needs least memory, whatever else is chosen."""
        return self.allowed(search)[-1:]

    def around(self, search: Search, settings: StepSettings) -> Iterator[StepSettings]:
        """Yield other values to try around the fastest settings."""
        yield from ()

    def seconds(self, search: Search, settings: StepSettings) -> float | None:
        """Return the time of a step that few layers do not show; None: they do."""
        return None

    def settled(self, search: Search, best: Candidate) -> Candidate:
        """Return the best with a value that needs less and takes no longer, if there is one."""
        return best

    def filled(self, search: Search, best: Candidate) -> Candidate:
        """Return the best with a value that makes use of the memory that is left."""
        return best

    def given_up(self, settings: StepSettings) -> int:
        """Return how much it gives up: of equally fast settings the least is taken."""
        return 0

    def is_costly(self, settings: StepSettings) -> bool:
        """Return whether its value costs something that is not time: people are told."""
        return False

    def unused_text(self, profile: MachineProfile, settings: StepSettings) -> str | None:
        """Return what a plan says in place of its reason; empty: nothing, None: the reason."""
        return None

    def reason(self, search: Search, settings: StepSettings) -> str:
        """Return why it has the value that it has in `settings`."""
        raise NotImplementedError

    def fix(self, start: Fix) -> Fix | None:
        """Return the change of this lever that may make a workload fit; None: it gives nothing."""
        return None

    def given(self, config: Config) -> Any:
        """Return the value of the config; `auto` leaves it to the plan."""
        section, _, name = self.key.partition(".")
        return getattr(getattr(config, section), name) if self.key else "auto"

    def read(self, training: Mapping[str, Any]) -> Any:
        """Return its value in the state of a checkpoint, which is untrusted input."""
        raise NotImplementedError

    def smaller(self, workload: Workload, settings: StepSettings) -> tuple[Any, str, str] | None:
        """Return a value for a first step that did not fit the device, if it has one.

        With it come the name of the event, and a sentence for the user.
        """
        return None


def as_tokens(value: Any, most: int = MOST_TOKENS) -> int:
    """Return an untrusted count of 1 to `most`. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{str(value)[:40]!r} is not a count")
    if not 1 <= value <= most:
        raise ValueError(f"{value} is not from 1 to {most}")
    return value


def as_optional_tokens(value: Any) -> int | None:
    """Return an untrusted count, or None as it is."""
    return None if value is None else as_tokens(value)
