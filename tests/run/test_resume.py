"""A run that was stopped and resumed, however often, ends in the bits of one that was not."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatrain.disk.checkpoint.retention import best_of, finished
from megatrain.errors import (
    CheckpointCorrupted,
    CheckpointMismatch,
    DataError,
    Interrupted,
    NonFiniteStep,
    RunFolderError,
)
from megatrain.files import append
from megatrain.optim.kernel import AdamWScalars
from megatrain.optim.states import M
from megatrain.run.folder import FOLDER
from megatrain.run.opening.recipe import learning_rate
from megatrain.run.trainer import Trainer
from testkit.cases import at_a_push
from testkit.faulty_os import faulty
from testkit.runs import (
    NUM_STEPS,
    Setting,
    State,
    config_of,
    differences,
    everything,
    lines_of,
    poison_at,
    run,
    setting_of,
    state_of,
)

pytestmark = pytest.mark.usefixtures("cache_in_world")


def _whole(world: Path, path: Path, setting: Setting) -> tuple[State, Path]:
    ended = run(config_of(world, path, setting))
    assert ended is not None
    return ended, path


def _stopped_twice(world: Path, path: Path, setting: Setting, number: int) -> State | None:
    """Stop or die at two random steps, resuming each time."""
    draw = random.Random(number)
    config = config_of(world, path, setting)
    for at in sorted(draw.sample(range(1, NUM_STEPS), 2)):
        if draw.random() < 0.5:
            with pytest.raises(Interrupted, match=f"stopped after step {at} of {NUM_STEPS}"):
                run(config, resume=True, stop=at)
        else:
            assert run(config, resume=True, die=at) is None
    return run(config, resume=True)


def _check(world: Path, tmp_path: Path, number: int) -> None:
    setting = setting_of(number)
    whole = _whole(world, tmp_path / "whole", setting)
    ended = _stopped_twice(world, tmp_path / "stopped", setting, number)
    assert differences(world, ended, tmp_path / "stopped", whole) == [], setting


@pytest.mark.merge
@pytest.mark.parametrize("shuffle", [True, False])
def test_steps_by_rows_of_a_mixture_resume_exactly(
    world: Path, tmp_path: Path, shuffle: bool
) -> None:
    changes: dict[str, Any] = {
        "data": {"train": [{"path": str(world / "rows.jsonl"), "weight": 1.5}], "shuffle": shuffle},
        "train": {"batch_tokens": None, "batch_rows": 12},
    }
    ended = run(config_of(world, tmp_path / "whole", Setting(), **changes))
    assert ended is not None
    config = config_of(world, tmp_path / "stopped", Setting(), **changes)
    for at in (2, 7):  # an epoch has 7 steps
        with pytest.raises(Interrupted):
            run(config, resume=True, stop=at)
    resumed = run(config, resume=True)
    whole = (ended, tmp_path / "whole")
    assert differences(world, resumed, tmp_path / "stopped", whole) == []
    changes["train"]["batch_rows"] = 13
    with pytest.raises(CheckpointMismatch, match=r"train\.batch_rows: 12 -> 13"):
        run(config_of(world, tmp_path / "stopped", Setting(), **changes), resume=True)


@pytest.mark.merge
@pytest.mark.parametrize("number", at_a_push(range(10), 4))
def test_resumed_twice_is_the_uninterrupted_run(world: Path, tmp_path: Path, number: int) -> None:
    _check(world, tmp_path, number)


@pytest.mark.long
@pytest.mark.parametrize("number", range(10, 70))
def test_resumed_twice_is_the_uninterrupted_run_in_many_settings(
    world: Path, tmp_path: Path, number: int
) -> None:
    _check(world, tmp_path, number)


@pytest.mark.merge
@pytest.mark.parametrize("clips", [True, False])
def test_resume_after_every_step(world: Path, tmp_path: Path, clips: bool) -> None:
    setting = Setting(clips=clips, dropout=0.1, save_every=1, keep=1)
    whole = _whole(world, tmp_path / "whole", setting)
    config = config_of(world, tmp_path / "stopped", setting)
    for step in range(1, NUM_STEPS):
        with pytest.raises(Interrupted):
            run(config, resume=True, stop=step)
    assert differences(world, run(config, resume=True), tmp_path / "stopped", whole) == []


@pytest.mark.merge
@pytest.mark.parametrize("lost", ["moments", "data", "updates", "lines"])
def test_a_resume_that_forgets_something_would_be_noticed(
    world: Path, tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting()
    whole = _whole(world, tmp_path / "whole", setting)
    config = config_of(world, tmp_path / "stopped", setting)
    with pytest.raises(Interrupted):
        run(config, stop=4)
    if lost == "moments":
        restore = Trainer._restore

        def forgetful(self: Trainer, resumed: object) -> None:
            restore(self, resumed)  # type: ignore[arg-type]
            for name in self.home.store.layout.places:
                self.home.store.param(name, M).zero_()

        monkeypatch.setattr(Trainer, "_restore", forgetful)
    elif lost == "data":
        monkeypatch.setattr(
            "megatrain.run.opening.training_data.TrainingData.seek", lambda *_: None
        )
    elif lost == "updates":
        monkeypatch.setattr("megatrain.engine.engine.Engine.restore", lambda *_: None)
    else:
        monkeypatch.setattr("megatrain.run.folder.RunFolder.cut", lambda *_: [])
        append(tmp_path / "stopped" / "metrics.jsonl", b'{"step": 5, "loss": 1.0}\n')
    assert differences(world, run(config, resume=True), tmp_path / "stopped", whole) != []


@pytest.mark.merge
def test_a_run_that_died_before_its_first_save_begins_again(world: Path, tmp_path: Path) -> None:
    setting = Setting(save_every=None)
    whole = _whole(world, tmp_path / "whole", setting)
    config = config_of(world, tmp_path / "stopped", setting)
    assert run(config, die=3) is None
    ended = run(config, resume=True)
    assert differences(world, ended, tmp_path / "stopped", whole) == []


def test_a_run_in_the_folder_is_not_overwritten(world: Path, tmp_path: Path) -> None:
    config = config_of(world, tmp_path / "run", Setting())
    assert run(config, die=3) is None
    with pytest.raises(RunFolderError, match=r"already has a run, at step 2\. Continue it"):
        run(config)


def test_more_steps_after_the_end(world: Path, tmp_path: Path) -> None:
    constant = {"optim": {"schedule": "constant"}}
    setting = Setting()
    config = config_of(world, tmp_path / "run", setting, **constant)
    run(config)
    longer = config_of(world, tmp_path / "run", setting, train={"steps": 12}, **constant)
    run(longer, resume=True)
    steps = [line["step"] for line in lines_of(tmp_path / "run") if "loss" in line]
    assert steps == list(range(1, 13))
    (event,) = [e for e in lines_of(tmp_path / "run", "events.jsonl") if e["event"] == "resumed"]
    assert event["changed"] == ["train.steps: 9 -> 12"]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "dtype", "fp32"),
        ("data", "packing", False),
        ("data", "seed", 7),
        ("data", "train_on", "all"),
        ("data", "train_on", "last"),
        ("data", "chat_template", "none"),
        ("train", "seed", 7),
    ],
)
def test_what_may_not_change_is_refused(
    world: Path, tmp_path: Path, section: str, key: str, value: object
) -> None:
    setting = Setting()
    assert run(config_of(world, tmp_path / "run", setting), die=5) is None
    changed = config_of(world, tmp_path / "run", setting, **{section: {key: value}})
    with pytest.raises(
        CheckpointMismatch, match=rf"must keep these settings.*\n  {section}\.{key}"
    ):
        run(changed, resume=True)


@pytest.mark.merge
def test_one_changed_row_of_many_is_noticed(world: Path, tmp_path: Path) -> None:
    """Of the same length, so that order and packing stay as they were."""
    lines = (world / "rows.jsonl").read_text().splitlines(keepends=True) * 5
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(lines))
    config = config_of(world, tmp_path / "run", Setting(), data={"train": str(rows)})
    assert run(config, die=5) is None
    for number in (1, 150, 299):
        other = lines[number].translate(str.maketrans("0123456789", "1234567890"))
        rows.write_text("".join([*lines[:number], other, *lines[number + 1 :]]))
        with pytest.raises(DataError, match="the rows differ from those of the run"):
            run(config, resume=True)
    rows.write_text("".join(lines))
    assert run(config, resume=True) is not None


@pytest.mark.merge
@pytest.mark.parametrize("hurt", ["flip", "cut", "missing", "manifest"])
def test_a_damaged_checkpoint_is_passed_over_and_said(
    world: Path, tmp_path: Path, hurt: str
) -> None:
    setting = Setting()
    whole = _whole(world, tmp_path / "whole", setting)
    config = config_of(world, tmp_path / "run", setting)
    assert run(config, die=7) is None
    newest = finished(tmp_path / "run" / FOLDER)[0]
    target = newest / "state" / "block-00001.safetensors"
    data = bytearray(target.read_bytes())
    if hurt == "flip":
        data[-100] ^= 4
        target.write_bytes(data)
    elif hurt == "cut":
        target.write_bytes(data[:-1])
    elif hurt == "missing":
        target.unlink()
    else:
        text = (newest / "manifest.json").read_text()
        (newest / "manifest.json").write_text(text.replace('"step": 6', '"step": 7'))
    ended = run(config, resume=True)
    assert differences(world, ended, tmp_path / "run", whole) == []
    (event,) = [e for e in lines_of(tmp_path / "run", "events.jsonl") if e["event"] == "resumed"]
    assert event["step"] == 4
    assert newest.name in event["skipped"][0]


def test_if_all_are_damaged_nothing_is_begun_again(world: Path, tmp_path: Path) -> None:
    config = config_of(world, tmp_path / "run", Setting())
    assert run(config, die=7) is None
    for folder in finished(tmp_path / "run" / FOLDER):
        (folder / "state" / "block-00001.safetensors").unlink()
    with pytest.raises(CheckpointCorrupted, match="none of 2 checkpoints is complete"):
        run(config, resume=True)


@pytest.mark.merge
def test_a_resumed_run_needs_no_original_model(world: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(world, copy)
    setting = Setting()
    whole = _whole(copy, tmp_path / "whole", setting)
    config = config_of(copy, tmp_path / "run", setting)
    assert run(config, die=7) is None
    shutil.rmtree(copy / "model-0.0")
    ended = run(config, resume=True)
    assert differences(copy, ended, tmp_path / "run", whole) == []


@pytest.mark.merge
def test_keep_rules_and_links(world: Path, tmp_path: Path) -> None:
    setting = Setting(save_every=1, keep=2, best=True, eval_every=1)
    run(config_of(world, tmp_path / "run", setting, optim={"learning_rate": 1.0}))
    parent = tmp_path / "run" / FOLDER
    losses = {
        line["step"]: line["eval_loss"]
        for line in lines_of(tmp_path / "run")
        if "eval_loss" in line and line["step"] > 0
    }
    best = best_of(parent)
    assert best is not None
    assert best.step == min(losses, key=lambda step: (losses[step], -step))
    kept = {int(path.name[5:13]) for path in finished(parent)}
    assert kept == {NUM_STEPS, NUM_STEPS - 1, best.step}
    assert (tmp_path / "run" / "last").resolve() == finished(parent)[0]
    assert (tmp_path / "run" / "best").resolve() == best.path


@pytest.mark.merge
def test_a_disk_that_fails_does_not_end_training(world: Path, tmp_path: Path) -> None:
    """A full one neither, but at its end the run waits for room: test_full_disk."""
    setting = Setting()
    whole = _whole(world, tmp_path / "whole", setting)
    config = config_of(world, tmp_path / "run", setting)
    with Trainer(config) as trainer:
        begin = trainer.checkpoints.begin

        def on_a_bad_disk(step: int, training: dict[str, object], *rest: int) -> None:
            failing = frozenset({"posix_fallocate"})
            with faulty(fail_at=0, persistent=True, counted=failing, error=5):
                begin(step, training, *rest)
                trainer.engine.synchronize()
                trainer.checkpoints.wait()

        trainer.checkpoints.begin = on_a_bad_disk  # type: ignore[method-assign, assignment]
        trainer.train()
    events = lines_of(tmp_path / "run", "events.jsonl")
    assert {event["event"] for event in events} == {"save failed"}
    assert "Input/output error" in events[0]["error"]
    assert finished(tmp_path / "run" / FOLDER) == []
    assert list((tmp_path / "run" / FOLDER).iterdir()) == []
    assert lines_of(tmp_path / "run") == lines_of(whole[1])


@pytest.mark.few(1)
@pytest.mark.parametrize("on_nonfinite", ["skip", "rollback"])
@pytest.mark.parametrize("clips", [True, False])
def test_the_applied_rate_is_the_logged_one_after_a_step_without_an_update(
    world: Path, tmp_path: Path, clips: bool, on_nonfinite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a resume: the rate follows the step, and the decay ends with the run."""
    poison_at(monkeypatch, 4, float("nan"))
    applied: list[float] = []
    at = AdamWScalars.at

    def noted(number: int, **scalars: Any) -> AdamWScalars:
        applied.append(scalars["lr"])
        return at(number, **scalars)

    monkeypatch.setattr(AdamWScalars, "at", noted)
    changes: dict[str, Any] = {"train": {"on_nonfinite": on_nonfinite}}
    config = config_of(world, tmp_path / "run", Setting(clips=clips), **changes)
    with pytest.raises(Interrupted):
        run(config, stop=6)
    run(config, resume=True)
    lines = [line for line in lines_of(tmp_path / "run") if line.get("applied")]
    logged = [line["learning_rate"] for line in lines]
    schedule = learning_rate(config, NUM_STEPS)
    assert logged == [schedule.rate(step - 1) for step in range(1, NUM_STEPS + 1) if step != 4]
    # In backward, a step with a fault updates the blocks whose gradient is finite.
    expected = set(logged) if clips else {*logged, schedule.rate(3)}
    assert set(applied) == expected
    assert applied[-1] == schedule.rate(NUM_STEPS - 1)


