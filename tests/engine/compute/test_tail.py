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
    family: str, tile_tokens: int | None, *, tails: list[int] | None = None, num_rows: int = 2
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
    hidden = torch.randn((num_rows, 13, width), generator=generator).requires_grad_()
    if tails is not None:
        own = edges.tail
        edges.tail = lambda w, h: (tails.append(h.shape[1]), own(w, h))[1]  # type: ignore[assignment,method-assign,func-returns-value]
    tail, sums = Tail(edges, weights, hidden, tile_tokens), _Sums()
    rows = tail.rows()
    d_rows = torch.randn(rows.shape, generator=generator)
    d_hidden = tail.back(d_rows, sums)
    assert d_hidden is not None
    return rows, d_hidden, sums.found


def _multiplies(family: str) -> bool:
    """Whether a tail has matrices of its own; with fewer tokens they may round differently."""
    decoder = build_decoder(tiny_config(family), "fp32")
    return any(
        len(param.shape) > 1 and not param.name.startswith(f"{decoder.head_path}.")
        for param in decoder.blocks[-1].params
    )


def test_a_tail_with_matrices_is_known() -> None:
    assert _multiplies("modernbert-decoder")
    assert not _multiplies("llama")


@pytest.mark.parametrize("family", at_a_push(sorted(FAMILIES), 6))
def test_tiles_give_what_the_full_row_gives(family: str) -> None:
    rows, d_hidden, params = _through(family, None)
    close = 1e-5 if _multiplies(family) else 0.0
    for tile_tokens in (2, 8):
        tiled, d_tiled, tiled_params = _through(family, tile_tokens)
        torch.testing.assert_close(tiled, rows, rtol=close, atol=close)
        torch.testing.assert_close(d_tiled, d_hidden, rtol=close, atol=close)
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


def test_a_tail_that_does_nothing_passes_the_gradient_of_one_row_on() -> None:
    """openai-gpt has no last norm: a tile's gradient is that of its rows, in the same memory."""
    _, d_hidden, _ = _through("openai-gpt", None, num_rows=1)
    _, d_tiled, _ = _through("openai-gpt", 8, num_rows=1)
    assert torch.equal(d_tiled, d_hidden)


@pytest.mark.parametrize("tile_tokens", [None, 26])
def test_one_tile_is_computed_once(tile_tokens: int | None) -> None:
    tails: list[int] = []
    _through("llama", tile_tokens, tails=tails)
    assert tails == [13]
