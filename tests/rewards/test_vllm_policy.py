"""Laws of vllm_policy.py: against the worker file of vLLM's side, in a server on the loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import megatrain as mt
from megatrain.errors import ConfigError, GeneratorError
from megatrain.rewards import vllm_server
from megatrain.rewards.vllm_policy import VllmPolicy
from megatrain.rewards.vllm_server import StartedServer, VllmServer
from testkit.completions_on_loopback import drawn_apart
from testkit.families import save_tiny
from testkit.vllm_on_loopback import Ended, Vllm, vllm_on_loopback

PROMPTS = [[5, 6, 7, 8], [9, 10]]


class World:
    """A trainer, and the server that draws for it."""

    def __init__(self, home: mt.HostModel, engine: mt.Engine, vllm: Vllm) -> None:
        self.home, self.engine, self.vllm = home, engine, vllm
        self.policy = VllmPolicy(address=vllm.address)
        self.version = 0

    def train(self) -> None:
        """Stand for a step: other weights."""
        for place in self.home.store.layout.places:
            self.home.store.param(place, mt.Kind.HI).mul_(1.25)
        self.version += 1

    def update(self) -> None:
        self.policy.update(self.engine, self.home, self.version)

    def drawn(self) -> list[mt.Rollout]:
        return self.policy.draw(PROMPTS, max_new_tokens=5, num_samples=2, seed=3)

    def expected(self) -> list[mt.Rollout]:
        return drawn_apart(self.engine, PROMPTS, max_new_tokens=5, num_samples=2, seed=3)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    save_tiny(tmp_path, "llama")
    home = mt.load_model(tmp_path, dtype="fp32")
    with vllm_on_loopback(tmp_path) as vllm, mt.Engine(home.decoder, home.store) as engine:
        made = World(home, engine, vllm)
        yield made
        made.policy.close()


def test_answers_are_those_of_the_weights_of_the_last_update(world: World) -> None:
    for _ in range(2):
        world.train()
        world.update()
        assert world.drawn() == world.expected()
    world.train()
    assert world.drawn() != world.expected()  # until the next update
    for call in ("pause", "megatrain_load", "reset_prefix_cache", "resume"):
        assert world.vllm.calls.count(call) == 2
    loads = [call for call in world.vllm.calls if call in ("pause", "resume") or "load" in call]
    assert loads == ["pause", "megatrain_load", "resume"] * 2


def test_a_server_must_report_log_probabilities_at_the_temperature(world: World) -> None:
    world.update()
    (drawn, *_) = world.policy.draw(PROMPTS, max_new_tokens=5, temperature=0.7, seed=3)
    assert drawn.logprobs != world.drawn()[0].logprobs
    world.vllm.tempered = False
    other = VllmPolicy(address=world.vllm.address)
    other.update(world.engine, world.home, 1)
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        other.draw(PROMPTS, max_new_tokens=5, temperature=0.7)
    assert other.draw(PROMPTS, max_new_tokens=5)  # at 1 both are the same
    other.close()


def test_adapters_are_merged(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    home = mt.load_model(tmp_path, lora=mt.Lora(rank=2, alpha=4))
    with vllm_on_loopback(tmp_path, "bf16") as vllm, mt.Engine(home.decoder, home.store) as engine:
        world = World(home, engine, vllm)
        world.update()
        before = world.drawn()
        for name in home.store.layout.places:
            if "lora_" in name:
                home.store.param(name, mt.Kind.HI).fill_(0.5)
        world.update()
        assert world.drawn() != before
        world.policy.close()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda shared: shared._map.__setitem__(-200, 7), "1 of 39 tensors"),
        (lambda shared: shared._count(3), "refused the weights: version 2"),
        (lambda shared: shared._count(2), "weights are of version 1"),
    ],
)
def test_weights_that_are_not_those_of_the_update_are_noticed(
    world: World, spoil: Callable[[object], None], message: str
) -> None:
    world.update()
    world.train()
    world.vllm.meanwhile = lambda call: (
        spoil(world.policy._copy) if call == "megatrain_load" else None
    )
    with pytest.raises(GeneratorError, match=message):
        world.update()
    assert world.vllm.paused
    world.vllm.meanwhile = lambda call: None
    with pytest.raises(GeneratorError, match="its last update has failed"):
        world.drawn()
    world.update()
    assert world.drawn() == world.expected()


def test_weights_that_change_while_the_worker_reads_end_it(world: World) -> None:
    world.update()
    model = world.vllm.worker.model_runner.get_model()
    load, shared = model.load_weights, world.policy._copy
    assert shared is not None

    def written_meanwhile(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        load(weights)
        shared._count(2 * shared.version + 1)

    model.load_weights = written_meanwhile
    with pytest.raises(GeneratorError, match="does not answer"):
        world.update()
    assert world.vllm.ended
    with pytest.raises(GeneratorError, match="its last update has failed"):
        world.drawn()


def test_a_server_that_keeps_its_caches_is_not_used(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "_RESET_S", 0.0)
    world.vllm.resets = False
    with pytest.raises(GeneratorError, match="keeps keys and values of older weights"):
        world.update()
    assert world.vllm.paused


def test_an_answer_during_which_another_trainer_came_is_refused(world: World) -> None:
    world.update()
    other = VllmPolicy(address=world.vllm.address)

    def come(call: str) -> None:
        if call == "v1/completions":
            world.vllm.meanwhile = lambda call: None
            other.update(world.engine, world.home, 0)  # even with the same weights

    world.vllm.meanwhile = come
    with pytest.raises(GeneratorError, match=r"another trainer uses it.* No answer of it was"):
        world.drawn()
    with pytest.raises(GeneratorError, match="another trainer uses it"):
        world.drawn()
    other.close()


def test_a_trainer_that_died_is_followed_by_another(world: World) -> None:
    world.update()
    world.vllm.paused = True  # it died between pause and load
    later = World(world.home, world.engine, world.vllm)
    later.train()
    later.update()
    assert later.drawn() == later.expected()
    later.policy.close()


class Mortal(StartedServer):
    """A server of ours, as far as the policy knows."""

    def __init__(self, vllm: Vllm) -> None:
        VllmServer.__init__(self, vllm.address, "policy")
        self.vllm = vllm
        vllm.ended = False
        vllm.worker.megatrain_label = None

    def is_healthy(self) -> bool:
        return not self.vllm.ended

    def stop(self) -> None:
        self.vllm.ended = True


@pytest.mark.parametrize("dies_at", ["megatrain_load", "v1/completions", "megatrain_state"])
def test_a_server_of_ours_that_dies_is_started_again(
    world: World, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    policy, starts, deaths = world.policy, list[Mortal](), [1]

    def start() -> Mortal:
        starts.append(Mortal(world.vllm))
        return starts[-1]

    def die(call: str) -> None:
        if call == dies_at and deaths[0]:
            deaths[0] -= 1
            world.vllm.ended = True
            raise Ended

    monkeypatch.setattr(policy, "_found", start)
    world.update()
    world.train()
    world.vllm.meanwhile = die
    world.update()
    assert world.drawn() == world.expected()
    assert (len(starts), deaths) == (2, [0])
    deaths[0] = 2
    with pytest.raises(GeneratorError, match="does not answer"):  # noqa: PT012  # one of the two
        world.update()
        world.drawn()
    assert len(starts) == 3


def test_another_model_is_refused_before_anything_is_touched(world: World, tmp_path: Path) -> None:
    world.update()
    save_tiny(tmp_path / "other", "llama", num_hidden_layers=2)
    home = mt.load_model(tmp_path / "other", dtype="fp32")
    other = VllmPolicy(address=world.vllm.address)
    with (
        mt.Engine(home.decoder, home.store) as engine,
        pytest.raises(GeneratorError, match=r"its parameters without tensors of ours \['model.la"),
    ):
        other.update(engine, home, 0)
    other.close()
    world.vllm.paused = False
    assert world.drawn() == world.expected()


def test_an_address_and_a_python_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="give an address, or a Python and arguments"):
        VllmPolicy(address="http://127.0.0.1:8000", python="python3")
    with pytest.raises(ConfigError, match=r"http://10.0.0.7:8000 is no address of this host"):
        VllmPolicy(address="http://10.0.0.7:8000")
