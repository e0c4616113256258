"""Output that cannot be written: no traceback, and the exit code of what was done."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import typer

from megatrain.output import lasting_output
from testkit.patience import HANG_S

ESTIMATE = ("estimate", "Qwen/Qwen3-8B", "--gpu", "24GB", "--ram")


def _start(*words: str, stdout: int, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megatrain", *words]
    return subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("words", "code"),
    [(("--version",), 0), (("--help",), 0), ((*ESTIMATE, "192GB"), 0), ((*ESTIMATE, "16GB"), 3)],
    ids=["version", "help", "fits", "does not fit"],
)
def test_a_reader_who_leaves_changes_no_exit_code(words: tuple[str, ...], code: int) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    child = _start(*words, stdout=theirs)
    os.close(theirs)
    _, said = child.communicate(timeout=HANG_S)
    assert child.returncode == code, said
    assert "Traceback" not in said
    assert "BrokenPipe" not in said


@pytest.mark.parametrize("words", [("--version",), ("--help",), (*ESTIMATE, "192GB")], ids=str)
def test_a_full_disk_is_one_message(words: tuple[str, ...]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    child = _start(*words, stdout=full)
    os.close(full)
    _, said = child.communicate(timeout=HANG_S)
    assert child.returncode == 5
    assert said.startswith("DiskError [")
    assert said.endswith(
        "cannot write to standard output: No space left on device. Part of the output is lost.\n"
    )


@pytest.mark.merge
def test_a_full_disk_for_errors_keeps_the_exit_code() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    child = _start(*ESTIMATE, "16GB", stdout=subprocess.DEVNULL, stderr=full)
    os.close(full)
    assert child.wait(HANG_S) == 3


def test_a_label_is_on_each_line_of_stderr_and_stdout_is_silent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with lasting_output("rank 3: "):
        print("a result")
        print("one\ntwo", file=sys.stderr)
        sys.stderr.write("half ")
        sys.stderr.write("a line\n")
    print("after")
    assert capsys.readouterr() == ("after\n", "rank 3: one\nrank 3: two\nrank 3: half a line\n")


def test_libraries_see_that_streams_of_ranks_take_text(capfd: pytest.CaptureFixture[str]) -> None:
    """They try bytes, and would wrap a stream that takes them."""
    with lasting_output("rank 1: "):
        typer.echo("not heard")
        typer.echo("heard", err=True)
        for stream in (sys.stdout, sys.stderr):
            with pytest.raises(TypeError):
                stream.write(b"")  # type: ignore[arg-type]
    assert capfd.readouterr() == ("", "rank 1: heard\n")
