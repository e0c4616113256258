"""Time to safety: what SIGTERM costs a run, known before it starts.

    leave the step    the op that computes, and the late updates of the step before
    save              the bytes of a checkpoint at the rate of the disk
    send              those bytes at the rate of the bucket, measured by one chunk

If that fits the notice, a run loses the step that was interrupted. Else it loses what came after
the last durable checkpoint, which `save.every` bounds. Whatever is lost is computed again, in the
same bits.

Laws (tests/run/test_safety.py, tests/run/test_notice.py)
    1. No run that is resumed has lost more steps than `lost_steps` said.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.config import Config
from megatrain.config.quantities import read_seconds, write_seconds
from megatrain.planning.plan import Plan
from megatrain.text import counted, size

LAST_SHARE = 0.1
"""Share of a notice that is left for what nobody foresees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Safety:
    """The way from SIGTERM to a checkpoint that outlives the machine."""

    notice_s: float
    every: int | str | None
    """Steps or time between checkpoints."""
    step_s: float | None
    """Predicted time of a step; None: the machine was not measured."""
    leave_s: float | None
    """Time until a step is left; None: it cannot be left, or the machine was not measured."""
    can_leave: bool
    """Whether a step can be left anywhere, with the state of the one before."""
    num_bytes: int
    """Bytes of a checkpoint."""
    disk_bytes_per_s: float
    bucket: str | None
    bucket_bytes_per_s: float | None

    @property
    def save_s(self) -> float:
        return self.num_bytes / self.disk_bytes_per_s

    @property
    def send_s(self) -> float:
        rate = self.bucket_bytes_per_s
        return 0.0 if rate is None else self.num_bytes / rate

    @property
    def needs_s(self) -> float:
        """Time from SIGTERM until the state is safe."""
        return (self.leave_s or 0.0) + self.save_s + self.send_s

    @property
    def fits(self) -> bool:
        return self.can_leave and self.needs_s <= (1 - LAST_SHARE) * self.notice_s

    @property
    def lost_steps(self) -> int | None:
        """Most complete steps that SIGTERM may lose; None: all since the last save by time."""
        if self.fits:
            return 0
        return self.every if isinstance(self.every, int) else None

    def in_words(self) -> str:
        parts = [] if self.leave_s is None else [f"leaving a step up to {self.leave_s:.1f} s"]
        parts.append(f"a checkpoint of {size(self.num_bytes)} {self.save_s:.1f} s")
        if self.bucket is not None:
            parts.append(f"its upload {self.send_s:.1f} s")
        text = f"notice {write_seconds(self.notice_s)}: {', '.join(parts)}"
        if self.fits:
            step = "" if self.step_s is None else f", {self.step_s:.1f} s of work"
            return f"{text}: SIGTERM loses the step that it interrupts{step}, and no other"
        why = (
            f"{self.needs_s:.0f} s do not fit"
            if self.can_leave
            else "a step whose updates have begun cannot be left (several ranks, or "
            "train.max_grad_norm null)"
        )
        return f"{text}: {why}. SIGTERM may lose {self._in_between()}; the resume computes it again"

    def _in_between(self) -> str:
        behind_s = self.save_s + self.send_s
        if self.every is None:
            return "all steps, because save.every is null"
        if isinstance(self.every, int):
            steps = counted(self.every, "step")
            return f"the last {steps} and those of the {behind_s:.0f} s of a save"
        return f"the work of {write_seconds(read_seconds(self.every))} and {behind_s:.0f} s"


def safety_of(
    config: Config, plan: Plan, num_bytes: int, bucket_bytes_per_s: float | None, *, is_alone: bool
) -> Safety | None:
    """Return the time to safety of a run; None without a notice."""
    if config.save.notice is None:
        return None
    leave_s = None
    if plan.knows_time:
        ops = plan.simulation.ops
        longest = max((one.end_s - one.start_s for one in ops), default=0.0)
        leave_s = longest + plan.simulation.busy_s.get("host", 0.0)
    return Safety(
        notice_s=config.save.notice,
        every=config.save.every,
        step_s=plan.step_s if plan.knows_time else None,
        leave_s=leave_s,
        can_leave=is_alone and plan.settings.update == "late",
        num_bytes=num_bytes,
        disk_bytes_per_s=plan.profile.disk_write_bytes_per_s,
        bucket=config.bucket,
        bucket_bytes_per_s=bucket_bytes_per_s,
    )
