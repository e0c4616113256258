"""An error as a check that is wrong: its text, its cause by the table, its exit code."""

from __future__ import annotations

import torch

from megatrain.doctor.gpu_check.findings import Check, CheckGroup, anonymous
from megatrain.errors import (
    DeviceFull,
    DoesNotFit,
    LaneStuck,
    MegaTrainError,
    NoDevice,
    NonFiniteStep,
)

_MOST_CHARACTERS = 400
_LOSES_DEVICE = frozenset({"error", "stuck"})


class Broken(Exception):
    """A law is broken, for a cause by its key. Does not leave gpu_check."""

    def __init__(self, text: str, cause: str) -> None:
        super().__init__(text)
        self.cause = cause


def failed_check(group: CheckGroup, name: str, error: Exception) -> Check:
    """Return the check that `error` ended."""
    kind = "" if isinstance(error, Broken) else f"{type(error).__name__}: "
    first = str(error).partition("\n")[0]
    return Check(
        group=group,
        name=name,
        state="wrong",
        found=anonymous(f"{kind}{first}"[:_MOST_CHARACTERS]),
        causes=(cause_of(error),),
        exit_code=error.exit_code if isinstance(error, MegaTrainError) else NoDevice.exit_code,
    )


def cause_of(error: Exception) -> str:
    """Return the key of the cause of an error."""
    if isinstance(error, Broken):
        return error.cause
    if isinstance(error, NonFiniteStep):
        return "bits"
    if isinstance(error, DeviceFull | torch.OutOfMemoryError):
        return "memory"
    if isinstance(error, DoesNotFit):
        return "host memory"
    if isinstance(error, LaneStuck):
        return "stuck"
    if "called a synchronizing" in str(error):
        return "waits"
    return "kernels" if "deterministic" in str(error) else "error"


def may_have_lost_device(check: Check) -> bool:
    """Return whether checks after this one would tell nothing."""
    return bool(_LOSES_DEVICE & set(check.causes))
