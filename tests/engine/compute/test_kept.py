"""Activations that stay: the bits of a recompute, no memory of weights, all of it counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.devices.device import CpuDevice
from megatrain.engine.compute.kept import KeptActivations
from megatrain.engine.compute.layers import Layers, Returned
from megatrain.errors import ConfigError, OutOfDeviceMemory
from megatrain.models.build import build_decoder
from megatrain.models.passed import Link
from megatrain.models.template import Template
from testkit.families import tiny_config, tiny_model
from testkit.live_bytes import LiveBytes
from testkit.worlds import Case, make_batch, world_of

KEY = (2, 0)
CASE = Case(sort="llama of 5 layers", steps=(((2, 5), (1, 8)),), update="late", tape="host")


class Scene:
    """A layer whose params are in one buffer, as in a slot."""

    def __init__(self, family: str, *, compile: bool = False) -> None:
        model = tiny_model(family, torch.bfloat16).train()
        decoder = build_decoder(tiny_config(family), "bf16")
        self.template = Template(decoder, compile=compile, backend="aot_eager")
        self.template.model.train()
        ids = torch.arange(3, 27).view(2, 12)
        _, calls = self.template.front({}, {"input_ids": ids})
        self.call = calls[1]
        prefix = "model.layers.1."
        params = {n: p.detach() for n, p in model.named_parameters() if n.startswith(prefix)}
        self.sizes = {name: param.shape for name, param in params.items()}
        self.bits = torch.cat([param.flatten() for param in params.values()])
        generator = torch.Generator().manual_seed(5)
        shape = (2, 12, model.config.hidden_size)
        self.given, self.d_hidden = (
            torch.randn(shape, generator=generator).bfloat16() for _ in range(2)
        )

    def in_slot(self, slot: Tensor) -> dict[str, Tensor]:
        """Return the params in a buffer that has room for them, behind one element."""
        slot[1:].copy_(self.bits)
        parts = torch.split(slot[1:], [shape.numel() for shape in self.sizes.values()])
        return {
            name: part.view(shape).detach().requires_grad_()
            for (name, shape), part in zip(self.sizes.items(), parts, strict=True)
        }

    def slot(self) -> Tensor:
        return self.bits.new_empty(1 + len(self.bits))

    def returned(self) -> Returned:
        return Returned(self.d_hidden.clone(), lambda logits, columns: [])

    def recomputed(self) -> dict[str, Any]:
        """Return output and gradients by forward and recompute."""
        layers, found = Layers(self.template), dict[str, Any]()
        weights = self.in_slot(self.slot())
        given = self.given.clone().requires_grad_()
        output, _ = layers.forward(weights, given, self.call, lambda tile: None)
        passed = layers.backward(
            weights, given, self.call, self.returned(), found.update, lambda tile: None
        )
        return found | {"output": output, "passed": passed}

    def kept(self, *, moves: bool, stale: bool = False) -> dict[str, Any]:
        """Return them from activations that stay, while others visit the slot.

        `moves`: backward finds the block in another slot. `stale`: it finds what others left.
        """
        kept = KeptActivations(self.template, lambda tensor, purpose: tensor)
        found: dict[str, Any] = {}
        slot = self.slot()
        given = self.given.clone().requires_grad_()
        output, logits = kept.forward(KEY, self.in_slot(slot), given, Link(self.call))
        assert not output.requires_grad
        assert not any(one.requires_grad for one in logits)
        slot.fill_(0.125)
        weights = self.in_slot(self.slot() if moves else slot)
        if stale:
            next(iter(weights.values())).data.fill_(0.125)
        passed = kept.backward(KEY, weights, self.returned(), found.update)
        return found | {"output": output, "passed": passed}


def differing(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    assert expected.keys() == found.keys()
    return [name for name in expected if not torch.equal(expected[name], found[name])]


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("moves", [False, True])
def test_a_kept_graph_gives_the_bits_of_a_recompute(family: str, moves: bool) -> None:
    scene = Scene(family)
    assert differing(scene.recomputed(), scene.kept(moves=moves)) == []


@pytest.mark.merge
def test_so_does_that_of_a_compiled_layer() -> None:
    scene, compiled = Scene("llama"), Scene("llama", compile=True)
    assert differing(scene.recomputed(), compiled.kept(moves=True)) == []


def test_stale_weights_would_be_noticed() -> None:
    scene = Scene("llama")
    assert "passed" in differing(scene.recomputed(), scene.kept(moves=False, stale=True))


def test_a_graph_holds_no_weights_and_all_that_it_holds_is_counted() -> None:
    scene = Scene("llama")
    device = CpuDevice(copying=True)
    with LiveBytes() as live:
        weights, given = scene.in_slot(scene.slot()), scene.given.clone().requires_grad_()
        kept = KeptActivations(scene.template, device.counted)
        before = live.live
        output, _ = kept.forward(KEY, weights, given, Link(scene.call))
        held = live.live - before - output.nbytes  # counted by the engine, as hidden states
        assert device.meter.live_bytes == held > 8 * given.nbytes
        del weights
        again = scene.in_slot(scene.slot())
        kept.backward(KEY, again, scene.returned(), lambda found: None)
        assert device.meter.live_bytes == 0


def test_a_layer_that_saves_foreign_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene("llama")
    weights = scene.in_slot(scene.slot())
    moved = {name: weight[:0] for name, weight in weights.items()}
    kept = KeptActivations(scene.template, lambda tensor, purpose: tensor)
    foreign = next(iter(weights.values()))
    monkeypatch.setattr(scene.template, "routed_layer", lambda *given: (given[1] @ foreign, ()))
    with pytest.raises(AssertionError, match="not one of its parameters"):
        kept.forward(KEY, moved, scene.given.clone().requires_grad_(), Link(scene.call))


# In the engine.


def peak_and_rest(**changes: Any) -> tuple[int, int]:
    """Return the most bytes that a step counts, and those that stay after it."""
    device = CpuDevice(copying=True)
    world = world_of(CASE.sort)
    with world.engine(replace(CASE, **changes), device=device, reference=True) as engine:
        engine.step(make_batch(CASE.steps[0], seed=0, form="plain"))
        engine.synchronize()
        return device.meter.peak_bytes, device.meter.live_bytes


def test_each_kept_layer_adds_as_much_and_nothing_stays() -> None:
    peaks, rests = zip(*(peak_and_rest(kept_layers=count) for count in (2, 3, 4)), strict=True)
    assert peaks[2] - peaks[1] == peaks[1] - peaks[0] > 0
    assert len(set(rests)) == 1


def test_activations_that_do_not_fit_are_named() -> None:
    room, _ = peak_and_rest(kept_layers=0)
    device = CpuDevice(copying=True, cap_bytes=room)
    with (
        pytest.raises(OutOfDeviceMemory, match="kept activations needs"),
        world_of(CASE.sort).engine(replace(CASE, kept_layers=5), device=device) as engine,
    ):
        engine.step(make_batch(CASE.steps[0], seed=0, form="plain"))


def test_a_step_that_fails_drops_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(CASE.sort)
    with world.engine(replace(CASE, kept_layers=5)) as engine:
        machine = engine._machine
        monkeypatch.setattr(type(machine.gradients), "add", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step(make_batch(CASE.steps[0], seed=0, form="plain"))
        assert machine.kept is not None
        assert not machine.kept._graphs


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"kept_layers": 6}, "kept_layers is 6, must be between 0 and the 5 layers"),
        ({"kept_layers": 1, "tile_tokens": 4}, "kept_layers is 1 and tiles have 4 tokens: "),
    ],
)
def test_what_cannot_be_kept_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        world_of(CASE.sort).engine(replace(CASE, **settings))
