"""The command line answers at once, and a failure is one message and an exit code."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

import megatrain
from megatrain import __main__ as main_module
from megatrain.errors import DoesNotFit


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatrain", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_answers_in_under_300_ms(flag: str) -> None:
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        result = _run(flag)
        times.append(time.perf_counter() - begin)
        assert result.returncode == 0, result.stderr
    assert min(times) < 0.3  # the least: other work on the machine is not what is measured


def test_version() -> None:
    assert _run("--version").stdout.strip() == f"megatrain {megatrain.__version__}"


def test_heavy_libraries_are_not_imported_for_help() -> None:
    code = "import sys, megatrain.cli; print({'torch', 'transformers'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"


def test_an_error_of_ours_is_a_message_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise DoesNotFit("host memory: too little")

    monkeypatch.setattr(main_module, "app", fail)
    with pytest.raises(SystemExit) as exit_info:
        main_module.main()
    assert exit_info.value.code == 3
    assert capsys.readouterr().err == "DoesNotFit [MT301]: host memory: too little\n"


def test_public_names() -> None:
    for name in megatrain.__all__:
        assert getattr(megatrain, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = megatrain.nothing
