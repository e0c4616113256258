"""`megatrain estimate MODEL --cheapest`: machines to rent that train a model, by what it costs.

Each machine of the catalog that has a typical price is planned with the host memory that this price
includes. Machines on which nothing fits are found by arithmetic alone.

Laws (tests/planning/test_cheapest.py)
    1. Each offer has the figures of `estimate` for its machine; the cheapest comes first.
    2. Every machine with a price is among the offers or among those that are too small.
    3. If none trains all weights, adapters are tried.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.choices import BaseForm
from megatrain.config.quantities import read_count
from megatrain.errors import ConfigError
from megatrain.planning.alternatives import RANK, could_fit
from megatrain.planning.catalog.reference_machines import MACHINES
from megatrain.planning.estimate import USUAL_TOKENS, asked_run, read_price
from megatrain.planning.prediction import (
    predicted_price,
    predicted_speed,
    predicted_time,
    speed_range,
    time_range,
    with_range,
)
from megatrain.text import figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One machine that trains the model."""

    machine: str
    ram: str
    states: str
    tokens_per_s: float
    seconds: float
    price_per_hour: float

    @property
    def cost(self) -> float:
        """Price of all tokens."""
        return self.seconds / 3600 * self.price_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """Machines that train a model, the cheapest first."""

    model: str
    tokens: int
    adapters: bool
    """Adapters were planned because no machine trains all weights."""
    offers: tuple[Offer, ...]
    too_small: tuple[str, ...]

    def __str__(self) -> str:
        if not self.offers:
            return f"{self._first()}\nA larger host is needed: try --ram, or --disk 2TB."
        rows = [
            f"{offer.machine:14}{offer.ram:>6}  {offer.states:5}"
            f"{predicted_speed(offer.tokens_per_s).removesuffix(' tok/s'):>14}"
            f"{predicted_time(offer.seconds):>15}{f'${offer.price_per_hour:,.2f}':>7}"
            f"{predicted_price(offer.cost):>17}"
            for offer in self.offers
        ]
        head = f"{'machine':14}{'RAM':>6}  {'states':6}{'tok/s':>13}{'time':>15}{'$/hour':>7}"
        small = [f"too small: {', '.join(self.too_small)}"] if self.too_small else []
        if self.too_small and not self.adapters:
            small.append("optim.state=8bit needs 6 bytes a parameter less than fp32 states.")
        return "\n".join(
            [
                self._first(),
                "",
                f"{head}{'price':>17}",
                *rows,
                "",
                *_wrapped(small),
                *_wrapped([PRICES]),
            ]
        )

    def to_json(self) -> str:
        """Return the offers as JSON text."""
        offers = [
            {
                "machine": offer.machine,
                "ram": offer.ram,
                "states": offer.states,
                **with_range("tokens_per_s", offer.tokens_per_s, speed_range),
                **with_range("seconds", offer.seconds, time_range),
                "price_per_hour": offer.price_per_hour,
                **with_range("cost", offer.cost, time_range),
            }
            for offer in self.offers
        ]
        facts = {"model": self.model, "tokens": self.tokens, "adapters": self.adapters}
        return json.dumps(facts | {"offers": offers, "too_small": list(self.too_small)}, indent=1)

    def _first(self) -> str:
        """Return the verdict in one line."""
        number = len(self.offers) + len(self.too_small)
        if not self.offers:
            return f"does not fit: none of the {number} machines with a price trains {self.model}"
        best = self.offers[0]
        what = f"{self.model}{f', adapters alone (lora.rank={RANK})' if self.adapters else ''}"
        return (
            f"fits: {len(self.offers)} of {number} machines train {what}; {figure(self.tokens)} "
            f"tokens cost {predicted_price(best.cost)} on {best.machine}, predicted"
        )


PRICES = (
    "Prices are typical ones of an hour with one card, most of March 2026 (machines.toml has their "
    "sources). They change, and differ by up to three times: give yours with --gpu, --ram and "
    "--price. Disk and the time of a download are not in it."
)


def cheapest(
    model: str,
    overrides: Sequence[str] = (),
    *,
    ram: str | int | None = None,
    tokens: str | float | None = None,
    seq: str | int | None = None,
    batch_tokens: str | int | None = None,
    lora: int | None = None,
    base: BaseForm | None = None,
    disk: str | int | None = None,
    price: str | float | None = None,
) -> Offers:
    """Return the machines with a price that train `model`, by what `tokens` cost (default: 10M).

    `ram` replaces the memory of every machine, `price` the price of every one; the others are as
    for `estimate`. Plans some twenty machines, half a second each. Raises as `estimate` does.
    """
    try:
        count = USUAL_TOKENS if tokens is None else read_count(tokens)
    except ValueError as error:
        raise ConfigError(f"--tokens is {str(tokens)[:60]}; {error}") from None
    hourly = None if price is None else read_price(price)

    def offers(rank: int | None) -> tuple[list[Offer], list[str], str, bool]:
        found, too_small, name, adapted = [], [], model, False
        for machine in MACHINES:
            if not machine.rent:
                continue
            memory = f"{machine.rent_ram_gib}GB" if ram is None else str(ram)
            run = asked_run(
                model,
                overrides,
                gpu=machine.name,
                ram=memory,
                seq=seq,
                batch_tokens=batch_tokens,
                lora=rank,
                base=base,
                disk=disk,
            )
            if run.config.loss.draws:
                raise ConfigError(
                    f"--cheapest compares cards by tokens that are trained, and loss.name is "
                    f"{run.config.loss.name}, which draws answers first. Ask for each with --gpu."
                )
            name, adapted = run.model.name, run.model.is_adapted
            plan = run.plan() if could_fit(*run.planned) else None
            if plan is None or not plan.fits:
                too_small.append(f"{machine.name} with {memory}")
                continue
            speed = plan.simulation.tokens_per_s
            found.append(
                Offer(
                    machine=machine.name,
                    ram=memory,
                    states=str(plan.settings.state),
                    tokens_per_s=speed,
                    seconds=count / speed,
                    price_per_hour=machine.rent if hourly is None else hourly,
                )
            )
        return found, too_small, name, adapted

    found, too_small, name, adapted = offers(lora)
    instead = not found and not adapted
    if instead:
        found, too_small, name, adapted = offers(RANK)
    return Offers(
        model=name,
        tokens=count,
        adapters=instead and bool(found),
        offers=tuple(sorted(found, key=lambda offer: offer.cost)),
        too_small=tuple(too_small),
    )


def _wrapped(lines: list[str]) -> list[str]:
    return [row for line in lines for row in textwrap.wrap(line, 80)]
