"""docs/families.md lists what is tested; `python -m tests.models.test_family_table` updates it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from megatrain import load_model
from megatrain.errors import MegaTrainError
from megatrain.memory.kinds import TensorKind
from megatrain.models.build import build_decoder
from megatrain.models.config_json import OTHER_NAMES, parse_config
from megatrain.models.documents import BY_DOCUMENT
from megatrain.models.isolation import DROPS_LENGTHS, ISOLATES, packing_family
from megatrain.models.multimodal import text_part
from megatrain.models.template import Template
from testkit.engines import make_engine
from testkit.families import (
    FAMILIES,
    NO_TINY_MODEL,
    ONE_STEP,
    OTHERS_REFUSED,
    REFUSED,
    save_tiny,
    tiny_config,
)
from testkit.joint_families import JOINT_FAMILIES, REFUSED_JOINT, UNTRIED, tiny_joint_config
from testkit.plain import load_plain, make_batch, plain_gradients

PAGE = Path(__file__).parents[2] / "docs" / "families.md"

HEADS = {
    "packs": "| packs | families |",
    "balances": "| load-balancing loss | families |",
    "tiles": "| family | tokens meet in | outside |",
    "joint": "| packs | joint models (text) |",
    "joint, refused": "| refused joint models | families |",
    "others": "| other causal families | families |",
}
"""The first line of each table of the page."""

PLAIN_TILES = "| {} | attention function | 100% |\n"
"""The row that the table of tiles leaves out."""


def state_of(family: str) -> str:
    """Return what the page says of a causal family that has no tests of its own."""
    if family in ONE_STEP:
        return "one step"
    reason = {**REFUSED_JOINT, **REFUSED, **OTHERS_REFUSED}.get(family)
    return "not tested" if reason is None else f"refused: {reason}"


def _grouped(values: dict[str, str]) -> list[str]:
    """Return a row for each value, with the families that have it."""
    families: dict[str, list[str]] = {}
    for family, value in values.items():
        families.setdefault(value, []).append(family)
    return [f"| {value} | {', '.join(families[value])} |\n" for value in sorted(families)]


def _balances(family: str) -> str:
    decoder = build_decoder(tiny_config(family), "bf16")
    if decoder.balancing is not None:
        return "added"
    own = inspect.unwrap(type(decoder.model).forward).__globals__
    return "other form" if "load_balancing_loss_func" in own else ""


def _packs(family: str) -> str:
    if family not in ISOLATES:
        return "no"
    way = "by document" if family in BY_DOCUMENT else "by masks"
    return f"{way}, not with flash" if family in DROPS_LENGTHS else way


def tiles_row(family: str) -> str:
    """Return the family's line in the table of tiles."""
    decoder = build_decoder(tiny_config(family), "bf16")
    cuts = Template(decoder, tiled=True).cuts
    kinds = {}
    for layer, cut in zip(decoder.layers, cuts, strict=True):
        if cut is None:
            kinds["not cut"] = 0.0
            continue
        mixer = None if cut.mixer is None else layer.get_submodule(cut.mixer)
        inside = 0 if mixer is None else _size(mixer)
        name = "attention function" if cut.mixer is None else f"`{cut.mixer}`"
        share = 1 - inside / _size(layer)
        kinds[name] = min(share, kinds.get(name, 1.0))
    shares = ", ".join(f"{share:.0%}" for share in kinds.values())
    return f"| {family} | {', '.join(kinds)} | {shares} |\n"


