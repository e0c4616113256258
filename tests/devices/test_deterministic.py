"""Laws of deterministic.py: switches of the process are held together, and put back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP

from megatrain.devices.deterministic import WORKSPACE, Switch, deterministic_kernels, unfilled
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError
from testkit.worlds import Case, make_batch, world_of

CASE = Case(sort="llama of 2 layers", steps=(((1, 4), (2, 3)), ((1, 5),)), update="late")
Found = tuple[bool, bool, bool, str | None]


def switches() -> Found:
    settings: Any = torch.utils.deterministic
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        settings.fill_uninitialized_memory,
        os.environ.get(WORKSPACE),
    )


ON: Found = (True, False, False, ":4096:8")


@pytest.fixture(autouse=True)
def _usual(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(WORKSPACE, raising=False)
    before = switches()[:3]
    yield
    assert switches()[:3] == before, "every test ends as it began"


def engine(*, deterministic: bool = True) -> Engine:
    return world_of(CASE.sort).engine(CASE, deterministic=deterministic, lanes=None)


def test_the_switches_are_on_while_anyone_holds_them_and_then_as_they_were() -> None:
    before = switches()
    assert before != ON
    with deterministic_kernels:
        with suppress(ZeroDivisionError), unfilled, deterministic_kernels:
            assert switches() == ON
            raise ZeroDivisionError
        assert switches() == ON
    assert switches() == before


def test_what_the_user_has_set_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":16:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        before = switches()
        with deterministic_kernels:
            assert switches() == (*ON[:3], ":16:8")
        assert switches() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_switch_that_cannot_be_turned_is_held_by_nobody() -> None:
    turned: list[str] = []

    def turn() -> Any:
        turned.append("on")
        if len(turned) == 1:
            raise ZeroDivisionError
        return lambda: turned.append("off")

    switch = Switch(turn)
    with pytest.raises(ZeroDivisionError), switch:
        pass
    with switch, switch:
        assert turned == ["on", "on"]
    assert turned == ["on", "on", "off"]


def test_engines_hold_them_from_the_first_to_the_last_close_in_any_order() -> None:
    before = switches()
    with engine(deterministic=False):
        assert switches() == before
    first, second = engine(), engine()
    first.step(make_batch(CASE.steps[0], seed=0))
    first.close()
    first.close()
    assert switches() == ON, "the second engine is open"
    second.close()
    assert switches() == before


def test_an_engine_that_cannot_be_made_holds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise MemoryError

    before = switches()
    monkeypatch.setattr("megatrain.engine.engine.build_machine", fails)
    with pytest.raises(MemoryError):
        engine()
    assert switches() == before


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_kernel_that_torch_does_not_have_is_named(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LlamaMLP.forward

    def scattering(module: LlamaMLP, hidden: Tensor) -> Any:
        torch.zeros(2).put_(torch.tensor([1]), torch.ones(1))
        return forward(module, hidden)

    monkeypatch.setattr(LlamaMLP, "forward", scattering)
    with engine(deterministic=deterministic) as made:
        if not deterministic:
            assert made.step(make_batch(CASE.steps[0], seed=0)).applied
            return
        text = r"^train.deterministic is true: put_ does not have .* Set train.deterministic to fal"
        with pytest.raises(ConfigError, match=text) as caught:
            made.step(make_batch(CASE.steps[0], seed=0))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_other_errors_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(module: LlamaMLP, hidden: Tensor) -> Any:
        raise RuntimeError("another cause")

    monkeypatch.setattr(LlamaMLP, "forward", fails)
    with engine() as made, pytest.raises(RuntimeError, match=r"^another cause"):
        made.step(make_batch(CASE.steps[0], seed=0))
