"""Arguments that several commands have. Nothing heavy is imported here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ModelArgument = Annotated[
    Path, typer.Argument(help="Folder of a model, adapters, run or checkpoint, or Hub id.")
]
Best = Annotated[
    bool, typer.Option("--best", help="From a run, use the model with the lowest evaluation loss.")
]


def require_model(model: Path) -> None:
    """Raise an error for a name that does not exist here or on the Hub, before importing torch."""
    if not model.exists():
        from megatrain.hub import find_model

        find_model(str(model), need="config")
