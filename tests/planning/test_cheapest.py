"""Machines to rent, by price: the figures of `estimate`, and none forgotten."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from megatrain.cli.app import app
from megatrain.errors import ConfigError
from megatrain.planning import cheapest as module
from megatrain.planning.catalog.reference_machines import MACHINES
from megatrain.planning.cheapest import cheapest
from megatrain.planning.estimate import estimate

FEW = tuple(each for each in MACHINES if each.name in {"RTX 4090", "RTX A5000", "CPU", "GH200"})
SETTINGS = ["train.batch_tokens=16k"]


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalog of four, one without a price."""
    monkeypatch.setattr(module, "MACHINES", FEW)


def test_offers_have_the_figures_of_estimate_and_the_cheapest_is_first() -> None:
    found = cheapest("qwen3-4b", SETTINGS, tokens="20M")
    assert [offer.machine for offer in found.offers] == ["GH200", "RTX 4090"]
    for offer in found.offers:
        (machine,) = (each for each in FEW if each.name == offer.machine)
        same = estimate(
            "qwen3-4b", SETTINGS, gpu=offer.machine, ram=offer.ram, tokens="20M", price=machine.rent
        )
        assert (offer.tokens_per_s, offer.cost) == (same.tokens_per_s, same.cost)
    assert found.too_small == ("RTX A5000 with 24GB",)
    assert "20M tokens cost" in str(found).splitlines()[0]
    assert max(map(len, str(found).splitlines()[1:])) <= 80
    assert [offer["machine"] for offer in json.loads(found.to_json())["offers"]] == [
        "GH200", "RTX 4090",
    ]  # fmt: skip


def test_another_price_orders_them_by_speed() -> None:
    found = cheapest("qwen3-0.6b", SETTINGS, price=1.0, ram="64GB")
    assert {offer.ram for offer in found.offers} == {"64GB"}
    assert [offer.tokens_per_s for offer in found.offers] == sorted(
        (offer.tokens_per_s for offer in found.offers), reverse=True
    )


def test_adapters_are_tried_where_nothing_trains_all_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MACHINES", FEW[:1])
    found = cheapest("qwen3-14b", SETTINGS)
    assert found.adapters
    assert "adapters alone (lora.rank=16)" in str(found)
    nothing = cheapest("llama-3.1-405b", SETTINGS)
    assert nothing.offers == ()
    assert str(nothing).startswith("does not fit: none of the 1 machines with a price trains")


def test_what_cannot_be_a_price_is_refused() -> None:
    for wrong in ("cheap", -1):
        with pytest.raises(ConfigError, match=f"--price is {wrong}; give a"):
            cheapest("qwen3-0.6b", price=wrong)
    with pytest.raises(ConfigError, match="--tokens is few; give a number of tokens"):
        cheapest("qwen3-0.6b", tokens="few")


def test_a_step_that_draws_answers_is_not_compared_by_its_training() -> None:
    with pytest.raises(ConfigError, match=r"loss\.name is grpo, which draws answers first"):
        cheapest("qwen3-0.6b", ["loss=grpo", "train.batch_rows=8"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--network", "25GbE"], "--network"),
        (["--details"], "--details"),
        (["--gpu", "4090"], "--gpu"),
    ],
)
def test_an_option_that_the_list_does_not_read_is_refused(options: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["estimate", "qwen3-0.6b", "--cheapest", *options])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).endswith(f"Leave out {named}.")


def test_a_price_without_tokens_is_for_ten_million() -> None:
    found = estimate("qwen3-0.6b", SETTINGS, gpu="4090", ram="64GB", price="0.34")
    assert found.tokens == 10**7
    assert "10M tokens in" in str(found).splitlines()[0]
    assert found.cost == pytest.approx(10**7 / found.tokens_per_s / 3600 * 0.34)
