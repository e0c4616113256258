"""Laws of host_answers.py: the answers of a model's own code, without its large tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.models.probing import host_answers
from megatrain.models.probing.host_answers import (
    LARGE_ELEMENTS,
    Answers,
    CannotWait,
    answers_alone,
)
from megatrain.models.template import Template
from testkit.cases import at_a_push
from testkit.families import FAMILIES, tiny_config
from testkit.plain import make_batch
from testkit.worlds import Sort, World


class Everything(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hears the same questions, of code that computes all."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.answers: Answers = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is host_answers.QUESTION:
            self.answers.append((args[0].dtype, result))
        return result


def answers_in_full(run: Callable[[], object]) -> Answers:
    everything = Everything()
    with torch.no_grad(), everything:
        run()
    return everything.answers


def heard(run: Callable[[], object]) -> Answers:
    with torch.no_grad():
        return answers_alone(run)


def asks(tensor: Tensor) -> bool:
    return bool(tensor.any())


MANY = 2 * LARGE_ELEMENTS


def chain() -> None:
    small = torch.arange(MANY // 64)
    table = small[:, None] * torch.ones(64)  # large: not computed
    asks(table.cumsum(0).max() > 4.0)
    asks((table == 7.0).any())


def written() -> None:
    noise = torch.empty(MANY).fill_(3.0).mul_(torch.full((MANY,), 2.0))
    asks((noise == 6.0).all())
    two = torch.split(noise, MANY // 2)
    asks(two[1].sum() == 6.0 * MANY / 2)


def views() -> None:
    mask = torch.zeros(MANY, dtype=torch.int64)
    part = mask.view(2, -1)[1]
    asks(part)
    values, places = torch.sort(torch.arange(MANY).flip(0))
    asks(places[0] == MANY - 1)
    asks(values[0] == 0)


@pytest.mark.parametrize("run", [chain, written, views])
def test_answers_are_those_of_code_that_computes_all(run: Callable[[], None]) -> None:
    expected = answers_in_full(run)
    assert len(expected) > 0
    assert heard(run) == expected


def test_what_is_not_asked_about_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    compute = host_answers._computed

    def noting(value: Any) -> Any:
        if isinstance(value, host_answers._Later):
            computed.append(value.numel())
        return compute(value)

    def run() -> None:
        hidden = torch.ones(64)[:, None] * torch.ones(LARGE_ELEMENTS)
        torch.nn.functional.layer_norm(hidden, (LARGE_ELEMENTS,)) @ hidden.T.float()
        asks(torch.arange(5) > 3)

    monkeypatch.setattr(host_answers, "_computed", noting)
    assert heard(run) == [(torch.bool, True)]
    assert computed == []
    heard(chain)
    assert computed, "or nothing would be noticed"


def test_a_tensor_that_others_wait_for_is_not_written() -> None:
    def writes_what_is_needed() -> None:
        small = torch.ones(LARGE_ELEMENTS // 2)
        table = small[:, None] * torch.ones(4)
        small.zero_()
        asks(table)

    def writes_what_is_put_off() -> None:
        table = torch.ones(MANY)
        double = table * 2
        table.zero_()
        asks(double)

    for run in (writes_what_is_needed, writes_what_is_put_off):
        with pytest.raises(CannotWait):
            heard(run)


@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("family", at_a_push(FAMILIES, 3))
def test_the_fronts_of_families_ask_the_same(
    family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(Sort(config=lambda: tiny_config(family)))
    template = Template(world.decoder)
    (micro,) = make_batch([(2, 12)], seed=1, packed=kind == "packed", padded=kind == "padded")

    def run() -> None:
        template.front({}, micro.inputs)

    expected = answers_in_full(run)
    monkeypatch.setattr(host_answers, "LARGE_ELEMENTS", 16)
    with suppress(CannotWait):  # then it is run in full
        assert heard(run) == expected
