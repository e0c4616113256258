"""docs/families.md says what is tested; `python -m tests.models.test_family_table` makes it."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch

from megatrain.data.steps.isolation import DROPS_LENGTHS, ISOLATES
from megatrain.disk.hf.names import NameMap
from megatrain.models.decoder import Decoder, build_decoder
from testkit.families import FAMILIES, REFUSED, tiny_config

PAGE = Path(__file__).parents[2] / "docs" / "families.md"

HEAD = """# Families

Each of these is tested: a tiny random model in bf16 and in fp32 goes from `save_pretrained` through
the store and back to `from_pretrained`, and every tensor keeps every bit; dtypes and buffers equal
those of `from_pretrained`. The list is written by `python -m tests.models.test_family_table`.

- *tied*: output projection and embedding are one param by default.
- *kept in fp32*: params that the model keeps in fp32 when loaded in bf16; so do we.
- *stored apart*: how many tensors of a folder make up one param (experts), read into place.
- *balances*: the model's own code has a load-balancing loss of its experts, which
  `train.router_aux_loss` adds; loss and gradients are then those of the plain model with
  `output_router_logits`. *other form*: it has one that is computed in another way, which is
  refused. No family here has a router z-loss.
- *packs*: documents can share a row without seeing each other, so `data.packing` may be true; *not
  with flash*: except with `model.attn: flash_attention_2`.

| family | class | tied | kept in fp32 | stored apart | balances | packs |
|---|---|---|---|---|---|---|
"""

TAIL = """
## Refused

These exist in transformers and are not a chain of layers. They are refused with the reason.

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
    if family in DROPS_LENGTHS:
        return "not with flash"
    return "yes" if family in ISOLATES else ""


def page() -> str:
    """Return the text of docs/families.md."""
    refused = "".join(f"| {family} | a layer {reason} |\n" for family, reason in REFUSED.items())
    refused = refused.replace("a layer are not", "layers are not")
    return HEAD + "".join(map(_row, FAMILIES)) + TAIL + refused


def test_the_page_lists_what_is_tested() -> None:
    assert PAGE.read_text() == page()


if __name__ == "__main__":
    PAGE.write_text(page())
