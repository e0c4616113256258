"""docs/families.md lists what is tested; `python -m tests.models.test_family_table` makes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from megatrain.data.steps.isolation import DROPS_LENGTHS, ISOLATES
from megatrain.disk.hf.names import NameMap
from megatrain.models.decoder import Decoder, build_decoder
from megatrain.models.documents import BY_DOCUMENT
from megatrain.models.template import Template
from testkit.families import FAMILIES, REFUSED, tiny_config

PAGE = Path(__file__).parents[2] / "docs" / "families.md"

HEAD = """# Families

MegaTrain trains each of these families. The tests take a tiny random model in bf16 and in fp32 from
`save_pretrained` through the store and back to `from_pretrained`: every tensor keeps every bit, and
dtypes and buffers equal those of `from_pretrained`. `python -m tests.models.test_family_table`
writes this page.

- *tied*: output projection and embedding are one param by default.
- *kept in fp32*: number of params that the model, and therefore MegaTrain, keeps in fp32 when
  loaded in bf16.
- *stored apart*: number of tensors in a folder that make up one param (experts).
- *balances*: the model's code has a load-balancing loss for its experts, and
  `train.router_aux_loss` adds it; loss and gradients equal those of the plain model with
  `output_router_logits`. *other form*: the loss is computed in another way, which MegaTrain
  refuses. No family here has a router z-loss.
- *packs*: documents can share a row without seeing each other, so `data.packing` may be true. *by
  document*: a micro-batch is one row, and attention looks at each document alone, without a mask of
  tokens x tokens. *by masks*: a micro-batch has rows of equal length, and masks as large as a row
  is long keep documents apart, as in all families with `train.compile` or `model.attn:
  flex_attention`. *not with flash*: except with `model.attn: flash_attention_2`.

| family | class | tied | kept in fp32 | stored apart | balances | packs |
|---|---|---|---|---|---|---|
"""

TILES = """
## Tiles

With `memory.tile_tokens` a layer computes tiles of tokens, but for the one place where tokens meet
(`src/megatrain/models/tiling/probe.py`). That is transformers' attention function, or a module of
the layer; a model may have layers of several kinds. *Outside* is the share of the layer's params
that computes tiles. Layers that are *not cut* compute full rows, and all are right either way.

| family | tokens meet in | outside |
|---|---|---|
"""

TAIL = """
## Refused

These families exist in transformers but are not a chain of layers. MegaTrain refuses them and
gives the reason.

| family | reason |
|---|---|
"""


def _row(family: str) -> str:
    decoder = build_decoder(tiny_config(family), "bf16")
    tensors = list(NameMap(decoder).tensors.values())
    tied = "yes" if any(param.aliases for param in decoder.params) else ""
    fp32 = sum(param.dtype is torch.float32 for param in decoder.params)
    pieces: dict[str, int] = {}
    for tensor in tensors:
        pieces[tensor.param] = pieces.get(tensor.param, 0) + 1
    apart = max(pieces.values())
    name = type(decoder.model).__name__
    experts = apart if apart > 1 else ""
    cells = (family, name, tied, fp32 or "", experts, _balances(decoder), _packs(family))
    return "| " + " | ".join(map(str, cells)) + " |\n"


def _balances(decoder: Decoder) -> str:
    if decoder.balancing is not None:
        return "yes"
    own = inspect.unwrap(type(decoder.model).forward).__globals__
    return "other form" if "load_balancing_loss_func" in own else ""


def _packs(family: str) -> str:
    if family not in ISOLATES:
        return ""
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


def page(tiles: Callable[[str], str] = tiles_row) -> str:
    """Return the text of docs/families.md."""
    refused = "".join(f"| {family} | a layer {reason} |\n" for family, reason in REFUSED.items())
    refused = refused.replace("a layer do not", "layers do not")
    parts = (HEAD, *map(_row, FAMILIES), TILES, *map(tiles, FAMILIES), TAIL, refused)
    return "".join(parts)


def printed_tiles(family: str) -> str:
    """Return the same line as the page has it."""
    table = PAGE.read_text().partition(TILES)[2]
    return next(line for line in table.splitlines(True) if line.startswith(f"| {family} |"))


def test_the_page_lists_what_is_tested() -> None:
    assert PAGE.read_text() == page(printed_tiles)


if __name__ == "__main__":
    PAGE.write_text(page())
