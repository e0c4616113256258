"""The process of one part: finds the device, measures, and writes the result."""

from __future__ import annotations

import faulthandler
import importlib
import json
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatrain.doctor.gpu_check.long.given import Given
from megatrain.doctor.gpu_check.long.parts import Part
from megatrain.doctor.gpu_check.long.results import CannotRun, PartState, ResultFolder
from megatrain.doctor.gpu_check.long.running import new_result
from megatrain.doctor.subject import find_subject
from megatrain.errors import MegaTrainError
from megatrain.planning.machine.profile import MachineProfile
from megatrain.progress import Say


def do_part(
    part: Part,
    seconds: float,
    device: str,
    folder: ResultFolder,
    machine: str,
    command: tuple[str, ...],
    say: Say,
) -> int:
    """Do one part and write its result; return the exit code. Raises NoDevice."""
    faulthandler.enable()
    begin = time.monotonic()

    def write(state: PartState, why: str, found: Mapping[str, Any]) -> None:
        result = new_result(part, machine, state, why)
        folder.write(replace(result, seconds=time.monotonic() - begin, found=dict(found)))

    kept: dict[str, Any] = {}

    def keep(found: Mapping[str, Any]) -> None:
        kept.clear()
        kept.update(found)
        write("unfinished", "", found)

    subject = find_subject(device, needed=True)
    with tempfile.TemporaryDirectory(dir=folder.path, prefix=".scratch-") as scratch:
        given = Given(
            subject=subject,
            known=known_rates(folder, machine),
            until=begin + seconds,
            say=say,
            keep=keep,
            attach=folder.attach,
            command=command,
            scratch=Path(scratch),
        )
        try:
            found = importlib.import_module(part.module).measure(given)
        except CannotRun as error:
            write("left out", str(error), kept)
            return 0
        except Exception as error:
            traceback.print_exc()
            write("failed", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", kept)
            return error.exit_code if isinstance(error, MegaTrainError) else 1
    write("done", "", found)
    return 0


def known_rates(folder: ResultFolder, machine: str) -> MachineProfile | None:
    """Return the rates that the first part has measured on this machine."""
    result = folder.read("check", machine)
    facts = {} if result is None else result.found.get("check", {}).get("profile")
    return MachineProfile.from_json(json.dumps(facts)) if facts else None
