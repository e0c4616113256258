"""Settings that are each valid and conflict with each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatrain.config.faults import ConfigFault

if TYPE_CHECKING:
    from megatrain.config.settings import Config


def conflicts(config: Config) -> list[ConfigFault]:
    """Return every conflict, at the key that is the cheapest to change."""
    return [
        *_length_of_run(config),
        *_batch(config),
        *_learning_rate(config),
        *_memory(config),
        *_patience(config),
        *_attention(config),
        *_tiles(config),
        *_kernels(config),
        *_lora(config),
    ]


def _fault(key: str, text: str) -> ConfigFault:
    return ConfigFault(path=tuple(key.split(".")), text=text)


def _length_of_run(config: Config) -> Iterator[ConfigFault]:
    train = config.train
    if train.epochs is not None and train.steps is not None:
        yield _fault(
            "train.steps",
            f"train.steps is {train.steps} and train.epochs is {train.epochs:g}. Give one of them "
            "and set the other to null.",
        )


def _batch(config: Config) -> Iterator[ConfigFault]:
    length, batch = config.data.max_length, config.train.batch_tokens
    micro, rows = config.train.micro_batch_tokens, config.train.batch_rows
    if batch is not None and rows is not None:
        yield _fault(
            "train.batch_rows",
            f"train.batch_rows is {rows} and train.batch_tokens is {batch}. Give one of them and "
            "set the other to null.",
        )
    if isinstance(batch, int) and length > batch:
        yield _fault(
            "train.batch_tokens",
            f"data.max_length is {length} and train.batch_tokens is {batch}: a row would not fit a "
            "step. Raise train.batch_tokens or lower data.max_length.",
        )
    elif isinstance(micro, int) and length > micro:
        yield _fault(
            "train.micro_batch_tokens",
            f"data.max_length is {length} and train.micro_batch_tokens is {micro}: a row would not "
            "fit a micro-batch. Raise train.micro_batch_tokens, or set it to auto.",
        )
    if isinstance(batch, int) and isinstance(micro, int) and micro > batch:
        yield _fault(
            "train.micro_batch_tokens",
            f"train.micro_batch_tokens is {micro} and train.batch_tokens is {batch}: a micro-batch "
            "is a part of a step. Lower train.micro_batch_tokens, or set it to auto.",
        )


def _learning_rate(config: Config) -> Iterator[ConfigFault]:
    """Yield the faults that LearningRate would refuse, as far as the number of steps is known."""
    warmup = config.optim.warmup
    decay = config.optim.decay if config.optim.schedule == "wsd" else 0
    steps = config.train.steps
    if steps is None and (isinstance(warmup, int) or isinstance(decay, int)):
        return
    parts = [part if isinstance(part, int) else round(part * (steps or 1000)) for part in
             (warmup, decay)]  # fmt: skip
    over = isinstance(warmup, float) and isinstance(decay, float) and warmup + decay > 1
    if over or sum(parts) > (steps or 1000):
        run = "the run" if steps is None else f"a run of {steps} steps"
        lengths = f"optim.warmup is {warmup}" + (f" and optim.decay is {decay}" if decay else "")
        yield _fault("optim.warmup", f"{lengths}: longer than {run}. Shorten it.")


def _memory(config: Config) -> Iterator[ConfigFault]:
    if config.memory.disk is None and config.memory.disk_bytes != "auto":
        yield _fault(
            "memory.disk_bytes",
            f"memory.disk_bytes is {config.memory.disk_bytes} and memory.disk is null: there is no "
            "folder for a scratch file. Set memory.disk, or memory.disk_bytes to auto.",
        )


def _patience(config: Config) -> Iterator[ConfigFault]:
    patience = config.eval.patience
    if patience is None:
        return
    for key, value, repair in (
        ("data.eval", config.data.eval, "give a fraction or a file to evaluate on"),
        ("eval.every", config.eval.every, "set the steps between evaluations"),
    ):
        if value is None:
            yield _fault(
                "eval.patience",
                f"eval.patience is {patience} and {key} is null: no evaluation would stop the run. "
                f"Remove eval.patience, or {repair}.",
            )


def _attention(config: Config) -> Iterator[ConfigFault]:
    model = config.model
    if model.attn.startswith("flash") and model.dtype == "fp32":
        yield _fault(
            "model.attn",
            f"model.attn is {model.attn} and model.dtype is fp32: its kernels compute in bf16 "
            "only. Set model.dtype to bf16, or model.attn to sdpa.",
        )


def _tiles(config: Config) -> Iterator[ConfigFault]:
    tile_tokens = config.memory.tile_tokens
    if config.train.compile is True and isinstance(tile_tokens, int):
        yield _fault(
            "memory.tile_tokens",
            f"memory.tile_tokens is {tile_tokens} and train.compile is true: a compiled layer "
            "computes full rows. Set memory.tile_tokens to null, or train.compile to false.",
        )
    kept_layers = config.memory.kept_layers
    if isinstance(kept_layers, int) and kept_layers > 0 and isinstance(tile_tokens, int):
        yield _fault(
            "memory.kept_layers",
            f"memory.kept_layers is {kept_layers} and memory.tile_tokens is {tile_tokens}: layers "
            "run over tiles to hold less, and compute each tile again. Set memory.tile_tokens to "
            "null, or memory.kept_layers to 0.",
        )


def _kernels(config: Config) -> Iterator[ConfigFault]:
    train = config.train
    if train.kernels != "none" and train.compile is not False:
        value = "auto" if train.compile == "auto" else "true"
        yield _fault(
            "train.kernels",
            f"train.kernels is {train.kernels} and train.compile is {value}: a compiled layer has "
            "kernels that torch makes. Set train.kernels to none, or train.compile to false.",
        )


def _lora(config: Config) -> Iterator[ConfigFault]:
    lora = config.lora
    if lora.path is not None and lora.targets:
        yield _fault(
            "lora.targets",
            f"lora.targets is given and lora.path is {lora.path}: the modules are those of that "
            "folder. Remove one of the two.",
        )
    if lora.rank is None and lora.path is None:
        for key in sorted(lora.model_fields_set - {"rank"}):
            if getattr(lora, key) != type(lora).model_fields[key].default:
                yield _fault(
                    f"lora.{key}",
                    f"lora.{key} is given and lora.rank is null: there are no adapters. Set "
                    "lora.rank, or remove the other keys of lora.",
                )
        return
    if config.model.frozen:
        yield _fault(
            "model.frozen",
            "model.frozen is given, and lora has adapters: all params of the model are frozen "
            "then. Remove model.frozen; lora.targets chooses the modules to adapt.",
        )
    if config.model.add_tokens:
        yield _fault(
            "model.add_tokens",
            "model.add_tokens is given, and lora has adapters: the rows of new tokens would stay "
            "as they are, because the tables are frozen. Remove one of the two.",
        )
