"""Other runs for a machine that is too small: each fits as it is asked for."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megatrain.planning.estimate import Estimate, estimate

SMALL: dict[str, Any] = {"gpu": "24GB", "ram": "32GB"}


@pytest.fixture(scope="module")
def refused() -> Estimate:
    return estimate("Qwen/Qwen3-4B", **SMALL)


@pytest.mark.merge
def test_adapters_come_first_with_the_figures_of_their_own_estimate(refused: Estimate) -> None:
    assert not refused.fits
    adapted = estimate("Qwen/Qwen3-4B", lora=16, **SMALL)
    assert adapted.fits
    figures = f"{adapted.plan.places()['host']}, {adapted.plan.speed}"
    assert refused.alternatives[0] == f"lora.rank=16 (adapters: {figures})"
    assert refused.text().splitlines()[2] == f"  {refused.alternatives[0]}"


def test_then_the_largest_smaller_model_of_the_family(refused: Estimate) -> None:
    (model,) = re.findall(r"^model=(\S+) ", refused.alternatives[1])
    assert model == "Qwen/Qwen3-1.7B"
    smaller = estimate(model, **SMALL)
    assert smaller.plan.speed in refused.alternatives[1]


def test_neither_is_proposed_where_it_does_not_fit() -> None:
    assert estimate("Llama-3.1-70B", gpu="24GB", ram="32GB").alternatives == ()


def test_a_run_that_fits_has_no_alternatives() -> None:
    assert estimate("Qwen/Qwen3-0.6B", gpu="4090", ram="64GB").alternatives == ()


@pytest.mark.merge
def test_adapters_are_not_proposed_to_a_run_that_has_or_excludes_them() -> None:
    for settings in (["lora.rank=8"], ["model.frozen=[model.layers.0.*]"]):
        found = estimate("Qwen3-32B", settings, gpu="24GB", ram="16GB")
        assert not found.fits
        assert not any(text.startswith("lora") for text in found.alternatives)


def test_the_step_writes_so_much_to_a_disk(refused: Estimate) -> None:
    texts = [str(fix) for fix in refused.plan.fixes]
    assert any(" written each step" in text for text in texts)
    assert not any("wears" in text for text in texts)
