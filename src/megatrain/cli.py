"""The verbs: parse, call one function, print. Heavy imports happen inside a verb, never here."""

from __future__ import annotations

from typing import Annotated

import typer

from megatrain.version import __version__

app = typer.Typer(
    name="megatrain",
    help="Train Hugging Face language models larger than GPU memory, at full precision.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: importing rich would take half of the time
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"megatrain {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Train Hugging Face language models larger than GPU memory, at full precision."""
