"""Errors: a closed list, each with its own code and an exit code that scripts can rely on."""

from __future__ import annotations

from megatrain import errors
from megatrain.errors import MegaTrainError, ModelFolderError, listing


def _classes() -> list[type[MegaTrainError]]:
    return [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, MegaTrainError)
    ]


def test_codes_are_unique_and_name_the_exit_code() -> None:
    codes = [error.code for error in _classes()]
    assert len(codes) == len(set(codes)) > 5
    for error in _classes()[1:]:
        assert error.code.startswith(f"MT{error.exit_code}"), error.__name__


def test_every_error_says_what_it_is() -> None:
    assert all(error.__doc__ for error in _classes())


def test_long_lists_are_cut() -> None:
    assert listing(["b", "a"]) == "a, b"
    assert listing(map(str, range(10)), most=2) == "0, 1, and 8 more"


def test_a_message_cannot_steer_a_terminal() -> None:
    error = ModelFolderError("tensor \x1b]0;owned\x07 \ud800 \u202e\r\nsays \u00e9")
    assert str(error) == "tensor \\x1b]0;owned\\x07 \\ud800 \\u202e\\r\nsays \u00e9"
