"""Where metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, Trackio.

    check_sinks(config.log.to)                     # early: is each of them installed?
    with Sinks(config, folder, say) as sinks:
        sinks.log(record)                          # a line of metrics.jsonl

Each is an optional package, imported when it is asked for. metrics.jsonl is the truth and a sink a
copy of it, so a failing sink is reported once and dropped; it never ends a run.

Laws (tests/run/test_sinks.py)
    1. Every finite number of a record arrives, under the same name in every sink.
    2. A missing package is an error before anything is loaded, and names what to install.
    3. Whatever a sink raises, the run continues and the other sinks get their records.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from megatrain.config import Config
from megatrain.errors import MissingPackage

PROJECT = "megatrain"
NOT_FIGURES = frozenset({"step", "applied", "fault", "stopped_early", "best_step", "best_loss"})


class Sink(Protocol):
    """Takes figures by name; made from the run's settings, its folder and its name."""

    def __init__(self, settings: Mapping[str, Any], folder: Path, name: str) -> None: ...

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run folder: `tensorboard --logdir RUN`."""

    def __init__(self, settings: Mapping[str, Any], folder: Path, name: str) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text("config", "\n".join(f"    {k}: {v}" for k, v in settings.items()))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases. Its own variables hold: WANDB_MODE=offline needs no network."""

    def __init__(self, settings: Mapping[str, Any], folder: Path, name: str) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", name),
            dir=str(folder),
            config=dict(settings),
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of Trackio, on this machine unless TRACKIO_SPACE_ID names a Space."""

    def __init__(self, settings: Mapping[str, Any], folder: Path, name: str) -> None:
        self._trackio = importlib.import_module("trackio")
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._trackio.init(project=project, name=name, config=dict(settings), embed=False)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._trackio.log(dict(figures), step=step)

    def close(self) -> None:
        self._trackio.finish()


SINKS: dict[str, type[Sink]] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}
"""By the name in `log.to`, which is also the package's and the extra's."""


def check_sinks(names: Sequence[str]) -> None:
    """Raise MissingPackage unless every package that is asked for is installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackage(
            f"log.to: {', '.join(missing)} not installed: "
            f"`pip install {' '.join(missing)}`, or remove it from log.to"
        )


class Sinks:
    """All sinks of a run. Use it in a `with` block, or `close` it."""

    def __init__(
        self, config: Config, folder: Path, say: Callable[[str], None], *, speaks: bool = True
    ) -> None:
        """`say` prints a line for people; `speaks`: false for all ranks but one."""
        self._say = say
        self._sinks: dict[str, Sink] = {}
        settings = {
            f"{section}.{key}": value
            for section, values in config.model_dump(mode="json").items()
            for key, value in values.items()
        }
        for name in config.log.to if speaks else ():
            self._try(name, self._open, name, settings, folder)

    def log(self, record: Mapping[str, Any]) -> None:
        """Send a line of metrics.jsonl."""
        if not self._sinks:
            return
        found = figures(record)
        for name, sink in list(self._sinks.items()):
            self._try(name, sink.log, record["step"], found)

    def close(self) -> None:
        for name, sink in list(self._sinks.items()):
            self._try(name, sink.close)
        self._sinks.clear()

    def _open(self, name: str, settings: Mapping[str, Any], folder: Path) -> None:
        self._sinks[name] = SINKS[name](settings, folder, folder.name)

    def _try(self, name: str, act: Callable[..., None], *given: object) -> None:
        """Act; a failure is reported, and its sink gets nothing more."""
        try:
            act(*given)
        except Exception as error:  # a library's own, and a network's
            self._sinks.pop(name, None)
            self._say(
                f"{name}: {type(error).__name__}: {str(error)[:300]}. It will get no more metrics; "
                "metrics.jsonl has all of them"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def figures(record: Mapping[str, Any]) -> dict[str, float]:
    """Return a record's finite numbers: `train/loss`, `train/split/compute`, `eval/loss`."""
    found: dict[str, float] = {}
    for key, value in record.items():
        if key in NOT_FIGURES:
            continue
        name = f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}"
        parts = value.items() if isinstance(value, Mapping) else [("", value)]
        for part, number in parts:
            if isinstance(number, int | float) and math.isfinite(number):
                found[f"{name}/{part}" if part else name] = float(number)
    return found
