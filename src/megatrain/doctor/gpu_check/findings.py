"""Results of a check, and how an error becomes one.

Law (tests/doctor/gpu_check/test_findings.py): no path, name of a user or of a host leaves a check.
"""

from __future__ import annotations

import getpass
import platform
import re
from dataclasses import dataclass
from typing import Literal

import torch

from megatrain.errors import LaneTimeout, MegaTrainError, NoDevice

_PATH = re.compile(r"(?<![\w.])(?:/[\w.+@~-]+){2,}/?")
_MOST_CHARACTERS = 400
_SPARES_DEVICE = ("called a synchronizing", "deterministic")
"""Texts of torch's errors after which a device works as before."""


class Broken(Exception):
    """A law is broken. Does not leave gpu_check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check and its result."""

    name: str
    state: Literal["ok", "slow", "wrong", "left out"]
    found: str
    """With figures, for people."""
    exit_code: int = 0
    """The exit code of a failed check, as in errors.py."""
    may_have_lost_device: bool = False
    """Checks after this one would tell nothing."""


def failed_check(name: str, error: Exception) -> Check:
    """Return the check that `error` ended."""
    kind = "" if isinstance(error, Broken) else f"{type(error).__name__}: "
    first = str(error).partition("\n")[0]
    is_known = isinstance(error, Broken | MegaTrainError | torch.OutOfMemoryError)
    is_known |= any(text in str(error) for text in _SPARES_DEVICE)
    return Check(
        name=name,
        state="wrong",
        found=anonymous(f"{kind}{first}"[:_MOST_CHARACTERS]),
        exit_code=error.exit_code if isinstance(error, MegaTrainError) else NoDevice.exit_code,
        may_have_lost_device=isinstance(error, LaneTimeout) or not is_known,
    )


def anonymous(text: str) -> str:
    """Return `text` without paths, and without the names of this user and host."""
    text = _PATH.sub("(path)", text)
    for name, instead in ((platform.node(), "(host)"), (_user(), "(user)")):
        if len(name) > 2:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", instead, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # no such user: a container with a number alone
        return ""
