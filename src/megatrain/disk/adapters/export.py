"""Writing adapters as a folder that PEFT loads: their fp32 masters, in one file.

The folder also has the model's config.json and its tokenizer, which PEFT leaves alone: a reader
needs the base for its weights only.

Law (tests/disk/adapters/test_folder.py): what is read back has every bit of the masters.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatrain.disk.adapters.folder import reference
from megatrain.disk.adapters.names import adapter_tensors, is_transposed, tied_copies
from megatrain.disk.adapters.peft_config import PeftConfig
from megatrain.disk.adapters.peft_targets import peft_targets
from megatrain.disk.hf.export import Origin, config_bytes, write_tensors
from megatrain.disk.hf.weights_file import as_masters, placed_tensors
from megatrain.memory.store import Store
from megatrain.model_files import ADAPTER_CONFIG_NAME, ADAPTER_NAME
from megatrain.models.classes import SCORE, scores_texts
from megatrain.models.config_json import CONFIG_NAME
from megatrain.models.decoder import Decoder
from megatrain.ranks.ranks import ALONE, Ranks

_ONE_FILE = 1 << 62
"""Bytes of a shard: PEFT reads one file."""

_KNOWN_TABLES = ("embed_tokens", "lm_head")
"""Names by which PEFT 0.21 knows a table that may be tied."""


def export_adapters(
    folder: Path,
    decoder: Decoder,
    store: Store,
    *,
    base: Path,
    config_json: bytes,
    carried: Mapping[str, bytes],
    origin: Origin | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """Write the decoder's adapters to `folder`, as `HostModel.export` writes a model."""
    wanted = [*adapter_tensors(decoder), *tied_copies(decoder)]
    tensors = as_masters(placed_tensors(wanted, decoder, store), store)
    write_tensors(
        folder,
        [tensor for _, tensor in tensors],
        adapter_files(decoder, base, config_json, carried),
        single=ADAPTER_NAME,
        shard_bytes=_ONE_FILE,
        origin=origin,
        ranks=ranks,
    )


def adapter_files(
    decoder: Decoder, base: Path, config_json: bytes, carried: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Return the small files of an adapter folder, by name."""
    assert decoder.adapters is not None
    lora, (name, revision) = decoder.adapters.lora, reference(base)
    config = PeftConfig(
        rank=lora.rank,
        alpha=lora.alpha,
        dropout=lora.dropout,
        ranks=lora.ranks,
        alphas=lora.alphas,
        rslora=lora.rslora,
        dora=lora.dora,
        saved=_saved_modules(decoder),
        tied=bool(tied_copies(decoder)),
        base=name,
        revision=revision,
    )
    transposed = any(is_transposed(decoder, module) for module in decoder.adapters.modules)
    return {
        **carried,
        CONFIG_NAME: config_bytes(config_json, decoder.model.dtype),
        ADAPTER_CONFIG_NAME: config.to_bytes(
            peft_targets(decoder), fan_in_fan_out=transposed, task=_task(decoder, config.saved)
        ),
    }


def _task(decoder: Decoder, saved: tuple[str, ...]) -> str | None:
    """Return PEFT's name of what the model does.

    Its class for language models asks the model for what generates, which one that scores texts
    does not have; that for scores expects the head among what was trained whole.
    """
    if not scores_texts(decoder.config):
        return "CAUSAL_LM"
    return "SEQ_CLS" if SCORE in saved else None


def _saved_modules(decoder: Decoder) -> tuple[str, ...]:
    """Return the modules that are trained whole, by which PEFT also finds what they are tied to."""
    assert decoder.adapters is not None
    found = {name.rpartition(".")[0] for name in decoder.adapters.saved}
    if not any(name.endswith(_KNOWN_TABLES) for name in found):
        aliases = {param.name: param.aliases for param in decoder.params}
        found |= {a.rpartition(".")[0] for name in decoder.adapters.saved for a in aliases[name]}
    return tuple(sorted(found))
