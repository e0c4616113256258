"""Laws of far_server.py: weights over TCP are those of a server on this host, or there are none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import megatrain as mt
from megatrain.config import Config
from megatrain.errors import ConfigError, GeneratorError
from megatrain.rewards.inside_vllm.gate import SECRET
from megatrain.rewards.vllm_policy import VllmPolicy
from testkit.completions_on_loopback import drawn_apart
from testkit.families import save_tiny
from testkit.gates import KEY, Wire, flipped, gate_before, wire_to
from testkit.vllm_on_loopback import Vllm, vllm_on_loopback

PROMPTS = [[5, 6, 7, 8], [9, 10]]


class World:
    """A trainer, and a server that is reached through a wire and a gate alone."""

    def __init__(self, home: mt.HostModel, engine: mt.Engine, vllm: Vllm, wire: Wire) -> None:
        self.home, self.engine, self.vllm, self.wire = home, engine, vllm, wire
        self.policy = VllmPolicy(address=wire.address)
        self.version = 0

    def train_and_update(self) -> None:
        for place in self.home.store.layout.places:
            self.home.store.param(place, mt.Kind.HI).mul_(1.25)
        self.version += 1
        self.policy.update(self.engine, self.home, self.version)

    def drawn(self) -> list[mt.Rollout]:
        return self.policy.draw(PROMPTS, max_new_tokens=5, num_samples=2, seed=3)

    def expected(self) -> list[mt.Rollout]:
        return drawn_apart(self.engine, PROMPTS, max_new_tokens=5, num_samples=2, seed=3)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    save_tiny(tmp_path, "llama")
    home = mt.load_model(tmp_path, dtype="fp32")
    monkeypatch.setenv(SECRET, KEY)
    with (
        vllm_on_loopback(tmp_path) as vllm,
        gate_before(vllm.address) as gate,
        wire_to(gate) as wire,
        mt.Engine(home.decoder, home.store) as engine,
    ):
        made = World(home, engine, vllm, wire)
        yield made
        made.policy.close()


def test_answers_are_those_of_the_weights_of_the_last_update(world: World) -> None:
    for _ in range(2):
        world.train_and_update()
        assert world.drawn() == world.expected()
    assert world.policy._copy is not None
    world.policy._copy._channel.close()  # type: ignore[attr-defined]  # it breaks between two
    world.train_and_update()
    assert world.drawn() == world.expected()
    weights = world.home.store.layout.kind_bytes[mt.Kind.HI]
    assert sum(map(len, world.wire.sent)) > 2 * weights, "they went over the wire"


@pytest.mark.parametrize(
    ("spoil", "share"),
    [
        ("cut", 0.99),
        ("bit", 0.5),
        pytest.param("cut", 0.1, marks=pytest.mark.merge),
        pytest.param("bit", 0.99, marks=pytest.mark.merge),
    ],
)
def test_an_update_that_is_disturbed_leaves_no_answers_and_the_next_is_whole(
    world: World, spoil: str, share: float
) -> None:
    world.train_and_update()
    assert world.policy._copy is not None
    at = int(share * world.policy._copy.num_bytes)
    world.policy.close()  # the next update begins a connection, whose bytes are counted
    if spoil == "bit":
        world.wire.change = flipped(at)
    else:
        world.wire.change = lambda first, data: None if first + len(data) > at else data
    with pytest.raises(GeneratorError, match="does not answer"):
        world.train_and_update()
    world.wire.change = lambda first, data: data
    with pytest.raises(GeneratorError, match="its last update has failed"):
        world.drawn()
    world.train_and_update()
    assert world.drawn() == world.expected()


def test_a_gate_is_an_address_of_a_config_and_needs_a_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def server(address: str) -> Config:
        return Config(
            model="m",
            data="d",
            loss="grpo",
            rewards="a.py:f",
            train={"batch_rows": 4},
            rollouts={"engine": "vllm", "server": address},
        )

    assert server("tcp://10.0.0.2:7000").rollouts.server == "tcp://10.0.0.2:7000"
    for wrong in ("tcp://10.0.0.2", "tcp://:7000", "tcp://h:7000/x", "http://10.0.0.2:8000"):
        with pytest.raises(ConfigError, match=r"needs a gate, like tcp://10\.0\.0\.2:7000"):
            server(wrong)
    monkeypatch.delenv(SECRET, raising=False)
    with pytest.raises(ConfigError, match="set it for the gate and for the run"):
        VllmPolicy(address="tcp://10.0.0.2:7000")
