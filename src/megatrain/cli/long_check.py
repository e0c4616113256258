"""`megatrain gpu-check --long`: parts, pages and the archive, put together.

The same command, in a process that running.py has started, does one part alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from megatrain.doctor.gpu_check.long.parts import PARTS
from megatrain.doctor.gpu_check.long.results import ResultFolder
from megatrain.doctor.gpu_check.long.running import (
    LongRun,
    command_of,
    machine_key,
    part_asked_for,
)
from megatrain.errors import DiskError
from megatrain.files import require_replaceable
from megatrain.report.check_page import check_page
from megatrain.report.long_page import LONG_SIGNS, long_page

VERB = "gpu-check"


def long_check(device: str, to: Path) -> int:
    """Check a device at length, or do the part that the environment names; return the exit code."""
    folder, machine, command = ResultFolder(to), machine_key(device), command_of(VERB)
    if (asked := part_asked_for(os.environ)) is not None:
        from megatrain.doctor.gpu_check.long.inside import do_part

        return do_part(*asked, device, folder, machine, command, say=typer.echo)
    require_replaceable(to / "index.html", LONG_SIGNS)
    run = LongRun(
        folder=folder,
        machine=machine,
        command=(*command, VERB, "--long", "--device", device, "--to", str(to)),
        say=lambda text: typer.echo(text, err=True),
        write_pages=lambda: write_pages(folder, machine, device),
    )
    try:
        results = run.run()
    except KeyboardInterrupt:
        run.pack()
        typer.echo(f"stopped: {folder.archive} has what was done; run again to go on", err=True)
        return 130
    for result in results:
        text = result.found.get("lead") or result.why
        typer.echo(f"{result.state:11}{result.name:14}{text}")
    typer.echo(f"send {folder.archive}")
    with suppress(DiskError):  # the archive has it all
        if keep_rates({result.name: result.found for result in results}):
            typer.echo("kept: plans on this machine use these rates")
    checked = results[0].found.get("figures", {}).get("exit_code", 0)
    return int(checked) or int(any(result.state == "failed" for result in results))


def keep_rates(found: Mapping[str, Mapping[str, Any]]) -> bool:
    """Keep the rates for plans, products as a warm device sustains them; return whether it is."""
    if not (check := found["check"].get("check")):
        return False
    from megatrain.doctor.examine import keep_checked

    clocks = found["clocks"].get("figures", {})
    first, sustained = (clocks.get(name, 1.0) for name in ("first_flops", "sustained_flops"))
    return keep_checked(check, min(1.0, sustained / first))


def write_pages(folder: ResultFolder, machine: str, device: str) -> None:
    """Write the pages of all results that are there."""
    results = {part.name: folder.read(part.name, machine) for part in PARTS}
    there = [asdict(result) for result in results.values() if result is not None]
    missing = [name for name, result in results.items() if result is None]
    first = results["check"]
    check = {} if first is None else first.found.get("check", {})
    name = str(check.get("facts", {}).get("device_name") or device)
    folder.attach("index.html", long_page(name, there, missing).encode())
    if check:
        folder.attach("check.html", check_page(json.dumps(check)).encode())
