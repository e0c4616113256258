"""Laws of front_and_tail.py: the device is asked once, then only where the two disagree."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.batch import MicroBatch
from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.engine.compute.front_and_tail import Edges
from megatrain.memory.kinds import TensorKind
from megatrain.models.documents import BY_DOCUMENT
from megatrain.models.probing.host_answers import Answers
from megatrain.models.probing.stand_ins import Call, tensors_in
from megatrain.models.template import Template
from testkit.families import tiny_config
from testkit.plain import make_batch
from testkit.simulated.accelerator import Simulator
from testkit.simulated.watched import watched
from testkit.worlds import Case, Sort, World

# gemma2 changes its scores; gpt2 looks for padding itself; opt asks more in training than else.
FAMILIES = ("llama", "gemma2", "gpt2", "opt")
BATCHES: dict[str, dict[str, bool]] = {
    "plain": {},
    "padded": {"padded": True},
    "packed": {"packed": True},
}


@functools.cache
def world_of(family: str) -> World:
    return World(Sort(config=lambda: tiny_config(family)))


def micro_of(kind: str, seed: int, length: int = 12) -> MicroBatch:
    (micro,) = make_batch([(2, length)], seed=seed, **BATCHES[kind])
    return micro


class There:
    """A model's edges on a simulated accelerator, with the same on the host beside it."""

    def __init__(self, family: str, on_host: Template | None = None) -> None:
        world = world_of(family)
        self.world, self.simulator = world, Simulator(policy="late")
        self.device = AcceleratorDevice(self.simulator)
        self.on_host = Template(world.decoder)
        self.placed = self.on_host.placed(self.device.place)
        self.edges = Edges(on_host or self.on_host, self.placed)
        params = [param.name for param in world.decoder.params]
        self.weights = {name: world.store.param(name, TensorKind.HI) for name in params}
        self._there: dict[str, Tensor] = {}

    @contextmanager
    def lane(self) -> Iterator[None]:
        """Queue what follows, as lane compute does."""
        with watched(self.simulator), self.simulator.stream(), torch.no_grad():
            for name, weight in self.weights.items():
                self._there[name] = self.device.to_device(self.device.pinned(weight))
            yield
            self._there.clear()

    def micro(self, kind: str, seed: int) -> MicroBatch:
        """Return a micro-batch of the host, also inside a lane."""
        with self.simulator.bypassed:
            return micro_of(kind, seed)

    def front(self, micro: MicroBatch) -> tuple[Tensor, list[Call]]:
        inputs = {n: self.device.to_device(self.device.pinned(t)) for n, t in micro.inputs.items()}
        return self.edges.front(self._there, micro.inputs, inputs)

    def num_questions(self, micro: MicroBatch) -> int:
        """Return how often the front waits for the device."""
        before = self.simulator.num_syncs
        self.front(micro)
        return self.simulator.num_syncs - before

    def back(self, tensor: Tensor) -> Tensor:
        """Return what a device tensor holds."""
        brought = self.device.to_host(tensor)
        self.simulator.synchronize()
        return brought


def outcome(found: tuple[Tensor, list[Call]]) -> list[Tensor]:
    """Return the hidden states and every tensor among the layers' arguments."""
    hidden, calls = found
    return [hidden, *(t for call in calls for t in tensors_in([call.args, call.kwargs]))]  # type: ignore[list-item]


def same(there: There, found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(there.back(one), other) for one, other in zip(found, expected, strict=True)
    )


# Law 1: the device is asked the first time; answers are used where both agree.


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_fronts_are_those_of_the_host_and_only_the_first_asks(family: str, kind: str) -> None:
    there = There(family)
    micros = [micro_of(kind, seed, length) for seed, length in ((1, 12), (2, 12), (3, 9))]
    for micro in micros:
        with torch.no_grad():
            expected = outcome(there.on_host.front(there.weights, micro.inputs))
        with there.lane():
            assert same(there, outcome(there.front(micro)), expected)
    with there.lane():
        assert [there.num_questions(micro) for micro in micros] == [0, 0, 0]
    assert there.simulator.races == []
    assert there.simulator.failures == []


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_the_first_front_with_each_set_of_inputs_asks_the_device(kind: str) -> None:
    there = There("llama")
    with there.lane():
        assert there.num_questions(there.micro("plain", 1)) > 0
        assert there.num_questions(there.micro("plain", 2)) == 0
        assert there.num_questions(there.micro(kind, 1)) > 0
        assert there.num_questions(there.micro(kind, 2)) == 0
        assert there.num_questions(there.micro("plain", 3)) == 0


def test_answers_are_those_of_the_inputs_at_hand() -> None:
    """A mask without padding after one with it: other answers to the same questions."""
    there = There("llama")
    padded = micro_of("padded", 1)
    full = MicroBatch(
        input_ids=padded.input_ids,
        labels=padded.labels,
        attention_mask=torch.ones_like(padded.input_ids),
    )
    with there.lane():
        there.front(padded)
    for micro in (full, padded, full):
        with torch.no_grad():
            expected = outcome(there.on_host.front(there.weights, micro.inputs))
        with there.lane():
            assert same(there, outcome(there.front(micro)), expected)
    masks = [outcome(there.on_host.front(there.weights, m.inputs)) for m in (full, padded)]
    assert len(masks[0]) != len(masks[1])  # or the wrong answer would do as well


class Lying(Template):
    """A host that sees padding where there is none, and none where there is."""

    def front(
        self, weights: Any, inputs: Mapping[str, Any], rows: Tensor | None = None
    ) -> tuple[Tensor, list[Call]]:
        mask = torch.full_like(inputs["input_ids"], int("attention_mask" in inputs))
        return super().front(weights, {**inputs, "attention_mask": mask}, rows)


