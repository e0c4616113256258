"""Families that keep the documents of a packed row apart.

Restarting position ids mark where a document begins, but not every layer uses them.
Layers with a state (convolutions, recurrences, linear attention) and some older attention do not,
and attention in chunks or over the best few keys counts from the row's beginning. Nothing fails
then: each document is trained as a continuation of the one before it. So documents share
rows only in families that were shown to keep them apart.

Most of them attend to each document alone (models/documents.py): their micro-batch is one row of
documents. The others use masks, and rows of equal length.

Flash attention takes no mask. It is given the lengths of the documents instead, as arguments that
a model's forward must pass on to the attention of every layer. Some families drop them.

Laws (tests/engine/test_isolation.py, tests/engine/test_flash_isolation.py)
    1. In ISOLATES, loss, logits and gradients of a packed row are those of its documents alone; in
       every other family that we test they are not.
    2. The same holds with flash attention, for any number of rows, except in DROPS_LENGTHS.
"""

from __future__ import annotations

from transformers import PreTrainedConfig
from transformers.utils.generic import is_flash_attention_requested

from megatrain.errors import ConfigError
from megatrain.models import optional
from megatrain.models.decoder import Decoder
from megatrain.models.documents import (
    BY_DOCUMENT,
    JOINT_BY_DOCUMENT,
    attends_by_document,
    by_document,
)
from megatrain.models.multimodal import text_part

BY_MASKS = frozenset({"axk2", "codegen", "deepseek_v32", "gpt_neo", "gpt_neox_japanese", "gptj"})
"""Families that cannot attend by document: they read masks, or have their own attention."""
ISOLATES = BY_DOCUMENT | BY_MASKS | JOINT_BY_DOCUMENT

DROPS_LENGTHS = frozenset({"gpt_neo", "gptj", "nemotron", "stablelm"}) | JOINT_BY_DOCUMENT
"""Families whose flash attention is not given the lengths of documents, or was not shown to be."""


def packing_family(config: PreTrainedConfig) -> str:
    """Return the name by which packing knows a model. Some joint models take any text decoder."""
    family, text = str(config.model_type), str(text_part(config).model_type)
    if family not in JOINT_BY_DOCUMENT or by_document(config):
        return family
    return f"{family} with {text}"


def packs_flat(decoder: Decoder, *, compiles: bool) -> bool:
    """Return whether a micro-batch is one row, of rows of any lengths, packed or not.

    A row is attended to as a whole where masks depend on media: with all tokens of a micro-batch in
    one, the mask would be their square.
    """
    config = decoder.config
    if decoder.towers is not None and optional.towers.masks_by_type(decoder.model, decoder.towers):
        return False
    text = text_part(config)
    if is_flash_attention_requested(text):
        return why_mixed(packing_family(config), "flash_attention_2") is None
    return attends_by_document(config, compiles=compiles)


def why_mixed(model_type: str, attn: str = "auto") -> str | None:
    """Return why documents in one row might see each other in this family; None: they do not."""
    if model_type not in ISOLATES:
        return (
            f"{model_type} is not known to keep the documents of a packed row apart: each would be "
            "trained after unrelated text"
        )
    if attn.startswith("flash") and model_type in DROPS_LENGTHS:
        return (
            f"with model.attn {attn}, {model_type} does not keep the documents of a packed row "
            "apart: its code is not known to pass their lengths to the kernel"
        )
    return None


def check_packing(model_type: str, attn: str = "auto") -> None:
    """Raise ConfigError if documents in one row might see each other in this family."""
    reason = why_mixed(model_type, attn)
    if reason is not None:
        other = "model.attn to sdpa, or " if why_mixed(model_type) is None else ""
        raise ConfigError(
            f"data.packing: {reason}. Set {other}data.packing to auto; then each row is one "
            "document."
        )
