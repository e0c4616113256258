"""Laws of sinks.py: with a stand-in for each package, and with the package itself if it is here."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import Config
from megatrain.errors import MissingPackage
from megatrain.run.sinks import SINKS, Sinks, check_sinks
from testkit.patience import eventually

STEP = {
    "step": 3, "loss": 1.5, "grad_norm": None, "num_tokens": 64, "learning_rate": float("inf"),
    "split": {"compute": 0.25, "data": 0.5}, "applied": True, "fault": "text",
}  # fmt: skip
EVALUATION = {"step": 3, "eval_loss": 1.25, "eval_perplexity": 3.5}
EXPECTED = {
    "train/loss": 1.5, "train/num_tokens": 64.0, "train/split/compute": 0.25,
    "train/split/data": 0.5, "eval/loss": 1.25, "eval/perplexity": 3.5,
}  # fmt: skip

# Each has the names of the real package that are used, and writes down what it is told.
RECORDER = """
import json, os

def note(**what):
    with open(os.environ["RECORD"], "a") as file:
        file.write(json.dumps(what) + "\\n")
"""
STAND_INS = {
    "wandb": """
class Run:
    def __init__(self, id):
        self.id = id
    def log(self, data, step=None):
        for name, value in data.items():
            note(name=name, value=value, step=step)
    def finish(self):
        note(closed=True)

def init(project=None, name=None, dir=None, config=None, id=None, resume=None):
    note(project=project, run=name, config=config, id=id, resume=resume)
    return Run(id or "1a2b3c")
""",
    "trackio": """
class Run:
    name = "another-name"

def init(project, name=None, config=None, resume="never", embed=True):
    note(project=project, run=name, config=config, resume=resume)
    return Run()

def log(metrics, step=None):
    for name, value in metrics.items():
        note(name=name, value=value, step=step)

def finish():
    note(closed=True)
""",
    "mlflow": """
from types import SimpleNamespace
settings = {}

def set_experiment(name):
    note(project=name)

def start_run(run_id=None, run_name=None):
    note(run=run_name, id=run_id)
    return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "9f8e7d"))

def log_params(params):
    assert len(params) <= 100
    settings.update(params)

def log_metrics(metrics, step=None):
    for name, value in metrics.items():
        note(name=name, value=value, step=step)

def end_run():
    note(config=settings)
    note(closed=True)
""",
    "tensorboard": """
class SummaryWriter:
    def __init__(self, log_dir, purge_step=None):
        note(run=log_dir.split("/")[-2], purge_step=purge_step)
    def add_text(self, tag, text):
        lines = [line.split(": ", 1) for line in text.splitlines()]
        note(config={name.strip(): json.loads(v) for name, v in lines if "rate" in name})
    def add_scalar(self, tag, value, step):
        note(name=tag, value=value, step=step)
    def close(self):
        note(closed=True)
""",
}


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Put a stand-in for a package in its place; return where it writes what it is told."""

    def put(name: str, change: Callable[[str], str] = str) -> Path:
        (tmp_path / f"{name}.py").write_text(RECORDER + change(STAND_INS[name]))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("RECORD", str(tmp_path / "record"))
        sys.modules.pop(name, None)
        if name == "tensorboard":
            monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", __import__(name))
        return tmp_path / "record"

    yield put
    for name in STAND_INS:
        sys.modules.pop(name, None)


def config(*names: str, **log: str) -> Config:
    value = {"model": "m", "data": "d", "optim": {"learning_rate": 0.5}}
    return Config.model_validate(value | {"log": {"to": list(names), **log}})


def send(folder: Path, *names: str, resumed_step: int = 0, **log: str) -> list[str]:
    """Send both records to the sinks; return what was said."""
    said: list[str] = []
    folder.mkdir(exist_ok=True)
    check_sinks(names)
    settings = config(*names, **log)
    with Sinks(settings, folder, said.append, resumed_step=resumed_step) as sinks:
        sinks.log(STEP)
        sinks.log(EVALUATION)
    return said


