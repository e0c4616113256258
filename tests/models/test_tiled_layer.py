"""A layer in parts: its own output over any tiles, and its modules as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatrain.models.build import build_decoder
from megatrain.models.probing.stand_ins import Call
from megatrain.models.template import Template
from megatrain.models.tiled_layer import Cut, CutLayer, Joining, Meeting, forwards_replaced
from testkit.families import tiny_config, tiny_model


@pytest.mark.few(5)
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "cohere", "falcon", "mixtral", "mamba"])
def test_parts_over_any_tiles_give_the_layers_own_output(family: str) -> None:
    template = Template(build_decoder(tiny_config(family), "fp32"), tiled=True)
    plain = tiny_model(family, torch.float32)
    ids = torch.arange(3, 25).view(2, 11)
    with torch.no_grad():
        hidden, calls = template.front(dict(plain.named_parameters()), {"input_ids": ids})
    call = calls[1]
    layer = template.cut_layer(call)
    assert layer is not None
    prefix = template._decoder.layers_path + ".1"
    weights = dict(plain.get_submodule(prefix).named_parameters())
    named = {f"{prefix}.{name}": weight for name, weight in weights.items()}
    with torch.no_grad():
        expected, _ = template.routed_layer(named, hidden, call)
        for ends in ((4, 11), (1, 9, 11)):
            found = _over_tiles(layer, weights, hidden, call, ends)
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
        swapped = _over_tiles(layer, weights, hidden.flip(1), call, (4, 11)).flip(1)
        assert not torch.allclose(swapped, expected, rtol=1e-5, atol=1e-6)


def _over_tiles(
    layer: CutLayer, weights: dict[str, Any], hidden: Tensor, call: Call, ends: tuple[int, ...]
) -> Tensor:
    tiles = [slice(a, b) for a, b in zip((0, *ends), ends, strict=False)]
    joining = Joining(layer.cut, call, hidden.shape[1])
    for columns in tiles:
        part = layer.sliced(call, columns)
        joining.add(layer.before(weights, hidden[:, columns], part), part, columns)
    mixed = layer.meet(weights, joining.meeting())
    return torch.cat(
        [
            layer.after(
                weights,
                hidden[:, columns],
                layer.sliced(call, columns),
                layer.mixed_tile(mixed, columns),
            )[0]
            for columns in tiles
        ],
        dim=1,
    )


def test_modules_are_as_they_were_after_a_failure() -> None:
    module = nn.Linear(2, 2)

    def fail(_: Tensor) -> Tensor:
        raise ZeroDivisionError

    def run() -> None:
        with forwards_replaced({module: fail}):
            module(torch.ones(2))

    with pytest.raises(ZeroDivisionError):
        run()
    assert "forward" not in vars(module)
    assert module(torch.ones(2)).shape == (2,)


@pytest.mark.parametrize(
    ("layout", "dim"),
    [(lambda t: t, 1), (lambda t: t.transpose(1, 2), 2), (lambda t: t.permute(3, 1, 0, 2), 1)],
)
def test_a_tensor_of_the_row_is_laid_out_as_its_tiles(
    layout: Callable[[Tensor], Tensor], dim: int
) -> None:
    row = torch.arange(2 * 6 * 3 * 5.0).view(2, 6, 3, 5)
    cut = Cut(mixer=None, arguments={}, handed={(0, 0): dim}, mixed={}, unread={})
    call = Call(layer=0, args=(), kwargs={})
    joining = Joining(cut, call, 6)
    for columns in (slice(0, 4), slice(4, 6)):
        part = layout(row[:, columns].contiguous())
        joining.add(Meeting(mixer=print, args=(part,), kwargs={}), call, columns)
    (found,) = joining.meeting().args
    assert torch.equal(found, layout(row))
    assert found.stride() == layout(row).stride()
