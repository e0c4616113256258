"""Laws of interrupts.py, in processes and with an invented clock of memory."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import dump_config
from megatrain.disk.checkpoint.retention import finished
from megatrain.errors import Interrupted, ModelFolderError
from megatrain.run import interrupts as interrupts_module
from megatrain.run.folder import FOLDER
from megatrain.run.interrupts import SIGNALS, Interrupts
from testkit.patience import HANG_S, eventually
from testkit.runs import Setting, config_of, lines_of, run

HELD = (
    "import os, sys, time; from megatrain.run.trainer import Trainer; real = Trainer._step\n"
    "def held(self, step):\n"
    "    if step == 3:\n"
    "        open(f'{self.folder.path}.held', 'w').close()\n"
    "        while not os.path.exists(f'{self.folder.path}.go'):\n"
    "            time.sleep(0.01)\n"
    "    return real(self, step)\n"
    "Trainer._step = held\n"
    "from megatrain.__main__ import main; sys.argv[0] = 'megatrain'; main()\n"
)
"""The command line. Its third step makes RUN.held and does not end before RUN.go is there."""


pytestmark = pytest.mark.usefixtures("cache_in_world")


def _start(world: Path, path: Path, **settings: Any) -> subprocess.Popen[str]:
    """Start `megatrain train` and return when it is held in its third step."""
    config = path.with_suffix(".yaml")
    config.write_text(dump_config(config_of(world, path, Setting(save_every=None))))
    child = subprocess.Popen(
        [sys.executable, "-c", HELD, "train", str(config)],
        stdout=subprocess.PIPE, text=True, **{"stderr": subprocess.PIPE, **settings},
    )  # fmt: skip
    assert eventually(lambda: Path(f"{path}.held").exists() or child.poll() is not None)
    assert child.poll() is None, child.communicate()
    return child


def _end(child: subprocess.Popen[str], path: Path) -> str:
    """Let the third step end; return what the run said to its end."""
    Path(f"{path}.go").touch()
    return child.communicate(timeout=HANG_S)[1]


@pytest.fixture(scope="module")
def whole(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "run"
    run(config_of(world, path, Setting(save_every=None)))
    return path


@pytest.mark.merge
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_ends_the_run_saved(
    world: Path, tmp_path: Path, whole: Path, number: signal.Signals
) -> None:
    path = tmp_path / "run"
    child = _start(world, path)
    child.send_signal(number)
    said = _end(child, path)
    assert child.returncode == 130
    assert f"{number.name}: finishing this step and saving" in said
    assert f"Interrupted [MT130]: {number.name}: stopped after step" in said
    (folder,) = finished(path / FOLDER)
    step = int(folder.name.split("-")[1])
    assert step == 3
    assert f"saved after step {step}; continue with `megatrain train ... --resume`" in said
    event = lines_of(path, "events.jsonl")[-1]
    assert event == {"event": "interrupted", "step": step, "reason": number.name}
    run(config_of(world, path, Setting(save_every=None)), resume=True)
    assert lines_of(path) == lines_of(whole)


@pytest.mark.merge
def test_two_signals_end_it_at_once(world: Path, tmp_path: Path) -> None:
    child = _start(world, tmp_path / "run")
    child.send_signal(signal.SIGINT)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=HANG_S)  # though its step is held
    assert child.returncode == 130
    assert finished(tmp_path / "run" / FOLDER) == []


@pytest.mark.merge
def test_a_terminal_that_hung_up_does_not_cost_the_step(world: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    child = _start(world, tmp_path / "run", stderr=theirs, start_new_session=True)
    os.close(theirs)
    os.close(ours)  # what is written to the terminal now fails
    child.send_signal(signal.SIGHUP)
    _end(child, tmp_path / "run")
    assert child.returncode == 130
    assert len(finished(tmp_path / "run" / FOLDER)) == 1


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            interrupts.patient = True
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupts.reason is None
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture
def _exits(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("megatrain.run.interrupts.os._exit", leave)


@pytest.fixture
def _handlers_stay() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_exits", "_handlers_stay")
def test_to_ranks_signals_at_once_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with Interrupts(shared=True) as interrupts:
        interrupts.patient = True
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.reason == "SIGTERM"
        monkeypatch.setattr("megatrain.run.interrupts.SAME_REQUEST_S", 0.0)
        with pytest.raises(SystemExit) as left:
            os.kill(os.getpid(), signal.SIGTERM)
        assert left.value.code == 130
    os.kill(os.getpid(), signal.SIGTERM)  # the launcher's, because another rank has ended


def test_without_a_step_the_first_is_obeyed_at_once() -> None:
    with pytest.raises(Interrupted, match="SIGTERM: stopped while no step") as left, Interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
    assert left.value.exit_code == 130


def _swallowing() -> None:
    with suppress(Exception):
        os.kill(os.getpid(), signal.SIGTERM)
    pytest.fail("the signal was swallowed")


def _renaming() -> None:
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException as error:
        raise ModelFolderError("cannot read its tokenizer") from error


@pytest.mark.parametrize("library", [_swallowing, _renaming])
def test_no_library_turns_a_signal_into_its_own_error(library: Callable[[], None]) -> None:
    with pytest.raises(Interrupted, match="SIGTERM: stopped while no step"), Interrupts():
        library()


@pytest.mark.parametrize("number", SIGNALS)
def test_handlers_are_what_they_were(number: signal.Signals) -> None:
    heard: list[int] = []
    before = signal.signal(number, lambda n, _: heard.append(n))
    try:
        with Interrupts():
            assert signal.getsignal(number) != before
        os.kill(os.getpid(), number)
        assert heard == [number]
    finally:
        signal.signal(number, before)


def test_outside_of_the_main_thread_signals_are_left_alone() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]

    def work() -> None:
        with Interrupts():
            assert [signal.getsignal(number) for number in SIGNALS] == before

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.fixture
def _quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts_module, "_WATCH_S", 0.01)


@pytest.mark.usefixtures("_quick_watch", "_exits")
def test_a_signal_after_the_watch_is_still_the_first() -> None:
    """The user has not asked yet: the save that the watch began is not thrown away."""
    with Interrupts(lambda: 0) as interrupts:
        interrupts.patient = True
        assert eventually(lambda: interrupts.reason)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.reason is not None
        assert "host memory" in interrupts.reason
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("_quick_watch")
def test_a_run_short_of_memory_ends_saved(world: Path, tmp_path: Path) -> None:
    from megatrain.run.trainer import Trainer

    config = config_of(world, tmp_path / "run", Setting(save_every=None), train={"steps": 10**6})
    with Interrupts(lambda: 0) as watch, Trainer(config, interrupts=watch) as trainer:
        with pytest.raises(Interrupted, match=r"host memory.*saved after step \d+; continue"):
            trainer.train()
        step = trainer.state.global_step
    (folder,) = finished(tmp_path / "run" / FOLDER)
    assert folder.name.startswith(f"step-{step:08}-")


@pytest.mark.parametrize(
    ("number", "told"), [(signal.SIGINT, "Press Ctrl-C again"), (signal.SIGTERM, "Press Ctrl-C to")]
)
def test_the_first_signal_says_what_ends_the_run_at_once(
    number: signal.Signals, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    interrupts = Interrupts()
    interrupts.patient = True
    with interrupts:
        os.kill(os.getpid(), number)
    assert f"{number.name}: finishing this step and saving. {told}" in capfd.readouterr().err
