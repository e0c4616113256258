"""docs/families.md lists what is tested; `python -m tests.models.test_family_table` makes it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from megatrain import load_model
from megatrain.disk.hf.names import NameMap
from megatrain.errors import MegaTrainError
from megatrain.memory.kinds import Kind
from megatrain.models.build import build_decoder
from megatrain.models.config_json import OTHER_NAMES, parse_config
from megatrain.models.decoder import Decoder
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
  is long keep documents apart.
  *not with flash*: except with `model.attn: flash_attention_2`.

| family | class | tied | kept in fp32 | stored apart | balances | packs |
|---|---|---|---|---|---|---|
"""

TILES = """
## Tiles

With `memory.tile_tokens` a layer computes tiles of tokens, except where tokens meet
(`src/megatrain/models/probing/tile_cuts.py`). That is transformers' attention function, or a module
of the layer; a model may have layers of several kinds. *Outside* is the share of the layer's params
that computes tiles. Layers that are *not cut* compute full rows; results are right either way.

| family | tokens meet in | outside |
|---|---|---|
"""

JOINT = """
## Joint models

A joint model has a text decoder and towers for images, video or sound. MegaTrain trains its text on
batches of text, with the joint class of transformers and the folder as it is published. Losses,
gradients and weights have the bits of the joint model under ordinary autograd; `python -m
proofs.joint` compares every family here, tiny, in fp32 and bf16. Rows may have
[images and sound](media.md#towers); what follows is of runs whose rows are text.

Tensors that a forward over text never reads are *carried*: they are not loaded, take no host or
device memory and are not trained. Each export and checkpoint has a copy of them from the source
folder, with the names, dtypes and bytes of the source, beside the files of tokenizer and
processors; the joint class loads both. The source folder must stay where it is while the run lasts.
A checkpoint of adapters has no copy, because it does not contain the base.

- `model.attn` chooses the attention of text; towers are never run.
- `model.add_tokens` and `model.rope` are refused: change the folder or `text_config` beforehand.
- `megatrain estimate` builds the joint class from the config.json, and counts text and carried
  params apart.
- *text*: the family of the text decoder in the tests. Where transformers lets a folder choose it,
  any causal language model of transformers is tried.
- Gemma 4: all sizes. In E2B and E4B each layer also gets an embedding of its own
  (`hidden_size_per_layer_input`), and the last layers read keys and values of earlier ones
  (`num_kv_shared_layers`); see [per-layer inputs](#per-layer-inputs).
- *packs*: as above; never with `model.attn: flash_attention_2`. The others were not shown to keep
  documents apart: layers have a state, or positions of several axes (M-RoPE) do not reach masks.

| family | class | text | packs |
|---|---|---|---|
"""

JOINT_REFUSED = """
Refused, with a part of the message:

| family | reason |
|---|---|
"""

JOINT_UNTRIED = """
These were not tested, because we have no tiny model of them: {}.
"""

PUBLISHED = """
## Per-layer inputs

Layers may get more than hidden states: an embedding of each token for each layer, which the model
looks up and projects before its first layer (Gemma 4 E2B and E4B), or keys and values that earlier
layers have left for them. Gradients go back through both, with the bits of the plain model
(`tests/engine/test_passed.py`).

- Both are on the device from forward to backward, and so are their gradients: for E4B
  43 kB per token of a step for embeddings, 12 kB for keys and values. The plan counts them.
- The table of per-layer embeddings is a part of the embedding block, which is on the device whole:
  2.8B of the 7.5B params of E4B, 5.6 GB, and 11 GB of gradient. By the plan, training all
  weights needs a card of 32 GB; with adapters, or with this table frozen
  (`model.frozen: ["*embed_tokens_per_layer*"]`), 24 GB are enough.
- Layers of these models are not cut into tiles, and those that share keys and values are not
  compiled.
- A tensor that one layer makes and returns beside hidden states for the next one is refused by
  name (glm_moe_dsa: an index of keys), and so is one that several layers get from the front
  (zamba2).

## Folders as published

- **Code in a folder** (`auto_map` in config.json: DeepSeek, Phi, MiniMax, ...) is never run. Where
  transformers has the family itself, the key is ignored, as transformers ignores it, and exports do
  not have it. A folder whose family transformers does not have is refused by name.
- **Another name of a family** is read as the family, in `train` and in `estimate`, and exports have
  the family's own name, which transformers loads without code: {}.
- **Heads that predict several tokens** (MTP: DeepSeek-V3, GLM-4.5, Qwen3-Next, ...) are not in
  transformers' models: they are not trained, and take no memory. Exports and checkpoints have them
  as the folder has them, byte for byte, so that a program that drafts with them finds them; heads
  in fp8 are written in the dtype of the model. An export of adapters alone has none.
- **A tokenizer that is code** (Kimi-K2: `auto_map` in tokenizer_config.json names a class that
  transformers does not have) is refused, unless the folder also has a tokenizer.json, which is then
  read in its place. Copies of the model in the form of transformers have one. Copy it to the
  folder, and compare its tokens with those of the code for some texts, where you trust the code.
"""

