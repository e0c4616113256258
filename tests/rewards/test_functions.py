"""Laws of functions.py: every way in which a function of the user can fail is named, in time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatrain.config.sections import RewardSettings
from megatrain.errors import RewardError
from megatrain.rewards.functions import RewardFunctions
from testkit.patience import eventually

SOURCE = """
import os, pathlib, signal, subprocess, threading, time

def length(rows, texts):
    print("a word on stdout that is no answer")
    return [len(text) for text in texts]

def right(rows, texts):
    return [float(text == row["answer"]) for row, text in zip(rows, texts)]

def whole(rows, texts, ended):
    return [float(one) for one in ended]

def raises(rows, texts):
    return 1 / 0

def loops(rows, texts):
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path("pids").write_text(f"{os.getpid()} {child.pid}")
    while True:
        time.sleep(0.01)

def nan(rows, texts):
    return [0.0, float("nan")]

def text(rows, texts):
    return [1.0, "good"]

def word(rows, texts):
    return "good"

def one(rows, texts):
    return [1.0]

def none(rows, texts):
    return [None, None]

def dies(rows, texts):
    os._exit(7)

def forks(rows, texts):
    os.fork()
    return [len(text) for text in texts]

def stands(rows, texts):
    def later():
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Thread(target=later, daemon=True).start()
    return [0.0] * len(texts)

def shuts(rows, texts):
    os.closerange(3, 256)
    time.sleep(600)
"""
ROWS = ({"answer": "ab"}, {"answer": "cd"})
TEXTS = ("ab", "x")
ENDED = (True, False)


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("given.py").write_text(SOURCE)
    Path("broken.py").write_text("import nothing_of_this_name\n")


def functions(*names: Any, timeout: float = 30.0) -> RewardFunctions:
    return RewardFunctions(RewardSettings(functions=names, timeout=timeout))


def test_the_reward_is_the_weighted_sum() -> None:
    weighted = {"function": "given.py:length", "weight": -0.5}
    with functions("given.py:right", weighted) as both:
        for _ in range(2):
            found = both(ROWS, TEXTS, ENDED)
            assert found.total == (1.0 - 0.5 * 2, 0.0 - 0.5 * 1)
            assert found.means == {"right": 0.5, "length": 1.5}


def test_a_function_may_ask_which_texts_were_cut_off() -> None:
    with functions("given.py:whole") as whole:
        assert whole(ROWS, TEXTS, ENDED).total == (1.0, 0.0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", r"raised ZeroDivisionError: division by zero \(given.py, line 15\)"),
        ("nan", "returned nan for text 1, 'x'; return a finite number"),
        ("text", "returned 'good' for text 1, 'x'; return a number"),
        ("word", "returned 'good'; return a list with a number for each text"),
        ("one", "returned 1 rewards for 2 texts"),
        ("none", "returned None for text 0"),
        ("dies", "ended its process with exit code 7"),
    ],
)
def test_a_function_that_fails_is_named(name: str, said: str) -> None:
    with (
        functions("given.py:right", f"given.py:{name}") as found,
        pytest.raises(RewardError, match=f"the reward function given.py:{name} {said}"),
    ):
        found(ROWS, TEXTS, ENDED)


def test_a_function_that_loops_is_named_and_nothing_of_it_is_left() -> None:
    with (
        functions("given.py:loops", timeout=1.5) as found,
        pytest.raises(RewardError, match=r"given.py:loops has not returned within 1.5 s"),
    ):
        found(ROWS, TEXTS, ENDED)
    pids = [int(pid) for pid in Path("pids").read_text().split()]
    assert eventually(lambda: not any(map(_lives, pids)))


def test_a_function_that_forks_answers_once() -> None:
    with functions("given.py:forks") as found:
        for texts in (("a", "bc"), ("def", "g"), ("", "hijk")):
            assert found(ROWS, texts, ENDED).total == tuple(map(len, texts))


def test_a_function_that_reads_no_more_is_named_in_time() -> None:
    with functions("given.py:stands", timeout=1.0) as found:
        found(ROWS, TEXTS, ENDED)
        assert eventually(lambda: _state(found._workers[0]._process.pid) == "T")
        with pytest.raises(RewardError, match=r"given.py:stands has not returned within 1 s"):
            found(ROWS, ("x" * (1 << 20), ""), ENDED)  # more than a pipe takes


def test_a_function_that_shuts_its_pipes_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.rewards.functions._ENDING_S", 0.2)
    with (
        functions("given.py:shuts") as found,
        pytest.raises(RewardError, match=r"given.py:shuts closed the pipes of its process"),
    ):
        found(ROWS, TEXTS, ENDED)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return _state(pid) != "Z"


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent.py:f", "there is no file"),
        ("given.py:absent", "cannot be loaded: raised AttributeError: .* has no function absent"),
        ("broken.py:f", r"ModuleNotFoundError: .*nothing_of_this_name.* \(broken.py, line 1\)"),
    ],
)
def test_what_cannot_be_loaded_is_refused_at_once(name: str, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        functions("given.py:right", name)
