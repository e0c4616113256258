"""The command `gpu-check`: check a device, write what is to be sent, and say what to try."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatrain.errors import ConfigError


def gpu_check(
    device: Annotated[str, typer.Option(help="auto, cuda, cuda:N, xpu or cpu.")] = "auto",
    params: Annotated[
        str | None, typer.Option(help="Parameters of the timed model, like 300M; default: 1B.")
    ] = None,
    to: Annotated[
        Path, typer.Option(help="Name of the files to write, without .json and .html.")
    ] = Path("gpu-check"),
) -> None:
    """Check an accelerator in a few minutes, and write a JSON file and a page to send."""
    from megatrain.config.quantities import read_params

    try:
        wanted = None if params is None else read_params(params)
    except ValueError as error:
        raise ConfigError(f"--params is {params}; {error}.") from None
    raise typer.Exit(_checked(device, wanted, to))


def _checked(device: str, params: int | None, to: Path) -> int:
    """Check a device and write both files; return the exit code."""
    from megatrain.doctor.gpu_check.check import DEFAULT_PARAMS, check_device
    from megatrain.files import require_replaceable, write_file
    from megatrain.report.check_page import PAGE_SIGNS, check_page

    figures, page = (to.with_name(f"{to.name}{suffix}") for suffix in (".json", ".html"))
    require_replaceable(page, PAGE_SIGNS)
    found = check_device(
        device,
        params or DEFAULT_PARAMS,
        lambda what: typer.echo(f"checking {what} ...", err=True),
    )
    text = found.to_json()
    write_file(figures, text.encode(), durable=False)
    write_file(page, check_page(text).encode(), durable=False)
    typer.echo(found.text())
    typer.echo(f"send {figures} and {page}")
    return found.exit_code
