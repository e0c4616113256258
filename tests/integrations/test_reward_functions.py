"""Invariants of reward_functions.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import ConfigError, RewardError
from megatrain.integrations.reward_functions import load_reward_functions

FUNCTIONS = """
from beside import LENGTH

def long(completions, answer, **_):
    return [float(len(text) > LENGTH) + int(a) for text, a in zip(completions, answer)]

def some(completions, **_):
    return [1.0, None]

def broken(completions, **_):
    return [1 / 0]

def one(completions, **_):
    return [1.0]

def nan(completions, **_):
    return [1.0, float("nan")]

def text(completions, **_):
    return "ab"

async def later(completions, **_):
    return [1.0]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / f"rewards_{tmp_path.name}.py"
    (tmp_path / "beside.py").write_text("LENGTH = 2\n")
    path.write_text(FUNCTIONS)
    return path


def call(file: Path, name: str) -> Any:
    (function,) = load_reward_functions([f"{file}:{name}"])
    return function(completions=["a", "abc"], answer=["3", "4"], prompts=["", ""])


def test_functions_have_names_and_weights_and_get_the_columns(file: Path) -> None:
    long, some = load_reward_functions([f"{file}:long", f"{file}:some=0.25"])
    assert (long.weight, some.weight, long.__name__) == (1.0, 0.25, "long")
    assert call(file, "long") == [3.0, 5.0]
    assert call(file, "some") == [1.0, None]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", r":broken raised ZeroDivisionError: division by zero \(rewards_.*, line 11\)"),
        ("one", ":one returned 1 rewards for 2 completions"),
        ("nan", ":nan returned nan for completion 1; return a finite number"),
        ("text", ":text returned 'ab'; return a list"),
    ],
)
def test_what_is_no_reward_is_named(file: Path, name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        call(file, name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("rewards.py", "rewards.py:correct is one"),
        ("FILE:long=much", "with a weight rewards.py:short=0.1"),
        ("none.py:long", "there is no file none.py in"),
        ("FILE:short", "has no function short"),
        ("FILE:later", "later is async"),
    ],
)
def test_names_that_are_none_are_refused(file: Path, given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_reward_functions([given.replace("FILE", str(file))])


def test_a_file_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    path = tmp_path / "unfinished.py"
    path.write_text("import nothing_of_this_name\n")
    with pytest.raises(RewardError, match=r"unfinished.py cannot be loaded: ModuleNotFoundError"):
        load_reward_functions([f"{path}:long"])