QUANTIZED = """
## Quantized folders

The weights of these folders are dequantized while they are loaded, piece by piece into their place,
in the workers that read them. They have the bits of transformers' own dequantization
(`dequantize=True`), and a run starts as it would from a folder that was dequantized before.
Masters, exports and checkpoints are those of a bf16 model; the exported config.json has no
`quantization_config`. Under [adapters](adapters.md#the-frozen-model) the weights stay in host memory
as they were published, and are widened on the device to the same bits.

| `quant_method` | tensors | published by |
|---|---|---|
| fp8 | `X.weight` and `X.weight_scale_inv`, per block or matrix | DeepSeek, Kimi-K2, Qwen3-FP8 |
| mxfp4 | `X_blocks` and `X_scales` | gpt-oss |
| compressed-tensors, `pack-quantized` int4, symmetric, in groups | `X.weight_packed`, `X.weight_scale`, `X.weight_shape` | Kimi-K2-Thinking |

- fp8 may hold some weights in 4 bits, two to a byte of I8, and scales as exponents (E8M0, U8).
- Where an fp8 block hangs over the edge of a matrix, `weight_block_size` of the config gives its
  size. Transformers' loader refuses such a matrix or divides it evenly; its layers read it as here.
- Scales that do not suit their weights, and weights that are not finite, end the load with an error
  that names the tensor.
- Other methods (awq, gptq, bitsandbytes, other forms of compressed-tensors, ...) are refused by name. Start from
  the unquantized folder, or let the method's own tool restore bf16.
"""  # noqa: E501

TAIL = """
## Refused

These families exist in transformers but are not a chain of layers. MegaTrain refuses them and
gives the reason.

| family | reason |
|---|---|
"""

ALL = """
## All causal families

Every family that transformers {} has a causal language model of, and its state. *trains*: with all
tests above. *trains, unpacked*: the same, but documents do not share rows. *one step*: one step has
the bits of the plain model, unpacked; nothing else is tested. *joint*: the table of joint models
has it. A reason is a part of the message with which a config of the family is refused; for
families that are models of another kind, of transformers' own default config.

| family | state |
|---|---|
"""

OTHERS = """
inkling_text loads and trains, but not to the bit: in fp32 no gradient of a tiny model has the bits
of plain transformers, and all are within 4e-7 of their largest element. The other families that are
not tested are tried when they are opened: they train, or are refused with the reason.
"""


def state_of(family: str) -> str:
    """Return what the page says of a causal family of transformers."""
    if family in FAMILIES:
        return "trains" if family in ISOLATES else "trains, unpacked"
    if family in ONE_STEP:
        return "one step"
    if family in JOINT_FAMILIES:
        return "joint"
    reason = {**REFUSED_JOINT, **REFUSED, **OTHERS_REFUSED}.get(family)
    return "not tested" if reason is None else f"refused: {reason}"


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
    refused = refused.replace("a layer receive one", "layers receive one")
    refused = refused.replace("a layer several", "several")
    joint = (JOINT, *map(_joint_row, JOINT_FAMILIES), JOINT_REFUSED, *_joint_refused())
    others = ", ".join(f"`{name}` is `{family}`" for name, family in OTHER_NAMES.items())
    told = (*joint, JOINT_UNTRIED.format(", ".join(UNTRIED)), PUBLISHED.format(others), QUANTIZED)
    every = (f"| {one} | {state_of(one)} |\n" for one in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    version = ".".join(transformers.__version__.split(".")[:2])
    told = (*told, TAIL, refused, ALL.format(version), *every, OTHERS)
    return "".join((HEAD, *map(_row, FAMILIES), TILES, *map(tiles, FAMILIES), *told))


def _joint_row(family: str) -> str:
    config = tiny_joint_config(family)
    packs = "by document" if packing_family(config) in ISOLATES else ""
    name = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[family]
    return f"| {family} | {name} | {text_part(config).model_type} | {packs} |\n"


def _joint_refused() -> list[str]:
    return [f"| {family} | {reason} |\n" for family, reason in REFUSED_JOINT.items()]


def printed_tiles(family: str) -> str:
    """Return the same line as the page has it."""
    table = PAGE.read_text().partition(TILES)[2]
    return next(line for line in table.splitlines(True) if line.startswith(f"| {family} |"))


@pytest.mark.merge
def test_the_page_lists_what_is_tested() -> None:
    assert PAGE.read_text() == page(printed_tiles)


@pytest.mark.merge
def test_the_page_has_every_causal_family_of_transformers() -> None:
    table = PAGE.read_text().partition("## All causal families")[2]
    states = dict(line.strip("| ").split(" | ", 1) for line in table.splitlines() if " | " in line)
    del states["family"]
    assert states.keys() == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert all(states[family] == state_of(family) for family in states)
    untested = {family for family, state in states.items() if state == "not tested"}
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
    found = {name: model.store.param(name, Kind.GRAD) for name in gradients}
    assert [name for name in gradients if not torch.equal(found[name], gradients[name])] == []
    name = next(iter(gradients))
    assert not torch.equal(found[name], gradients[name] * 1.0001)


if __name__ == "__main__":
    PAGE.write_text(page())