@pytest.mark.parametrize("kind", BATCHES)
def test_a_host_whose_answers_differ_is_never_used(kind: str) -> None:
    there = There("llama", on_host=Lying(world_of("llama").decoder))
    for seed in (1, 2, 3):
        micro = micro_of(kind, seed)
        with torch.no_grad():
            expected = outcome(there.on_host.front(there.weights, micro.inputs))
        with there.lane():
            assert same(there, outcome(there.front(micro)), expected)
    with there.lane():
        assert there.num_questions(micro) > 0


def test_trust_without_comparison_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    there = There("llama", on_host=Lying(world_of("llama").decoder))
    micro = micro_of("padded", 1)
    with there.lane():
        there.front(micro)
    monkeypatch.setattr(there.edges, "_trusted", dict.fromkeys(there.edges._trusted, True))
    with torch.no_grad():
        expected = outcome(there.on_host.front(there.weights, micro.inputs))
    with there.lane():
        assert there.num_questions(micro) == 0
        assert not same(there, outcome(there.front(micro)), expected)


def test_answers_to_other_questions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    there = There("llama")
    answers: Answers = [(torch.float32, 1.0)]
    with there.lane():
        there.front(there.micro("plain", 1))
        monkeypatch.setattr(there.edges, "_ask_host", lambda inputs: answers)
        with pytest.raises(AssertionError, match="the device got another question than"):
            there.front(there.micro("plain", 2))


# Questions of training and of evaluation.


def test_an_evaluation_asks_for_itself() -> None:
    """Modules may ask in one mode what they do not ask in the other."""
    there = There("opt")
    with there.lane():
        in_training = there.num_questions(there.micro("padded", 1))
        assert there.num_questions(there.micro("padded", 2)) == 0
        for template in (there.on_host, there.placed):
            template.model.eval()
        try:
            assert 0 < there.num_questions(there.micro("padded", 1)) < in_training
            assert there.num_questions(there.micro("padded", 2)) == 0
        finally:
            for template in (there.on_host, there.placed):
                template.model.train()
        assert there.num_questions(there.micro("padded", 3)) == 0


def test_a_tail_in_training_does_not_rely_on_what_an_evaluation_asked() -> None:
    there, asked = There("opt"), []
    hidden = torch.zeros(1, 5, there.on_host.bytes_per_token // 2).bfloat16()
    with there.lane():
        given = there.device.to_device(there.device.pinned(hidden))
        for training in (False, True, True):
            there.placed.model.train(training)
            before = there.simulator.num_syncs
            there.edges.tail(there._there, given)
            asked.append(there.simulator.num_syncs - before)
    assert asked[1] > asked[0]
    assert asked[2] == 0


def test_the_engine_evaluates_host_and_device_in_one_mode() -> None:
    world = world_of("opt")
    simulator = Simulator(policy="early")
    case = Case(sort="opt", steps=(), update="none")
    seen: list[tuple[bool, bool]] = []
    with watched(simulator):
        engine = world.engine(case, device=AcceleratorDevice(simulator), reference=True, lanes=None)
        edges = engine._machine.edges
        front = edges.front

        def noting(*args: Any) -> Any:
            models = (edges._on_host.model, edges._template.model)
            seen.append((models[0].training, models[1].training))
            return front(*args)

        edges.front = noting  # type: ignore[method-assign, assignment]
        batch = make_batch([(1, 6)])
        with engine, simulator.stream():
            engine.evaluate(batch)
            engine.step(batch)
    assert seen == [(False, False), (True, True), (True, True)]


# Tail and scores: what the device said once, it would say again.


@pytest.mark.parametrize("family", FAMILIES)
def test_tails_and_scores_are_those_of_the_host_and_only_the_first_asks(family: str) -> None:
    there = There(family)
    template, asked = there.on_host, []
    width = template.bytes_per_token // 2
    with there.lane():
        for number, shape in enumerate(((2, 5), (2, 5), (1, 7), (2, 5))):
            with there.simulator.bypassed:
                torch.manual_seed(number)
                hidden = torch.randn(*shape, width).bfloat16()
                logits = torch.randn(shape[1], 320).bfloat16()
                rows = template.tail(there.weights, hidden)
                scores = template.scores(logits)
            given = there.device.to_device(there.device.pinned(hidden))
            given_logits = there.device.to_device(there.device.pinned(logits))
            before = there.simulator.num_syncs
            found = there.edges.tail(there._there, given)
            found_scores = there.edges.scores(given_logits)
            asked.append(there.simulator.num_syncs - before)
            assert torch.equal(there.back(found), rows)
            assert torch.equal(there.back(found_scores), scores)
    assert asked[1:] == [0, 0, 0], "of a new shape the host knows the answers"
    # Most questions are about masks, which most models can do without there.
    assert asked[0] > 0 or family in BY_DOCUMENT


# Law 2: a device without its own memory has one run.


def test_without_memory_of_its_own_there_is_one_run_and_nothing_to_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = world_of("llama")
    template = Template(world.decoder)
    weights = {p.name: world.store.param(p.name, TensorKind.HI) for p in world.decoder.params}
    edges, runs = Edges(template, template), list[str]()

    def noting(part: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            runs.append(part)
            return run(*args)

        return noted

    for part in ("front", "tail", "scores"):
        monkeypatch.setattr(template, part, noting(part, getattr(template, part)))
    micro = micro_of("padded", 1)
    for _ in range(2):
        hidden, _ = edges.front(weights, micro.inputs, micro.inputs)
        rows = edges.tail(weights, hidden)
        edges.scores(rows)
    assert runs == ["front", "tail", "scores"] * 2
    assert edges._trusted == {}
    assert edges._remembered == {}
