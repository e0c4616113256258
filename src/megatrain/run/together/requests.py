"""Requests to a run, made of any rank and heard by all: to end, and to save.

What each rank was asked goes along with the result of a step (`Engine.step`), or is agreed on where
there was none. All ranks then act on the same words, so that none ever goes another way.

Laws (tests/run/together/test_requests.py)
    1. One rank's reason to end is that of all, and so is rank 0's wish to save.
    2. Between two hearings no rank of several changes its mind, whatever signals arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatrain.ranks.ranks import Ranks, Said
from megatrain.run.interrupts import Interrupts


class Requests:
    """What the ranks of a run were asked to do."""

    def __init__(
        self,
        ranks: Ranks,
        interrupts: Interrupts,
        wants_save: Callable[[], bool],
        has_stalled: Callable[[], bool],
    ) -> None:
        """`wants_save` tells, on rank 0, whether the state should be saved now.

        `has_stalled` tells, on each rank, whether its storage does not answer.
        """
        self._ranks, self._interrupts, self._wants_save = ranks, interrupts, wants_save
        self._has_stalled = has_stalled
        self.storage_stalled = False
        """Whether storage did not answer on some rank, when the ranks last told each other."""
        self.stop: str | None = None
        """Why the run should end; None while it should not."""
        self._save = False

    def says(self) -> Said:
        """Return what this rank was asked, for the others."""
        owner = self._ranks.owner
        save = owner.leads and not owner.is_alone and self._wants_save()
        return {
            "stop": self._interrupts.reason,
            "save": save,
            "stalled": self._has_stalled(),
        }

    def hear(self, said: Sequence[Said]) -> None:
        """Take up what all ranks were asked."""
        reasons = [(rank, one["stop"]) for rank, one in enumerate(said) if one["stop"] is not None]
        if reasons:
            rank, reason = reasons[0]
            self.stop = f"rank {rank}: {reason}" if rank else str(reason)
        self._save = self._save or bool(said[0]["save"])
        self.storage_stalled = any(one["stalled"] for one in said)

    def save(self) -> bool:
        """Return whether to save now; a process alone finds out when it is asked."""
        if self._ranks.owner.is_alone:
            return self._wants_save()
        saves, self._save = self._save, False
        return saves

    def ask(self) -> None:
        """Ask all ranks now."""
        self.hear(self._ranks.agree(self.says()))
