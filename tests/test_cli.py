"""The command line answers at once, and a failure is one message and an exit code."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

import megatrain
from megatrain import __main__ as main_module
from megatrain.errors import DoesNotFit


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatrain", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_answers_in_under_300_ms(flag: str) -> None:
    # Processor time, and the least of a few: a busy machine must not decide. Nothing is waited for.
    times = []
    for _ in range(5):
        begin = _cpu_seconds()
        assert _run(flag).returncode == 0
        times.append(_cpu_seconds() - begin)
    assert min(times) < 0.3


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
    def fail(**_: object) -> None:
        raise DoesNotFit("host memory: too little")

    monkeypatch.setattr(main_module, "app", fail)
    with pytest.raises(SystemExit) as exit_info:
        main_module.main()
    assert exit_info.value.code == 3
    assert capsys.readouterr().err == "DoesNotFit [MT301]: host memory: too little\n"


def test_public_names() -> None:
    assert set(megatrain._HOMES) | {"__version__"} == set(megatrain.__all__)
    for name in megatrain.__all__:
        assert getattr(megatrain, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = megatrain.nothing
