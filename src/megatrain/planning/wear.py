"""Wear: what a tier on disk writes, and how long a drive lasts that way.

A step writes each byte of the tier once. Drives are rated for so many terabytes written: consumer
drives of 1 and 2 TB for 600 and 1,200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatrain.planning.prediction import format_range, predicted_time, speed_range
from megatrain.text import size

RATED_TB = (600, 1200)
_DAY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wear:
    """The writes of a tier."""

    step_bytes: int
    step_s: float | None
    """None: the time of a step is not known."""

    @property
    def day_bytes(self) -> float | None:
        """Written in a day of steps, one after another."""
        return None if self.step_s is None else self.step_bytes / self.step_s * _DAY_S

    def facts(self) -> dict[str, Any]:
        """Return the figures by name."""
        return {"step_bytes": self.step_bytes, "day_bytes": self.day_bytes}

    def lines(self) -> list[str]:
        """Return them for people."""
        written = f"wear      a step writes {size(self.step_bytes)} to the disk"
        if self.day_bytes is None:
            return [written]
        first, second = (
            predicted_time(rated * 1e12 / self.day_bytes * _DAY_S) for rated in RATED_TB
        )
        daily = format_range(speed_range(self.day_bytes / 1e12), "{:,.3g}".format)
        return [
            f"{written}, {daily} TB a day, predicted",
            f"          a drive rated for {RATED_TB[0]:,} TB lasts {first}, "
            f"for {RATED_TB[1]:,} TB {second}",
        ]
