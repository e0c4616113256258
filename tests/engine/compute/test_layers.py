"""Layers over tiles: the bits of plain autograd over the same tiles, and near those of the row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megatrain import load_model
from megatrain.engine.actions import StepActions
from megatrain.engine.compute import layers
from megatrain.engine.compute.layers import Layers, Returned, TiledLayer, tiles_of
from megatrain.memory.kinds import TensorKind
from megatrain.models.build import build_decoder
from megatrain.models.template import Template
from testkit.cases import at_a_push
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
    make_batch([(1, 24)], seed=3, packed=True),
]


def _draw_nothing(_: int) -> None:
    pass


class World:
    """A layer of a plain model, the same layer in a template, and something to compute."""

    def __init__(self, family: str, dtype: torch.dtype, rows: int, length: int, **changes: Any):
        model = tiny_model(family, dtype, **changes).train()
        prefix = {"gpt2": "transformer.h.1"}.get(family, "model.layers.1")
        config = tiny_config(family, **changes)
        self.template = Template(build_decoder(config, DTYPES[dtype]), tiled=True)
        self.template.model.train()
        self.plain = model.get_submodule(prefix)
        ids = torch.arange(3, 3 + rows * length).view(rows, length) % 300
        _, calls = self.template.front({}, {"input_ids": ids})
        self.call = calls[1]
        generator = torch.Generator().manual_seed(5)
        shape = (rows, length, model.config.hidden_size)
        self.hidden, self.d_output = (
            torch.randn(shape, generator=generator).to(dtype) for _ in range(2)
        )
        self.weights = {f"{prefix}.{n}": p.detach() for n, p in self.plain.named_parameters()}

    def in_double(self) -> None:
        self.hidden, self.d_output = self.hidden.double(), self.d_output.double()
        self.weights = {name: weight.double() for name, weight in self.weights.items()}

    def tiled(
        self,
        tile_tokens: int,
        draw: Callable[[int], object] = _draw_nothing,
        *,
        frozen: str = "",
        passes: bool = True,
    ) -> Expected:
        layers = Layers(self.template, tile_tokens)
        output, _ = layers.forward(self.weights, self.hidden, self.call, draw)
        leaves = {
            name: weight.detach().requires_grad_(not (frozen and frozen in name))
            for name, weight in self.weights.items()
        }
        sums: dict[str, Tensor] = {}

        def add(found: Mapping[str, Tensor | None]) -> None:
            for name, gradient in found.items():
                if gradient is not None:
                    short = name.partition(".1.")[2]
                    sums[short] = sums[short] + gradient if short in sums else gradient.float()

        d_hidden = layers.backward(
            leaves,
            self.hidden.detach().requires_grad_(passes),
            self.call,
            Returned(self.d_output.clone(), lambda *_: []),
            add,
            draw,
        )
        assert (d_hidden is not None) == passes
        d_hidden = self.hidden if d_hidden is None else d_hidden
        return Expected(output=output, d_hidden=d_hidden, params=sums)


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


@pytest.mark.few(7)
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
    own = layers._tile
    moved = lambda row, dim, columns: own(row, dim, slice(0, columns.stop - columns.start))  # noqa: E731
    patch.setattr(layers, "_tile", moved)


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


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts FLOPs as torch's own counter does, which cannot watch `torch.autograd.grad`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        self.flops += count(*args, **(kwargs or {}), out_val=result) if count else 0
        return result


def test_tiles_cost_at_most_three_percent_more_products() -> None:
    sizes = {
        "hidden_size": 128, "intermediate_size": 448, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 32,
    }  # fmt: skip
    world = World("llama", torch.float32, 1, 64, **sizes)  # an 8B model, by 32 less wide
    flops = {}
    for tile_tokens in (16, 64):
        with Products() as products:
            world.tiled(tile_tokens)
        flops[tile_tokens] = products.flops
    assert 1.0 < flops[16] / flops[64] <= 1.03


class Widths(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows the most elements that a token has in any tensor of `length` tokens or more."""

    def __init__(self, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._length, self.widest = length, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and self._length in result.shape:
            self.widest = max(self.widest, result.numel() // self._length)
        return result


def test_no_tensor_of_a_row_is_wider_than_hidden_states_and_queries() -> None:
    world = World("llama", torch.float32, 1, 129)  # a number that is no width
    widest = {}
    for tile_tokens in (16, 129):
        with Widths(129) as widths:
            world.tiled(tile_tokens)
        widest[tile_tokens] = widths.widest
    assert widest == {16: 64, 129: 96}


def test_recompute_draws_what_forward_drew() -> None:
    """The gradient is that of the output as forward computed it, by differences in double."""
    world = World("gpt2", torch.float32, 1, 12, resid_pdrop=0.3, attn_pdrop=0.2)
    seeded = torch.manual_seed
    world.in_double()
    along = world.hidden.flip(1)
    found = float((world.tiled(5, seeded).d_hidden * along).sum())
    shifted = [
        Layers(world.template, 5).forward(
            world.weights, world.hidden + step * along, world.call, seeded
        )[0]
        for step in (1e-6, -1e-6)
    ]
    expected = float(((shifted[0] - shifted[1]) * world.d_output).sum()) / 2e-6
    assert found == pytest.approx(expected, rel=1e-6)
    unseeded = float((world.tiled(5, _draw_nothing).d_hidden * along).sum())
    assert unseeded != pytest.approx(expected, rel=1e-3)


def _gradients(
    folder: Path, family: str, tile_tokens: int | None, **settings: Any
) -> list[dict[str, Tensor]]:
    """Return the gradients of each step, in fp32."""
    model = load_model(folder, dtype="fp32", attn="eager" if family == "doge" else None)
    names = [param.name for param in model.decoder.params]
    found = []
    with make_engine(model.decoder, model.store, tile_tokens=tile_tokens, **settings) as engine:
        for batch in BATCHES:
            engine.step(batch)
            found.append({name: model.store.param(name, TensorKind.GRAD).clone() for name in names})
    return found


def _distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return how far gradients are apart, relative to their norm."""
    apart = sum(float((found[n] - expected[n]).double().norm() ** 2) for n in expected)
    norm = sum(float(expected[n].double().norm() ** 2) for n in expected)
    return float((apart / norm) ** 0.5)


@pytest.mark.merge
@pytest.mark.parametrize("family", at_a_push([f for f in FAMILIES if f != "phimoe"], 6))
def test_steps_over_tiles_are_near_those_over_full_rows(family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, family, torch.float32)
    tiled, whole = (_gradients(tmp_path, family, tokens) for tokens in (7, None))
    assert max(_distance(a, b) for a, b in zip(tiled, whole, strict=True)) < NEAR


@pytest.mark.few(1)
@pytest.mark.parametrize("columns", ["its own", "all"])
def test_experts_are_balanced_over_tiles(columns: str, tmp_path: Path, monkeypatch: Any) -> None:
    save_tiny(tmp_path, "mixtral", torch.float32)
    own = StepActions._balance
    if columns == "all":  # a tile then counts the padding of another
        others = lambda self, logits, micro, at: own(  # noqa: E731
            self, logits, micro, slice(0, at.stop - at.start) if at.start else at
        )
        monkeypatch.setattr(StepActions, "_balance", others)
    tiled, whole = (
        _gradients(tmp_path, "mixtral", tokens, router_aux_loss=0.1) for tokens in (7, None)
    )
    near = max(_distance(a, b) for a, b in zip(tiled, whole, strict=True)) < NEAR
    assert near == (columns == "its own")
