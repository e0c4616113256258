"""A run in a bucket continues on any machine, in the bits of one that was not interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.config import load_config
from megatrain.disk.remote import history
from megatrain.disk.remote.history import last_entry
from megatrain.disk.remote.upload import read_index
from megatrain.errors import (
    Interrupted,
    RunFolderError,
    RunTaken,
)
from megatrain.places import FolderPlace, Place
from megatrain.run import uploads
from megatrain.run.opening.pin_commits import config_at, require_no_run
from megatrain.run.trainer import Trainer
from testkit.faulty_place import FaultyPlace
from testkit.runs import NUM_STEPS, Setting, State, config_of, differences, lines_of, run

SETTING = Setting(save_every=2, keep=1, best=True)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(history, "BEAT_S", 0.05)


@pytest.fixture(scope="module")
def whole(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[State, Path]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRAIN_CACHE", str(world / "cache"))
        path = tmp_path_factory.mktemp("whole") / "run"
        ended = run(config_of(world, path, SETTING))
        assert ended is not None
        yield ended, path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Change to a machine of that name, which has nothing but the world and the bucket."""

    def change(name: str) -> None:
        monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / name))

    return change


def _broken(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int, str, str, bool], bool]) -> None:
    def opened(url: str) -> Place:
        return FaultyPlace(FolderPlace(Path(url.removeprefix("file://"))), fails)

    monkeypatch.setattr(uploads, "open_place", opened)


@pytest.mark.merge
def test_runs_continue_on_an_empty_machine(
    world: Path, tmp_path: Path, whole: tuple[State, Path], machine: Callable[[str], None]
) -> None:
    config = config_of(world, tmp_path, SETTING, save={"dir": f"file://{tmp_path}/bucket"})
    machine("first")
    with pytest.raises(Interrupted, match="stopped after step 3"):
        run(config, stop=3)
    machine("second")
    assert run(config, resume=True, die=7) is None  # step 6 is saved
    machine("third")
    ended = run(config, resume=True)
    assert differences(world, ended, Path(config.run_dir), whole) == []
    machine("second")  # has steps that the third has made again
    with Trainer(config) as trainer:
        assert trainer.state.global_step == NUM_STEPS
    machine("fourth")
    with pytest.raises(RunFolderError, match=r"already has a run\. Continue it with --resume"):
        require_no_run(config)
    with (
        Trainer(config) as trainer,
        pytest.raises(RunFolderError, match=r"already has a run, at step 9\. Continue it with"),
    ):
        trainer.train()


@pytest.mark.merge
def test_a_run_continues_by_its_url_with_the_settings_that_it_used(
    world: Path, tmp_path: Path, machine: Callable[[str], None]
) -> None:
    """Its config.yaml was edited, and so config.used.yaml has them."""
    url = f"file://{tmp_path}/bucket"
    config = config_of(world, tmp_path, SETTING, save={"dir": url})
    machine("first")
    with pytest.raises(Interrupted, match="stopped after step 3"):
        run(config, stop=3)
    assert load_config(config_at(url)) == load_config(Path(config.run_dir) / "config.yaml")
    with (Path(config.run_dir) / "config.yaml").open("a") as file:
        file.write("# a note\n")
    changed = config_of(world, tmp_path, SETTING, save={"dir": url}, log={"every": 7})
    with pytest.raises(Interrupted, match="stopped after step 5"):
        run(changed, resume=True, stop=5)
    machine("second")
    assert load_config(config_at(url)).log.every == 7


