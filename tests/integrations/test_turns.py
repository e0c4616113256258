"""Laws of tasks that run in turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.batch import MicroBatch
from megatrain.integrations.turns import Call, ask, take_turns
from megatrain.losses.leaves import TokenOutputs


class Model:
    """Answers each call with its first token, and notes which calls came together."""

    def __init__(self) -> None:
        self.together: list[tuple[bool, list[int]]] = []

    def answer(self, calls: Sequence[Call]) -> list[TokenOutputs]:
        tokens = [call.micro.input_ids for call in calls]
        assert len({call.trains for call in calls}) == 1
        self.together.append((calls[0].trains, [int(one[0, 0]) for one in tokens]))
        return [TokenOutputs(logprobs=one.float()) for one in tokens]

    def __call__(self, token: int, *, trains: bool) -> Tensor:
        ids = torch.tensor([[token]])
        micro = MicroBatch(input_ids=ids, labels=ids)
        return ask(Call(model=self, micro=micro, trains=trains), self.answer).logprobs


def tasks_of(model: Model, lines: list[str]) -> list[Callable[[], float]]:
    """Return three tasks: each calls without a gradient, with one, and without one again."""

    def task(number: int) -> float:
        lines.append(f"{number} begins")
        before = float(model(number, trains=False))
        found = float(model(10 + number, trains=True))
        lines.append(f"{number} has its loss")
        return before + found

    return [partial(task, number) for number in range(3)]


def test_calls_are_answered_together_and_those_that_train_last() -> None:
    model, lines = Model(), list[str]()
    assert take_turns(tasks_of(model, lines), model.answer) == [10.0, 12.0, 14.0]
    assert model.together == [(False, [0, 1, 2]), (True, [10, 11, 12])]
    assert lines == [f"{n} begins" for n in range(3)] + [f"{n} has its loss" for n in range(3)]


def test_one_by_one_a_task_is_ready_to_train_before_the_next_begins() -> None:
    model, lines = Model(), list[str]()
    take_turns(tasks_of(model, lines), model.answer, one_by_one=True)
    assert model.together == [(False, [0]), (False, [1]), (False, [2]), (True, [10, 11, 12])]


def test_calls_of_two_models_are_answered_apart() -> None:
    one, other = Model(), Model()

    def answer(calls: Sequence[Call]) -> list[TokenOutputs]:
        found: list[TokenOutputs] = calls[0].model.answer(calls)
        return found

    take_turns([partial(model, 7, trains=False) for model in (one, other, one)], answer)
    assert (one.together, other.together) == ([(False, [7, 7])], [(False, [7])])


def failing_task() -> None:
    raise ValueError("the second loss")


def failing_answer(calls: Sequence[Call]) -> Any:
    raise ValueError("the answer")


@pytest.mark.parametrize("fails", ["the second loss", "the answer"])
def test_an_error_ends_all_tasks(fails: str) -> None:
    model, ended = Model(), list[int]()

    def task(number: int) -> None:
        try:
            model(number, trains=True)
        finally:
            ended.append(number)

    is_task = fails == "the second loss"
    second = failing_task if is_task else lambda: task(1)
    before = threading.active_count()
    with pytest.raises(ValueError, match=fails):
        take_turns([lambda: task(0), second], model.answer if is_task else failing_answer)
    assert ended == ([0] if is_task else [0, 1])
    assert threading.active_count() == before
