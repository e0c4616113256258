"""Sinks of metrics besides metrics.jsonl: TensorBoard, Weights & Biases, Trackio, MLflow.

    check_sinks(config.log.to)                     # early: is each of them installed?
    with Sinks(config, folder, say, resumed_step=step) as sinks:
        sinks.log(record)                          # a line of metrics.jsonl

Each is an optional package, imported when it is asked for. metrics.jsonl is the truth and a sink a
copy of it, so a failing sink is reported once and dropped; it never ends a run.

A run that is resumed continues its curves. tracking.json in the run folder has the name by which a
sink knows the run. Steps after the checkpoint come twice, with the same figures: TensorBoard hides
the first ones, W&B drops the second ones, Trackio and MLflow show both.

Laws (tests/run/test_sinks.py)
    1. Every finite number of a record arrives, under the same name in every sink.
    2. A missing package is an error before anything is loaded, and names what to install.
    3. Whatever a sink raises, the run continues and the other sinks get their records.
    4. A resumed run is the same run in every sink; one that begins again at step 0 is another.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from megatrain import files
from megatrain.config import Config
from megatrain.errors import DiskError, MissingPackage
from megatrain.run.folder import settings_by_key

PROJECT = "megatrain"
KNOWN_AS = "tracking.json"
"""The file in a run folder with the name of the run in each sink."""
NOT_FIGURES = frozenset({"step", "applied", "fault", "stopped_early", "best_step", "best_loss"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The facts of a run for a sink."""

    settings: Mapping[str, Any]
    folder: Path
    project: str | None
    """`log.project`; None: the sink's own variable, or PROJECT."""
    known_as: str | None
    """Name of the run in this sink, if it is resumed and the sink had it before."""
    first_step: int
    """The first step whose figures will come."""

    @property
    def name(self) -> str:
        return self.folder.name

    def project_by(self, variable: str) -> str:
        return self.project or os.environ.get(variable) or PROJECT


class Sink(Protocol):
    """Takes figures by name."""

    known_as: str | None
    """The name by which the sink finds the run again; None: its place is enough."""

    def __init__(self, run: TrackedRun) -> None: ...

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run folder: `tensorboard --logdir RUN`."""

    known_as: str | None = None

    def __init__(self, run: TrackedRun) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        folder = str(run.folder / "tensorboard")
        self._writer = module.SummaryWriter(folder, purge_step=run.first_step)
        settings = "\n".join(f"    {key}: {value}" for key, value in run.settings.items())
        self._writer.add_text("config", settings)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases. Its own variables hold: WANDB_MODE=offline needs no network."""

    def __init__(self, run: TrackedRun) -> None:
        wandb = importlib.import_module("wandb")
        again: dict[str, Any] = {}
        if run.known_as is not None and "WANDB_RUN_ID" not in os.environ:
            again = {"id": run.known_as, "resume": "allow"}
        self._run = wandb.init(
            project=run.project_by("WANDB_PROJECT"),
            name=os.environ.get("WANDB_NAME", run.name),
            dir=str(run.folder),
            config=dict(run.settings),
            **again,
        )
        self.known_as: str | None = str(self._run.id)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of Trackio, on this machine unless TRACKIO_SPACE_ID names a Space."""

    def __init__(self, run: TrackedRun) -> None:
        self._trackio = importlib.import_module("trackio")
        opened = self._trackio.init(
            project=run.project_by("TRACKIO_PROJECT"),
            name=run.known_as or run.name,
            resume="never" if run.known_as is None else "allow",
            config=dict(run.settings),
            embed=False,
        )
        self.known_as: str | None = str(opened.name)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._trackio.log(dict(figures), step=step)

    def close(self) -> None:
        self._trackio.finish()


_UNNAMEABLE = re.compile(r"[^/\w.\- :]")
"""What a metric of MLflow may not have in its name; one of them refuses all metrics of a call."""


class MLflow:
    """A run of MLflow. Its own variables hold: MLFLOW_TRACKING_URI says where."""

    MOST_PARAMS = 100
    """Most params of one call."""

    def __init__(self, run: TrackedRun) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(run.project_by("MLFLOW_EXPERIMENT_NAME"))
        again = run.known_as if "MLFLOW_RUN_ID" not in os.environ else None
        opened = self._mlflow.start_run(run_id=again, run_name=run.name)
        self.known_as: str | None = str(opened.info.run_id)
        settings = [] if again else list(run.settings.items())  # MLflow has them, and for good
        for first in range(0, len(settings), self.MOST_PARAMS):
            self._mlflow.log_params(dict(settings[first : first + self.MOST_PARAMS]))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        named = {_UNNAMEABLE.sub("_", name): figure for name, figure in figures.items()}
        self._mlflow.log_metrics(named, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


SINKS: dict[str, type[Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
    "mlflow": MLflow,
}
"""Sinks by their name in `log.to`, which is also that of the package and of the extra."""


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
        self,
        config: Config,
        folder: Path,
        say: Callable[[str], None],
        *,
        resumed_step: int = 0,
        speaks: bool = True,
    ) -> None:
        """`say` prints a line for people; `speaks`: false where another process does.

        `resumed_step` is the step of the checkpoint; 0: the run begins.
        """
        self._say = say
        self._sinks: dict[str, Sink] = {}
        known = _read_names(folder / KNOWN_AS) if resumed_step else {}
        project = config.log.project
        settings = settings_by_key(config)
        for name in config.log.to if speaks else ():
            run = TrackedRun(
                settings=settings,
                folder=folder,
                project=project,
                known_as=known.get(name),
                first_step=resumed_step + 1 if resumed_step else 0,
            )
            self._try(name, self._open, name, run)
        found = {name: one.known_as for name, one in self._sinks.items() if one.known_as}
        if found:
            self._keep_names(folder / KNOWN_AS, known | found)

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

    def _open(self, name: str, run: TrackedRun) -> None:
        self._sinks[name] = SINKS[name](run)

    def _keep_names(self, path: Path, names: Mapping[str, str]) -> None:
        try:
            files.write_file(path, json.dumps(names, indent=1).encode() + b"\n", durable=False)
        except (DiskError, OSError) as error:
            self._say(f"{error}. If this run is resumed, {', '.join(names)} will begin another one")

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


def _read_names(path: Path) -> dict[str, str]:
    """Return the names of a run, by sink; none if the file is not there, or is not ours."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    names = found if isinstance(found, dict) else {}
    return {sink: name for sink, name in names.items() if isinstance(name, str)}


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