def noted(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_source_with_any_name_keeps_no_figure_from_mlflow(
    stand_in: Callable[..., Path], tmp_path: Path
) -> None:
    """MLflow refuses all metrics of a call for one name: this is its own rule."""
    record = stand_in("mlflow")
    (tmp_path / "run").mkdir()
    said: list[str] = []
    with Sinks(config("mlflow"), tmp_path / "run", said.append) as sinks:
        sinks.log({"step": 3, "eval_loss": 1.5, "eval_loss/a(1).jsonl/train[:50]": 2.5})
    named = {note["name"]: note["value"] for note in noted(record) if "name" in note}
    assert said == []
    assert named == {"eval/loss": 1.5, "eval/loss/a_1_.jsonl/train_:50_": 2.5}
    assert all(re.fullmatch(r"[/\w.\- :]*", name) for name in named)


@pytest.mark.parametrize("name", SINKS)
def test_every_figure_arrives(name: str, stand_in: Callable[..., Path], tmp_path: Path) -> None:
    record = stand_in(name)
    assert send(tmp_path / "some-run", name) == []
    told = noted(record)
    assert {note["name"]: note["value"] for note in told if "name" in note} == EXPECTED
    assert {note["step"] for note in told if "step" in note} == {3}
    assert [note["run"] for note in told if "run" in note] == ["some-run"]
    (settings,) = [note["config"] for note in told if "config" in note]
    assert settings["optim.learning_rate"] == 0.5
    assert told[-1] == {"closed": True}


ASKED: dict[str, list[dict[str, Any]]] = {
    "wandb": [
        {"id": None, "resume": None},
        {"id": "1a2b3c", "resume": "allow"},
        {"id": None, "resume": None},
    ],
    "trackio": [
        {"run": "some-run", "resume": "never"},
        {"run": "another-name", "resume": "allow"},
        {"run": "some-run", "resume": "never"},
    ],
    "mlflow": [{"id": None}, {"id": "9f8e7d"}, {"id": None}],
    "tensorboard": [{"purge_step": 0}, {"purge_step": 3}, {"purge_step": 0}],
}
"""What a sink is asked for by a run that begins, is resumed, and begins again."""


@pytest.mark.parametrize("name", SINKS)
def test_a_resumed_run_is_the_same_run_there(
    name: str, stand_in: Callable[..., Path], tmp_path: Path
) -> None:
    record = stand_in(name)
    for step in (0, 2, 0):
        assert send(tmp_path / "some-run", name, resumed_step=step) == []
    asked = [note for note in noted(record) if "run" in note]
    assert [{key: note[key] for key in ASKED[name][0]} for note in asked] == ASKED[name]


def test_a_run_whose_name_is_lost_begins_another(
    stand_in: Callable[..., Path], tmp_path: Path
) -> None:
    """So the file is what the resumed run goes by; one that is damaged does not end it."""
    record = stand_in("wandb")
    for text in (None, "", '{"wandb": 7}', "[]"):
        assert send(tmp_path / "some-run", "wandb") == []
        kept = tmp_path / "some-run" / "tracking.json"
        assert json.loads(kept.read_text()) == {"wandb": "1a2b3c"}
        if text is None:
            kept.unlink()
        else:
            kept.write_text(text)
        assert send(tmp_path / "some-run", "wandb", resumed_step=2) == []
    assert [note["id"] for note in noted(record) if "run" in note] == [None] * 8


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("wandb", "WANDB_PROJECT"),
        ("trackio", "TRACKIO_PROJECT"),
        ("mlflow", "MLFLOW_EXPERIMENT_NAME"),
    ],
)
def test_the_project_is_the_configs_or_the_variables_or_ours(
    name: str,
    variable: str,
    stand_in: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = stand_in(name)
    assert send(tmp_path / "run", name) == []
    monkeypatch.setenv(variable, "theirs")
    assert send(tmp_path / "run", name) == []
    assert send(tmp_path / "run", name, project="mine") == []
    projects = [note["project"] for note in noted(record) if "project" in note]
    assert projects == ["megatrain", "theirs", "mine"]


def test_a_missing_package_names_what_to_install() -> None:
    text = r"^log\.to: nothing_here not installed: `pip install nothing_here`"
    with pytest.raises(MissingPackage, match=text):
        check_sinks(["nothing_here"])


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_sink_that_fails_is_let_go_and_the_others_go_on(
    call: str, stand_in: Callable[..., Path], tmp_path: Path
) -> None:
    record = stand_in("trackio")
    broken = {"init": "def init(", "log": "def log(self", "finish": "def finish(self"}[call]

    def break_it(source: str) -> str:
        head, tail = source.split(broken)
        line, rest = tail.split("\n", 1)
        indent = " " * (8 if "self" in broken else 4)
        return f"{head}{broken}{line}\n{indent}raise OSError('no network')\n{rest}"

    stand_in("wandb", break_it)
    (said,) = send(tmp_path / "run", "wandb", "trackio")
    assert said.startswith("wandb: OSError: no network. It will get no more metrics")
    names = [note["name"] for note in noted(record) if "name" in note]
    assert sorted(names) == sorted([*EXPECTED, *(EXPECTED if call == "finish" else ())])


def test_extras_are_named_as_the_sinks() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for name in SINKS:
        (requirement,) = project["optional-dependencies"][name]
        assert requirement.startswith(f"{name}>=")


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_itself(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert send(tmp_path / "run", "tensorboard") == []
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    found = {tag: events.Scalars(tag)[0] for tag in events.Tags()["scalars"]}
    assert {tag: scalar.value for tag, scalar in found.items()} == EXPECTED
    assert {scalar.step for scalar in found.values()} == {3}


@pytest.mark.filterwarnings("ignore")
def test_wandb_itself_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert send(tmp_path / "run", "wandb") == []
    (written,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    # Another process writes, and may still do so after finish.
    assert eventually(lambda: all(n.encode() in written.read_bytes() for n in EXPECTED))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.merge
def test_mlflow_itself_goes_on_with_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    mlflow = pytest.importorskip("mlflow")
    for step in (0, 2, 0):
        assert send(tmp_path / "run", "mlflow", resumed_step=step) == []
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("megatrain")
    found = client.search_runs([experiment.experiment_id])
    assert len(found) == 2  # of three
    for run in found:
        assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
        assert run.data.metrics == EXPECTED
        assert run.data.params["optim.learning_rate"] == "0.5"
    counts = [len(client.get_metric_history(run.info.run_id, "train/loss")) for run in found]
    assert sorted(counts) == [1, 2]