def test_a_bucket_that_fails_does_not_end_a_run(
    world: Path,
    tmp_path: Path,
    whole: tuple[State, Path],
    machine: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    _broken(monkeypatch, lambda number, action, key, is_done: number > 5 and number % 3 == 0)
    monkeypatch.setattr(uploads, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(uploads, "LONGEST_PAUSE_S", 0.1)
    config = config_of(world, tmp_path, SETTING, save={"dir": f"file://{tmp_path}/bucket"})
    machine("first")
    assert differences(world, run(config), Path(config.run_dir), whole) == []
    said = capfd.readouterr().err
    assert "NOT uploaded yet" in said
    assert "Training continues, and it is tried again" in said
    last = last_entry(FolderPlace(tmp_path / "bucket"))
    assert last is not None
    assert last.live[0].step == NUM_STEPS
    events = lines_of(Path(config.run_dir), "events.jsonl")
    assert {"uploaded", "upload failed"} <= {line["event"] for line in events}


def test_the_end_of_a_run_names_what_a_bucket_has_not(
    world: Path,
    tmp_path: Path,
    machine: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    _broken(monkeypatch, lambda number, action, key, is_done: key.startswith("chunks"))
    monkeypatch.setattr(uploads, "IDLE_S", 0.2)
    config = config_of(world, tmp_path, SETTING, save={"dir": f"file://{tmp_path}/bucket"})
    machine("first")
    assert run(config) is not None
    said = " ".join(capfd.readouterr().err.split())
    assert "NOT uploaded: step-00000009-" in said
    assert "with --resume on this machine uploads it" in said
    monkeypatch.undo()
    machine("first")
    assert run(config, resume=True) is not None
    last = last_entry(FolderPlace(tmp_path / "bucket"))
    assert last is not None
    assert [one.step for one in last.live] == [NUM_STEPS]


def test_a_run_that_was_taken_over_ends(
    world: Path, tmp_path: Path, machine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(world, tmp_path, SETTING, save={"dir": f"file://{tmp_path}/bucket"})
    machine("first")
    place = FolderPlace(tmp_path / "bucket")
    with Trainer(config) as trainer:
        before = last_entry(place)
        assert before is not None
        monkeypatch.setattr(history, "_is_gone", lambda who: True)
        taken = history.take(place)
        with pytest.raises(RunTaken, match="has taken this run over"):
            trainer.train()
        assert last_entry(place) == replace(before, number=2, lease=2, nonce=_nonce(place, 2))
        taken.release()


def _nonce(place: Place, number: int) -> str:
    entry = history.read_entry(place, number)
    assert entry is not None
    return entry.nonce


@pytest.mark.merge
def test_a_second_checkpoint_of_adapters_sends_what_changed(
    world: Path, tmp_path: Path, machine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = FaultyPlace(FolderPlace(tmp_path / "bucket"))
    monkeypatch.setattr(uploads, "open_place", lambda url: place)
    config = config_of(
        world,
        tmp_path,
        replace(SETTING, keep=2, save_every=1, best=False, eval_every=None),
        save={"dir": f"file://{tmp_path}/bucket"},
        train={"steps": 2},
        lora={"rank": 2},
    )
    machine("first")
    with Trainer(config) as trainer:
        if_due = trainer.saving.if_due

        def and_wait(step: int, say: Callable[[str], None], **asked: bool) -> None:
            if_due(step, say, **asked)
            trainer.engine.synchronize()
            trainer.saving.wait()
            trainer.saving.report(say)
            assert trainer.folder.uploads is not None
            assert trainer.folder.uploads.wait()

        monkeypatch.setattr(trainer.saving, "if_due", and_wait)
        trainer.train()
    last = last_entry(place)
    assert last is not None
    second, first = (read_index(place, one) for one in last.live)
    new = {name for name, file in second.items() if file != first.get(name)}
    assert {name.split("/")[1].split("-")[0] for name in new if "checkpoint/" in name} == {
        "manifest.json",
        "model",
        "state",
    }
    assert all("adapter_model" in name for name in new if "checkpoint/model" in name)
    kept = set(second) - new
    assert {"checkpoint/model/tokenizer.json", "checkpoint/model/adapter_config.json"} <= kept
    writes = [key for action, key in place.calls if action == "write" and "chunks/" in key]
    assert len(writes) == len(set(writes))  # no chunk went twice
    known = {key for file in first.values() for key in file.chunk_keys()}
    sent = sum(place.sent[key] for name in new for key in {*second[name].chunk_keys()} - known)
    event = [one for one in lines_of(Path(config.run_dir), "events.jsonl") if "sent_bytes" in one]
    assert event[-1]["sent_bytes"] == sent + place.sent[last.live[0].key]


def test_a_folder_is_a_model_only_when_all_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["config.json", "megatrain.json", "model.safetensors", "notes.txt", "tokenizer.json"]
    for name in names:
        (tmp_path / name).write_text(name)
    sent: list[str] = []
    monkeypatch.setattr(FolderPlace, "send", lambda self, key, path: sent.append(key))
    uploads.send_folder(f"file://{tmp_path}/bucket", tmp_path)
    assert sorted(sent) == names
    assert sent.index("model.safetensors") < sent.index("megatrain.json")
    assert sent[-1] == "config.json"
