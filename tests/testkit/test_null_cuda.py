"""The null device, as far as it goes without torch's CUDA build: its table and its laws.

With that build they are held by `python -m proofs.null_cuda` (.ci/run).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proofs.null_cuda.__main__ import LAWS, is_kept, summary
from proofs.null_cuda.cases import CASES, MUTANTS, SHORT
from testkit.null_cuda import environment
from testkit.null_cuda.building import Answer, _stubs, read_table
from testkit.null_cuda.environment import LOCK, NoEnvironment, make_environment
from testkit.null_cuda.library import Call, Counts


def test_a_stub_answers_as_the_first_line_that_fits_says() -> None:
    wanted = {
        "cublasCreate_v2", "cublasGemmEx", "cublasSetStream_v2", "cudnnGetVersion", "ncclSend",
        "ncclCommSplit", "cudaMalloc", "fwrite",
    }  # fmt: skip
    stubs = "\n".join(_stubs(wanted - {"cudaMalloc"}, {"cudaMalloc", "cuCtxSetCurrent"}))
    for line in (
        "int cublasCreate_v2(void** made) { *made = null_cuda_handle(); return 0; }",
        'int cublasGemmEx() { null_cuda_count("product"); return 0; }',
        "int cublasSetStream_v2() { return 0; }",
        'int ncclSend() { null_cuda_count("collective"); return 0; }',
        "int ncclCommSplit(void*, void*, void*, void** made) { *made = null_cuda_handle();",
        "int cuModuleUnload() { return 0; }",
    ):
        assert line in stubs
    for absent in ("cudnnGetVersion", "cudaMalloc", "fwrite", "cuCtxSetCurrent"):
        assert absent not in stubs


def test_the_table_has_no_line_that_an_earlier_one_hides() -> None:
    table = read_table()
    for number, line in enumerate(table):
        hidden = [one.name for one in table[:number] if one.fits(line.name.rstrip("*"))]
        assert not hidden, f"{line.name} behind {hidden}"
    assert Answer("cublas*", ("success",), "").fits("cublasGemmEx")


def test_an_environment_that_cannot_be_made_is_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGATRAIN_CI_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(NoEnvironment, match=r"^-m venv .*: .*No such file"):
        make_environment()
    assert environment.main() == environment.UNAVAILABLE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("the environment of testkit/null_cuda cannot be made: -m venv")

    def slow(command: list[str], **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, 1.0)

    monkeypatch.setattr(subprocess, "run", slow)
    with pytest.raises(NoEnvironment, match="did not end in time"):
        make_environment()
    assert environment.find_python() is None


def test_an_environment_that_was_made_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_CI_CACHE", str(tmp_path))
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> None:
        commands.append(command)
        environment.environment_folder().mkdir(exist_ok=True)

    monkeypatch.setattr(subprocess, "run", run)
    python = make_environment()
    assert python == environment.find_python()
    torch = next(line for line in LOCK.read_text().splitlines() if line.startswith("torch=="))
    assert commands[1][-1] == torch, "before all that could ask for another one"
    assert len(commands) == 4
    make_environment()
    assert len(commands) == 4


CLEAN = Counts(
    (Call("launch", "lane compute", 1, True, 9), Call("cudaEventSynchronize", "main", 1, True, 2)),
    {"16": frozenset({"lane compute"}), "32": frozenset({"lane out"})},
)


def test_a_clean_step_has_nothing_to_report() -> None:
    counted = (CLEAN.host_waits, CLEAN.pageable_copies, CLEAN.foreign_calls(1))
    assert (*counted, CLEAN.shared_streams, CLEAN.launches) == (0, 0, 0, 0, 9)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (Call("cudaStreamSynchronize", "lane out", 1, True, 3), (3, 0, 0)),
        (Call("pageable copy in", "main", 1, True, 2), (0, 2, 0)),
        (Call("cudaEventQuery", "watcher out", 0, True, 1), (0, 0, 1)),
        (Call("cudaEventQuery", "watcher out", 1, False, 4), (0, 0, 4)),
    ],
)
def test_each_call_that_must_not_be_is_counted(call: Call, expected: tuple[int, int, int]) -> None:
    found = Counts((*CLEAN.calls, call), CLEAN.streams)
    assert (found.host_waits, found.pageable_copies, found.foreign_calls(1)) == expected


def test_a_stream_of_two_threads_is_counted() -> None:
    shared = {**CLEAN.streams, "48": frozenset({"lane compute", "lane out"})}
    assert Counts(CLEAN.calls, shared).shared_streams == 1


RESULT = {"case": "packed", **dict.fromkeys(LAWS, 0), "grows": False} | {
    "peak_over_plan": 0.95,
    "plan_over_peak": 1.05,
}
FURTHER = {"mutants": 4, "mutants_caught": 4}


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, True),
        *(({law: 1}, False) for law in LAWS),
        ({"grows": True}, False),
        ({"error": "RuntimeError"}, False),
        ({"peak_over_plan": 1.01}, False),
        ({"plan_over_peak": 1.11}, False),
    ],
)
def test_a_law_that_one_case_breaks_is_broken(change: dict[str, Any], kept: bool) -> None:
    figures = summary([RESULT, RESULT | change])
    assert figures["cases"] == 2
    assert is_kept({**figures, **FURTHER}) is kept


def test_a_mutant_that_is_not_noticed_breaks_the_proof() -> None:
    assert not is_kept({**summary([RESULT]), **FURTHER, "mutants_caught": 3})
    assert len({mutant.breaks for mutant in MUTANTS}) == len(MUTANTS) == 4


def test_cases_have_names() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert {*SHORT, *(mutant.case for mutant in MUTANTS)} <= set(names)
