"""The closed list of errors a user can meet.

Every failure that is not a bug of ours is one of these. Each has a `code` that documentation and
scripts may rely on, and the `exit_code` the command line ends with:

    1 bug   2 user's config   3 does not fit   4 model folder or data   5 environment
    130 interrupted

A message says what, where, the numbers, and the cheapest way out.
"""

from __future__ import annotations

from collections.abc import Iterable


class MegaTrainError(Exception):
    """Base of every error below; never raised itself."""

    code = "MT000"
    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class ScheduleError(MegaTrainError):
    """A schedule, or the shape asked for, breaks a law. The code is wrong, not the data."""

    code = "MT101"


class LaneStuck(MegaTrainError):
    """No lane moved for the whole deadline. The process cannot go on: its thread may never end."""

    code = "MT102"


class PlayerStopped(MegaTrainError):
    """Work was given to a player that has failed or was closed."""

    code = "MT103"


class SnapshotLost(MegaTrainError):
    """Training failed while its state was being saved; that save is given up."""

    code = "MT104"


class ConfigError(MegaTrainError):
    """A setting that cannot be meant: out of range, or at odds with another."""

    code = "MT201"
    exit_code = 2


class DoesNotFit(MegaTrainError):
    """The ledger is larger than the memory that is free, or the system refused the memory."""

    code = "MT301"
    exit_code = 3


class DeviceFull(MegaTrainError):
    """The device has less memory than the plan needs there."""

    code = "MT302"
    exit_code = 3


class ModelFolderError(MegaTrainError):
    """A model folder lacks a file, or one of its names points where it may not."""

    code = "MT401"
    exit_code = 4


class ModelConfigError(MegaTrainError):
    """A `config.json` is malformed, asks for something we refuse, or has absurd values."""

    code = "MT402"
    exit_code = 4


class NotSplittable(MegaTrainError):
    """A model cannot be cut into embedding, decoder layers and head; the text says why."""

    code = "MT403"
    exit_code = 4


class WeightsFormatError(MegaTrainError):
    """A safetensors file or its index breaks the format."""

    code = "MT404"
    exit_code = 4


class WeightsMismatch(MegaTrainError):
    """The tensors in a folder are not the tensors of its model."""

    code = "MT405"
    exit_code = 4


class BatchError(MegaTrainError):
    """A batch that cannot be trained on: no targets, wrong shapes, unknown tokens."""

    code = "MT406"
    exit_code = 4


class NonFiniteStep(MegaTrainError):
    """A step's gradient is not finite; nothing that is not finite was applied."""

    code = "MT407"
    exit_code = 4


class DataError(MegaTrainError):
    """Training data, or the chat template it passes through, that cannot be trained on as it is."""

    code = "MT408"
    exit_code = 4


class CheckpointDamaged(MegaTrainError):
    """A checkpoint that is not whole: a file is missing, cut, changed, or of another save."""

    code = "MT409"
    exit_code = 4


class CheckpointMismatch(MegaTrainError):
    """A whole checkpoint that this run cannot go on from: another model, data or version."""

    code = "MT410"
    exit_code = 4


class DiskError(MegaTrainError):
    """The system failed to read or write a file."""

    code = "MT501"
    exit_code = 5


class DiskFull(DiskError):
    """The disk has no room for what must be written, or a quota is used up."""

    code = "MT503"


class RunFolderError(MegaTrainError):
    """A run folder that cannot be used: another run is in it, or it is none."""

    code = "MT502"
    exit_code = 5


class MissingPackage(MegaTrainError):
    """A setting asks for an optional package that is not installed; the text names it."""

    code = "MT505"
    exit_code = 5


class NoDevice(MegaTrainError):
    """The accelerator that was asked for is not on this machine, or torch cannot use it."""

    code = "MT506"
    exit_code = 5


class HubError(MegaTrainError):
    """The Hugging Face Hub cannot be reached, or does not have or give what was asked for."""

    code = "MT507"
    exit_code = 5


class Interrupted(MegaTrainError):
    """A signal, or too little memory, ended a run; what it says tells whether it was saved."""

    code = "MT130"
    exit_code = 130


def printable(text: str) -> str:
    """Return `text` with control characters spelled out.

    A message may quote names from a foreign folder, and those must not steer a terminal.
    """
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text
    )


def listing(names: Iterable[str], most: int = 8) -> str:
    """Return names for a message: the first `most`, and how many more there are."""
    names = sorted(names)
    shown = ", ".join(name if len(name) <= 200 else f"{name[:200]}..." for name in names[:most])
    return shown if len(names) <= most else f"{shown}, and {len(names) - most} more"
