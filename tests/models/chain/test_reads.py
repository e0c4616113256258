"""Tensors that functions get are noted, and no others."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from megatrain.errors import NotSplittable
from megatrain.models.chain.reads import Reads

TENSORS = {name: torch.ones(2, 2) for name in ("a", "b", "c", "d")}


def test_what_functions_get_is_read() -> None:
    with Reads(TENSORS, frozenset()) as reads:
        functional.linear(torch.ones(1, 2), TENSORS["a"])
        torch.cat([torch.ones(1, 2), TENSORS["b"]])
        assert TENSORS["c"].shape == (2, 2)
        assert TENSORS["c"].dtype is torch.float32
        assert not TENSORS["c"].is_cuda
    _ = TENSORS["d"] + 1  # no longer heard
    assert reads.names == {"a", "b"}


def test_a_product_with_a_tensor_that_is_too_large_is_refused() -> None:
    with (
        pytest.raises(NotSplittable, match="a is outside the layers and too large"),
        Reads(TENSORS, frozenset({"a"})),
    ):
        functional.linear(torch.ones(1, 2), TENSORS["a"])
