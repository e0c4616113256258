"""Every error that a user can see.

Every failure that is not a bug in MegaTrain is one of these. Each has a `code` that documentation
and scripts may rely on, and the `exit_code` of the command line:

    1 bug   2 user's config   3 does not fit   4 model folder or data   5 environment
    6 another rank was lost   130 interrupted

A message states what happened, where, why with figures, and the cheapest way out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class MegaTrainError(Exception):
    """Base of every error below; never raised itself."""

    code = "MT000"
    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class ScheduleError(MegaTrainError):
    """A schedule or a step's shape breaks a law. The code is wrong, not the data."""

    code = "MT101"


class LaneTimeout(MegaTrainError):
    """No lane made progress until the deadline. The process must end: a thread may hang."""

    code = "MT102"


class PlayerStopped(MegaTrainError):
    """A player received work after it had failed or was closed."""

    code = "MT103"


class SnapshotLost(MegaTrainError):
    """Training failed while its state was being saved; the save was abandoned."""

    code = "MT104"


class StepAborted(MegaTrainError):
    """A step was left on request, before its end; nothing of it was applied."""

    code = "MT105"


class ConfigError(MegaTrainError):
    """A setting is invalid: out of range, or in conflict with another."""

    code = "MT201"
    exit_code = 2


class DoesNotFit(MegaTrainError):
    """The run needs more host memory than is free, or the system refused the memory."""

    code = "MT301"
    exit_code = 3


class OutOfDeviceMemory(MegaTrainError):
    """The run needs more device memory than the device has."""

    code = "MT302"
    exit_code = 3

    def __init__(self, text: str, snapshot: Any = None) -> None:
        super().__init__(text)
        self.snapshot = snapshot
        """Memory that the device's allocator held then, for torch's viewer; None: not known."""


class ModelFolderError(MegaTrainError):
    """A model folder lacks a file, or one of its names points outside the folder."""

    code = "MT401"
    exit_code = 4


class ModelConfigError(MegaTrainError):
    """A `config.json` is malformed, requests something unsupported, or has absurd values."""

    code = "MT402"
    exit_code = 4


class UnsupportedModel(MegaTrainError):
    """A model cannot be cut into embedding, decoder layers and head; the message says why."""

    code = "MT403"
    exit_code = 4


class WeightsFormatError(MegaTrainError):
    """A safetensors file or its index is malformed."""

    code = "MT404"
    exit_code = 4


class WeightsMismatch(MegaTrainError):
    """The tensors in a folder do not match its model."""

    code = "MT405"
    exit_code = 4


class BatchError(MegaTrainError):
    """A batch has no targets, wrong shapes or unknown tokens."""

    code = "MT406"
    exit_code = 4


class NonFiniteStep(MegaTrainError):
    """A step's gradient is not finite; no such value was applied to a weight."""

    code = "MT407"
    exit_code = 4


class DataError(MegaTrainError):
    """The training data or its chat template cannot be used."""

    code = "MT408"
    exit_code = 4


class CheckpointCorrupted(MegaTrainError):
    """A checkpoint is damaged: a file is missing, cut, changed, or from another save."""

    code = "MT409"
    exit_code = 4


class CheckpointMismatch(MegaTrainError):
    """This run cannot resume from a checkpoint: another model, data or version."""

    code = "MT410"
    exit_code = 4


class RewardError(MegaTrainError):
    """A reward function failed, or returned something other than finite numbers."""

    code = "MT411"
    exit_code = 4


class DiskError(MegaTrainError):
    """The system failed to read or write a file."""

    code = "MT501"
    exit_code = 5


class DiskFull(DiskError):
    """The disk is full, or a quota is used up."""

    code = "MT503"


class StorageTimeout(DiskError):
    """A file call did not return in time; the save that needed it was given up."""

    code = "MT504"


class RunFolderError(MegaTrainError):
    """The run folder belongs to another run, or is not a run folder."""

    code = "MT502"
    exit_code = 5


class MissingPackage(MegaTrainError):
    """A setting asks for an optional package that is not installed; the message names it."""

    code = "MT505"
    exit_code = 5


class NoDevice(MegaTrainError):
    """This machine does not have the requested accelerator, or torch cannot use it."""

    code = "MT506"
    exit_code = 5


class HubError(MegaTrainError):
    """The Hugging Face Hub is unreachable, or does not provide the requested files."""

    code = "MT507"
    exit_code = 5


class ScratchFileCorrupted(DiskError):
    """Bytes of the disk tier's scratch file changed on the disk; no checkpoint is affected."""

    code = "MT508"


class GeneratorError(MegaTrainError):
    """A server that answers prompts is unreachable, or sent something other than such answers."""

    code = "MT509"
    exit_code = 5


class StorageError(MegaTrainError):
    """A bucket or another place is unreachable, or refuses what was asked of it."""

    code = "MT510"
    exit_code = 5


class RunTaken(MegaTrainError):
    """Another process has taken over the run in a bucket; this one adds nothing to it any more."""

    code = "MT511"
    exit_code = 5


class ConverterError(MegaTrainError):
    """llama.cpp's converter does not know the model, or failed; the message has its last lines."""

    code = "MT512"
    exit_code = 5


class RankLost(MegaTrainError):
    """Another rank of the run died, failed, or was silent beyond the deadline."""

    code = "MT601"
    exit_code = 6


class Interrupted(MegaTrainError):
    """A signal or low memory ended the run; the message says whether it was saved."""

    code = "MT130"
    exit_code = 130


def printable(text: str) -> str:
    """Return `text` with control characters spelled out.

    A message may quote names from a untrusted folder, and those must not steer a terminal.
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


class Notice(UserWarning):
    """What the user should know about a config that is accepted; a command prints it as a line."""