def test_a_rollback_without_a_checkpoint_stops(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_at(monkeypatch, 2, float("nan"))
    setting = Setting(save_every=None)
    config = config_of(world, tmp_path / "run", setting, train={"on_nonfinite": "rollback"})
    with pytest.raises(NonFiniteStep, match="no checkpoint to return to"):
        run(config)


def test_a_run_that_is_there_is_continued_only_if_asked(world: Path, tmp_path: Path) -> None:
    """A trainer that opens it, and is refused, changes nothing in its folder."""
    setting = Setting(save_every=3)
    whole = _whole(world, tmp_path / "whole", setting)
    path = tmp_path / "run"
    config = config_of(world, path, setting)
    assert run(config, die=5) is None
    before = everything(path)
    with Trainer(config) as trainer:
        before[".lock"] = everything(path)[".lock"]
        assert trainer.state.global_step == 3
        with pytest.raises(RunFolderError, match=r"at step 3\. Continue it with train\(resume_fr"):
            trainer.train()
        assert everything(path) == before
        trainer.train(resume_from_checkpoint=True)
        ended = state_of(trainer)
    assert differences(world, ended, path, whole) == []
    assert everything(path) != before, "what a run changes would be noticed"


def test_a_run_goes_back_to_the_checkpoint_that_is_named(world: Path, tmp_path: Path) -> None:
    setting = Setting(save_every=2, keep=3)
    whole = _whole(world, tmp_path / "whole", setting)
    path = tmp_path / "run"
    config = config_of(world, path, setting)
    assert run(config, die=7) is None
    newest, older = finished(path / FOLDER)[:2]
    with Trainer(config) as trainer:
        for name in (tmp_path / older.name, older.with_name("step-00000001-01234567")):
            with pytest.raises(RunFolderError, match=f"no checkpoint of this run.*{newest.name}"):
                trainer.train(resume_from_checkpoint=name)
        target = older / "state" / "block-00001.safetensors"
        whole_bytes = target.read_bytes()
        target.write_bytes(whole_bytes[:-1])
        with pytest.raises(CheckpointCorrupted, match=f"{older.name} is damaged"):
            trainer.train(resume_from_checkpoint=older)
        target.write_bytes(whole_bytes)
        trainer.train(resume_from_checkpoint=str(older))
        assert f"resumed from {newest.name}" not in trainer.notes
        ended = state_of(trainer)
    assert differences(world, ended, path, whole) == []
    (event,) = [e for e in lines_of(path, "events.jsonl") if e["event"] == "resumed"]
    assert (event["step"], event["checkpoint"]) == (4, older.name)
