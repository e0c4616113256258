"""Laws of residence.py."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.engine.residence import Residence, choose_residence

MODEL: dict[str, Any] = {"num_layers": 36, "layer_bytes": 400, "token_bytes": 1}


@pytest.mark.parametrize("room", range(0, 20_000, 377))
@pytest.mark.parametrize("wanted", [10, 900, 9_000, 90_000])
def test_layers_and_caches_never_take_more_than_the_room(room: int, wanted: int) -> None:
    found = choose_residence(room, **MODEL, wanted_tokens=wanted, longest=10)
    assert found.num_layers * 400 + found.cached_tokens <= room
    assert 0 <= found.num_layers <= 36
    assert (found.cached_tokens >= 10) == (room >= 10)


def test_all_layers_stay_if_they_fit_beside_all_texts() -> None:
    found = choose_residence(36 * 400 + 900, **MODEL, wanted_tokens=900, longest=10)
    assert found == Residence(num_layers=36, cached_tokens=900)


def test_fewer_texts_are_read_at_once_if_all_layers_can_stay_then() -> None:
    """A pass over layers that stay takes a small part of one that streams even a few of them."""
    found = choose_residence(36 * 400 + 500, **MODEL, wanted_tokens=900, longest=10)
    assert found == Residence(num_layers=36, cached_tokens=500)


def test_where_few_layers_could_stay_texts_have_the_room() -> None:
    found = choose_residence(1_000, **MODEL, wanted_tokens=1_000, longest=10)
    assert found == Residence(num_layers=0, cached_tokens=1_000)


def test_a_model_without_a_cache_has_all_the_room_for_layers() -> None:
    found = choose_residence(20 * 400, **MODEL, wanted_tokens=0, longest=0)
    assert found == Residence(num_layers=20, cached_tokens=0)