def _size(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _joint_packs(family: str) -> str:
    return "by document" if packing_family(tiny_joint_config(family)) in ISOLATES else "no"


def tables() -> dict[str, list[str]]:
    """Return the rows of each table of docs/families.md, but for that of tiles."""
    balances = {family: _balances(family) for family in FAMILIES}
    joint = {
        f"{family} ({text_part(tiny_joint_config(family)).model_type})": _joint_packs(family)
        for family in JOINT_FAMILIES
    }
    others = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - {*FAMILIES, *JOINT_FAMILIES})
    return {
        "packs": _grouped({family: _packs(family) for family in FAMILIES}),
        "balances": _grouped({family: way for family, way in balances.items() if way}),
        "joint": _grouped(joint),
        "joint, refused": _grouped(REFUSED_JOINT),
        "others": _grouped({family: state_of(family) for family in others}),
    }


def printed(table: str) -> list[str]:
    """Return the rows of a table as the page has them."""
    rows = PAGE.read_text().partition(HEADS[table])[2].partition("\n\n")[0].splitlines(True)[2:]
    return [row.rstrip("\n") + "\n" for row in rows]


def printed_tiles(family: str) -> str:
    """Return the family's line in the table of tiles as the page has it."""
    rows = {row.split(" | ")[0]: row for row in printed("tiles")}
    return rows.get(f"| {family}", PLAIN_TILES.format(family))


@pytest.mark.merge
def test_the_page_lists_what_is_tested() -> None:
    assert {name: printed(name) for name in HEADS if name != "tiles"} == tables()
    version = ".".join(transformers.__version__.split(".")[:2])
    others = ", ".join(f"`{name}` is `{family}`" for name, family in OTHER_NAMES.items())
    for told in (", ".join(UNTRIED), others, f"Every family that transformers {version} has"):
        assert told in PAGE.read_text()


@pytest.mark.merge
def test_the_page_has_every_causal_family_of_transformers() -> None:
    listed = [
        family.partition(" (")[0]
        for table in ("packs", "joint", "others")
        for row in printed(table)
        for family in row.strip("| \n").split(" | ")[1].split(", ")
    ]
    assert len(listed) == len(set(listed))
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() <= {*listed}
    others = {*listed} - {*FAMILIES, *JOINT_FAMILIES}
    untested = {family for family in others if state_of(family) == "not tested"}
    assert untested == {*NO_TINY_MODEL} | (untested & {*UNTRIED})


def test_a_family_is_in_one_list() -> None:
    told = [*FAMILIES, *REFUSED, *OTHERS_REFUSED, *ONE_STEP, *NO_TINY_MODEL]
    assert len(told) == len(set(told))


@pytest.mark.merge
@pytest.mark.parametrize(("family", "reason"), OTHERS_REFUSED.items())
def test_what_is_no_decoder_of_one_chain_is_refused_with_the_reason(
    family: str, reason: str
) -> None:
    data = CONFIG_MAPPING[family]().to_json_string().encode()
    with pytest.raises(MegaTrainError, match=re.escape(reason)):
        build_decoder(parse_config(data), "bf16")


@pytest.mark.night
@pytest.mark.parametrize("family", ONE_STEP)
def test_one_step_has_the_bits_of_the_plain_model(family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, family, torch.float32)
    batch = make_batch([(2, 24), (1, 17)], seed=2, padded=True)
    losses, gradients = plain_gradients(load_plain(tmp_path, torch.float32), batch)
    model = load_model(tmp_path, dtype="fp32")
    with make_engine(model.decoder, model.store) as engine:
        assert list(engine.step(batch).micro_losses) == losses
    found = {name: model.store.param(name, TensorKind.GRAD) for name in gradients}
    assert [name for name in gradients if not torch.equal(found[name], gradients[name])] == []
    name = next(iter(gradients))
    assert not torch.equal(found[name], gradients[name] * 1.0001)


def main() -> None:
    """Write the tables into the page."""
    tiles = [row for family in FAMILIES if (row := tiles_row(family)) != PLAIN_TILES.format(family)]
    for name, rows in (tables() | {"tiles": tiles}).items():
        page = PAGE.read_text()
        PAGE.write_text(page.replace("".join(printed(name)), "".join(rows)))


if __name__ == "__main__":
    main()
