"""Layers over tiles: the bits of plain autograd over the same tiles, and near those of the row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from megatrain import load_model
from megatrain.engine.compute import tiles as tiles_module
from megatrain.engine.compute.layers import Layers
from megatrain.engine.compute.tiles import Returned, TiledLayer, tiles_of
from megatrain.memory.kinds import Kind
from megatrain.models.decoder import build_decoder
from megatrain.models.template import Template
from testkit.cases import of_the_day
from testkit.engines import make_engine
from testkit.families import FAMILIES, save_tiny, tiny_config, tiny_model
from testkit.plain import make_batch
from tests.engine.compute.tiles_by_threads import Expected, by_threads

DTYPES: dict[torch.dtype, Literal["bf16", "fp32"]] = {torch.float32: "fp32", torch.bfloat16: "bf16"}
NEAR = 1e-6
"""Of the gradient's norm: tiles against full rows, in fp32."""
BATCHES = [
    make_batch([(2, 24)], seed=1),
    make_batch([(1, 24), (3, 9)], seed=2, padded=True),
]


class World:
    """A layer of a plain model, the same layer in a template, and something to compute."""

    def __init__(self, family: str, dtype: torch.dtype, rows: int, length: int, **changes: Any):
        model = tiny_model(family, dtype, **changes).train()
        config = tiny_config(family, **changes)
        self.template = Template(build_decoder(config, DTYPES[dtype]), tiled=True)
        self.template.model.train()
        self.plain = model.model.layers[1]
        ids = torch.arange(3, 3 + rows * length).view(rows, length) % 300
        _, calls = self.template.front({}, {"input_ids": ids})
        self.call = calls[1]
        generator = torch.Generator().manual_seed(5)
        shape = (rows, length, model.config.hidden_size)
        self.hidden, self.d_output = (
            torch.randn(shape, generator=generator).to(dtype) for _ in range(2)
        )
        prefix = "model.layers.1."
        self.weights = {prefix + n: p.detach() for n, p in self.plain.named_parameters()}

    def tiled(self, tile_tokens: int, *, frozen: str = "", passes: bool = True) -> Expected:
        layers = Layers(self.template, tile_tokens)
        output, _ = layers.forward(self.weights, self.hidden, self.call, _draw_nothing)
        leaves = {
            name: weight.detach().requires_grad_(not (frozen and frozen in name))
            for name, weight in self.weights.items()
        }
        sums: dict[str, Tensor] = {}

        def add(found: Mapping[str, Tensor | None]) -> None:
            for name, gradient in found.items():
                if gradient is not None:
                    short = name.removeprefix("model.layers.1.")
                    sums[short] = sums[short] + gradient if short in sums else gradient.float()

        d_hidden = layers.backward(
            leaves,
            self.hidden.detach().requires_grad_(passes),
            self.call,
            Returned(self.d_output.clone(), lambda *_: []),
            add,
            _draw_nothing,
        )
        assert (d_hidden is not None) == passes
        d_hidden = self.hidden if d_hidden is None else d_hidden
        return Expected(output=output, d_hidden=d_hidden, params=sums)


def _draw_nothing(_: int) -> None:
    pass


def _differing(found: Expected, expected: Expected) -> list[str]:
    names = [n for n in expected.params if not torch.equal(found.params[n], expected.params[n])]
    names += [n for n in found.params if n not in expected.params]
    for name in ("output", "d_hidden"):
        if not torch.equal(getattr(found, name), getattr(expected, name)):
            names.append(name)
    return names


def _against_threads(world: World, tile_tokens: int, patch: pytest.MonkeyPatch) -> list[str]:
    tiles = tiles_of(world.hidden, tile_tokens)
    assert len(tiles) > 1
    expected = by_threads(
        world.plain, world.hidden, world.call.kwargs, world.d_output, tiles, patch
    )
    return _differing(world.tiled(tile_tokens), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "length", "tile_tokens"), [(1, 24, 7), (3, 10, 12)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_tiles_give_the_bits_of_plain_autograd_over_the_same_tiles(
    family: str, rows: int, length: int, tile_tokens: int, dtype: torch.dtype, monkeypatch: Any
) -> None:
    world = World(family, dtype, rows, length)
    assert _against_threads(world, tile_tokens, monkeypatch) == []


def _drop_a_tile(patch: pytest.MonkeyPatch) -> None:
    own = TiledLayer._each_tile
    patch.setattr(TiledLayer, "_each_tile", lambda self: list(own(self))[1:])


def _take_a_tile_from_another_place(patch: pytest.MonkeyPatch) -> None:
    own = tiles_module._tile
    moved = lambda row, dim, columns: own(row, dim, slice(0, columns.stop - columns.start))  # noqa: E731
    patch.setattr(tiles_module, "_tile", moved)


def _lose_a_sum(patch: pytest.MonkeyPatch) -> None:
    own = TiledLayer._back_to_hidden
    lost = lambda self, hidden, passes, *rest: own(self, hidden, False, *rest)  # noqa: E731
    patch.setattr(TiledLayer, "_back_to_hidden", lost)


@pytest.mark.parametrize("fault", [_drop_a_tile, _take_a_tile_from_another_place, _lose_a_sum])
def test_wrong_tiles_would_be_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World("llama", torch.float32, 1, 24)
    with monkeypatch.context() as patch:
        fault(patch)
        assert _against_threads(world, 7, monkeypatch) != []
    assert _against_threads(world, 7, monkeypatch) == []


def test_frozen_params_and_the_lowest_layer_have_no_gradients_and_change_no_other() -> None:
    world = World("llama", torch.float32, 1, 24)
    everything = world.tiled(7)
    found = world.tiled(7, frozen="mlp.", passes=False)
    trained = {n for n in everything.params if "mlp." not in n}
    assert found.params.keys() == trained
    assert all(torch.equal(found.params[name], everything.params[name]) for name in trained)


def _gradients(folder: Path, family: str, tile_tokens: int | None) -> list[dict[str, Tensor]]:
    """Return the gradients of each step, in fp32."""
    model = load_model(folder, dtype="fp32", attn="eager" if family == "doge" else None)
    names = [param.name for param in model.decoder.params]
    found = []
    with make_engine(model.decoder, model.store, tile_tokens=tile_tokens) as engine:
        for batch in BATCHES:
            engine.step(batch)
            found.append({name: model.store.param(name, Kind.GRAD).clone() for name in names})
    return found


def _distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return how far gradients are apart, relative to their norm."""
    apart = sum(float((found[n] - expected[n]).double().norm() ** 2) for n in expected)
    norm = sum(float(expected[n].double().norm() ** 2) for n in expected)
    return float((apart / norm) ** 0.5)


@pytest.mark.parametrize("family", of_the_day([f for f in FAMILIES if f != "phimoe"], 6))
def test_steps_over_tiles_are_near_those_over_full_rows(family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, family, torch.float32)
    tiled, whole = (_gradients(tmp_path, family, tokens) for tokens in (7, None))
    assert max(_distance(a, b) for a, b in zip(tiled, whole, strict=True)) < NEAR
