"""A model's tail over tiles: the rows and gradients of the full row."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from megatrain.engine.compute.front_and_tail import Edges, Tail
from megatrain.models.build import build_decoder
from megatrain.models.template import Template
from testkit.cases import at_a_push
from testkit.families import FAMILIES, tiny_config


class _Sums:
    """Adds up gradients in fp32."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def __call__(self, grads: Mapping[str, Tensor | None]) -> None:
        for name, grad in grads.items():
            if grad is not None:
                self.found[name] = self.found.get(name, torch.zeros(())) + grad.float()


def _through(
    family: str, tile_tokens: int | None, *, tails: list[int] | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Rows, the gradient of hidden states, and those of params."""
    decoder = build_decoder(tiny_config(family), "fp32")
    template = Template(decoder)
    edges = Edges(template, template)
    generator = torch.Generator().manual_seed(0)
    weights = {
        param.name: torch.randn(param.shape, generator=generator).requires_grad_()
        for param in decoder.blocks[-1].params
    }
    width = template.bytes_per_token // 4
    hidden = torch.randn((2, 13, width), generator=generator).requires_grad_()
    if tails is not None:
        own = edges.tail
        edges.tail = lambda w, h: (tails.append(h.shape[1]), own(w, h))[1]  # type: ignore[assignment,method-assign,func-returns-value]
    tail, sums = Tail(edges, weights, hidden, tile_tokens), _Sums()
    rows = tail.rows()
    d_rows = torch.randn(rows.shape, generator=generator)
    d_hidden = tail.back(d_rows, sums)
    assert d_hidden is not None
    return rows, d_hidden, sums.found


@pytest.mark.parametrize("family", at_a_push(sorted(FAMILIES), 6))
def test_tiles_give_what_the_full_row_gives(family: str) -> None:
    rows, d_hidden, params = _through(family, None)
    for tile_tokens in (2, 8):
        tiled, d_tiled, tiled_params = _through(family, tile_tokens)
        assert torch.equal(tiled, rows)
        assert torch.equal(d_tiled, d_hidden)
        assert tiled_params.keys() == params.keys()
        for name, grad in params.items():
            torch.testing.assert_close(tiled_params[name], grad, rtol=1e-5, atol=1e-5)


def test_a_tail_in_which_tokens_meet_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Template.tail
    monkeypatch.setattr(
        Template, "tail", lambda self, weights, hidden: own(self, weights, hidden.cumsum(1))
    )
    with pytest.raises(AssertionError):
        test_tiles_give_what_the_full_row_gives("llama")


@pytest.mark.parametrize("tile_tokens", [None, 26])
def test_one_tile_is_computed_once(tile_tokens: int | None) -> None:
    tails: list[int] = []
    _through("llama", tile_tokens, tails=tails)
    assert tails == [13]
