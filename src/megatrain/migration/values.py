"""Values that other tools write differently, and what those tools do when a key is absent.

A converter takes a key's value and all values of the file; it returns ours and a note, or raises
Dropped with the reason. Where several keys make up one of ours, each returns the whole of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatrain.config.foreign import NO_METHOD
from megatrain.config.quantities import read_number, read_tokens, read_whole

Values = Mapping[str, Any]
Converter = Callable[[Any, Values], tuple[Any, str]]


class Dropped(Exception):
    """There is nothing of ours that this value could become; the text says why."""


IN_STEPS = "counted here in whole steps"
OFF = "off, as here"

DEFAULTS: dict[str, dict[str, Any]] = {
    "LLaMA-Factory": {
        "learning_rate": 5e-5, "num_train_epochs": 3, "lr_scheduler_type": "linear",
        "adam_beta2": 0.999, "warmup_steps": 0, "cutoff_len": 2048,
    },
    "Axolotl": {"adam_beta2": 0.999, "num_epochs": 1, "sequence_len": 512},
    "TRL": {
        "learning_rate": 2e-5, "num_train_epochs": 3, "lr_scheduler_type": "linear",
        "adam_beta2": 0.999, "warmup_steps": 0, "max_length": 1024, "assistant_only_loss": False,
        "router_aux_loss_coef": "model",
    },
}  # fmt: skip
"""What a tool takes for an absent key, where we would take something else."""

_TRUNCATES = {"data.overlong": ("truncate", "longer rows are truncated there, always")}
ALWAYS: dict[str, dict[str, tuple[Any, str]]] = {
    "LLaMA-Factory": _TRUNCATES,
    "Axolotl": {},
    "TRL": _TRUNCATES,
}
"""What a tool does and has no key for: our key, value and note."""

ROWS: dict[str, tuple[str, int]] = {
    "LLaMA-Factory": ("per_device_train_batch_size", 8),
    "Axolotl": ("micro_batch_size", 1),
    "TRL": ("per_device_train_batch_size", 8),
}
"""The key that counts the rows of a micro-batch, and its default."""


def batch_tokens(tool: str, values: Values, max_length: Any) -> tuple[int, str]:
    """Return the tokens of a step: rows x accumulation x longest row."""
    key, default = ROWS[tool]
    rows = _whole(values.get(key, default), least=1)
    accumulated = _whole(values.get("gradient_accumulation_steps", 1), least=1)
    try:
        longest = read_tokens(max_length)
    except ValueError:
        raise Dropped("the longest row is not known") from None
    note = f"at most: {rows} rows x {accumulated} accumulated x {longest} tokens, for one GPU"
    return rows * accumulated * longest, note


def _whole(value: Any, least: int = 0) -> int:
    try:
        number = read_whole(value)
    except ValueError:
        raise Dropped("not a whole number") from None
    if number < least:
        raise Dropped(f"{number} means that another key decides")
    return number


def _number(value: Any) -> float:
    try:
        return read_number(value)
    except ValueError:
        raise Dropped("not a number") from None


def _choice(
    table: Mapping[str, str], otherwise: str, notes: Mapping[str, str] | None = None
) -> Converter:
    """Return a converter by a table of words."""

    def convert(value: Any, values: Values) -> tuple[Any, str]:
        word = str(value).lower()
        if word not in table:
            raise Dropped(otherwise)
        return table[word], (notes or {}).get(word, "")

    return convert


def _switch(on: Any, off: Any = None, note: str = "") -> Converter:
    """Return a converter of a bool; with no value for off, false is dropped."""

    def convert(value: Any, values: Values) -> tuple[Any, str]:
        if value in (True, "auto"):
            return on, note
        if off is None:
            raise Dropped(OFF)
        return off, ""

    return convert


def _learning_rate(value: Any, values: Values) -> tuple[Any, str]:
    uses_lora = (
        values.get("finetuning_type") == "lora" or values.get("adapter") or values.get("use_peft")
    )
    note = (
        "chosen for LoRA: training every weight usually wants a tenth or less" if uses_lora else ""
    )
    return value, note


def _betas(value: Any, values: Values) -> tuple[Any, str]:
    first = _number(values.get("adam_beta1", 0.9))
    return [first, _number(values.get("adam_beta2", 0.999))], ""


def _warmup_steps(value: Any, values: Values) -> tuple[Any, str]:
    if _number(value) == 0 and _number(values.get("warmup_ratio") or 0) > 0:
        raise Dropped("warmup_ratio is given, and counts")
    return value, ""


def _warmup_ratio(value: Any, values: Values) -> tuple[Any, str]:
    if _number(values.get("warmup_steps") or 0) > 0:
        raise Dropped("warmup_steps is given, and counts")
    return float(_number(value)), ""


def _final_fraction(value: Any, values: Values) -> tuple[Any, str]:
    options = value if isinstance(value, dict) else {}
    if "min_lr_rate" in options:
        return _number(options["min_lr_rate"]), ""
    if "min_lr" in options and _number(values.get("learning_rate") or 0) > 0:
        fraction = _number(options["min_lr"]) / _number(values["learning_rate"])
        return float(f"{fraction:.6g}"), "of the peak"
    raise Dropped("only the last learning rate of a schedule can be set")


def _strategy(steps_key: str) -> Converter:
    def convert(value: Any, values: Values) -> tuple[Any, str]:
        if value in ("no", False):
            if steps_key == "logging_steps":
                raise Dropped("a run is always logged")
            return None, "at the end only"
        raise Dropped(IN_STEPS if value == "epoch" else f"{steps_key} counts")

    return convert


def _every(strategy_keys: tuple[str, ...]) -> Converter:
    def convert(value: Any, values: Values) -> tuple[Any, str]:
        for key in strategy_keys:
            if values.get(key) in ("no", "epoch", False):
                raise Dropped(f"{key} is {values[key]}, and counts")
        if 0 < _number(value) < 1:
            raise Dropped(IN_STEPS)
        return _whole(value, least=1), ""

    return convert


def _held_out(value: Any, values: Values) -> tuple[Any, str]:
    if values.get("eval_dataset") or values.get("test_datasets"):
        raise Dropped("rows to evaluate on are given, and count")
    fraction = _number(value)
    if fraction <= 0:
        raise Dropped("nothing is held out, as here")
    if fraction >= 1:
        raise Dropped("a number of rows; give data.eval a fraction")
    return fraction, ""


def _named_datasets(value: Any, values: Values) -> tuple[Any, str]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list):
        raise Dropped("not a list of names")
    return [str(name).strip() for name in names], ""


def _weighted_datasets(value: Any, values: Values) -> tuple[Any, str]:
    if not values.get("dataset") or values.get("interleave_probs") is None:
        return _named_datasets(value, values)
    names, _ = _named_datasets(values["dataset"], values)
    weights = values["interleave_probs"]
    weights = weights.split(",") if isinstance(weights, str) else weights
    if not isinstance(weights, list) or len(weights) != len(names):
        raise Dropped("not one weight for each dataset")
    return [
        {"path": name, "weight": _number(weight)}
        for name, weight in zip(names, weights, strict=True)
    ], ""


_FORMATS = {"alpaca": "alpaca", "chat_template": "messages", "sharegpt": "messages",
            "completion": "text", "pretraining_dataset": "text"}  # fmt: skip


def _listed_datasets(value: Any, values: Values) -> tuple[Any, str]:
    """Axolotl's and TRL's lists of {path, type or split, and more}."""
    sources, unused = [], set()
    for item in value if isinstance(value, list) else [value]:
        item = {"path": item} if isinstance(item, str) else item
        if not isinstance(item, dict) or not item.get("path"):
            raise Dropped("an entry has no path")
        files = item.get("data_files")
        files = [files] if isinstance(files, str) else files or []
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
            raise Dropped("data_files is neither a name nor a list of names")
        kind = str(item.get("type", "")).partition(".")[0].partition(":")[0]
        source = {"path": item["path"], "format": _FORMATS.get(kind, "auto")}
        sources += [source | {"path": file} for file in files] if files else [source]
        unused |= set(item) - {"path", "type", "data_files", "ds_type"}
    note = f"not used: {', '.join(sorted(map(str, unused)))}" if unused else ""
    return sources, note


def _loggers(value: Any, values: Values) -> tuple[Any, str]:
    names = [value] if isinstance(value, str) else value
    known = ("tensorboard", "wandb", "trackio")
    if not isinstance(names, list):
        raise Dropped("not a list of names")
    kept = [name for name in names if name in known]
    lost = [str(name) for name in names if name not in (*known, "none")]
    return kept, f"not here: {', '.join(lost)}" if lost else ""


def _axolotl_loggers(value: Any, values: Values) -> tuple[Any, str]:
    if not value:
        raise Dropped(OFF)
    keys = {"use_tensorboard": "tensorboard", "use_wandb": "wandb", "wandb_project": "wandb",
            "use_trackio": "trackio"}  # fmt: skip
    return sorted({name for key, name in keys.items() if values.get(key)}), ""


def _attention(value: Any, values: Values) -> tuple[Any, str]:
    if not value:
        raise Dropped(OFF)
    kinds = {"flash_attention": "flash_attention_2", "flex_attention": "flex_attention",
             "sdp_attention": "sdpa", "eager_attention": "eager"}  # fmt: skip
    return next(ours for key, ours in kinds.items() if values.get(key)), ""


def _trl_train_on(value: Any, values: Values) -> tuple[Any, str]:
    if values.get("assistant_only_loss") or values.get("completion_only_loss"):
        return "assistant", ""
    return "all", "with prompt and completion, TRL trains on completions: then give assistant"


def _stage(value: Any, values: Values) -> tuple[Any, str]:
    if value == "sft":
        raise Dropped("sft is what is done")
    if value != "pt":
        raise Dropped(NO_METHOD)
    return "all", ""


def _clip(value: Any, values: Values) -> tuple[Any, str]:
    return (None, "no clipping") if _number(value) == 0 else (value, "")


_SCHEDULES = {
    "constant": "constant", "constant_with_warmup": "constant", "linear": "linear",
    "cosine": "cosine", "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd",
}  # fmt: skip
_ADAMW = (
    "adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_8bit", "adamw_bnb_8bit",
    "adamw_torch_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "adamw_apex_fused",
)  # fmt: skip
_optimizer = _choice(
    dict.fromkeys(_ADAMW, "adamw"),
    "adamw is the only optimizer",
    {name: "moments are fp32" for name in _ADAMW if "8bit" in name},
)
_schedule = _choice(_SCHEDULES, "no such schedule; give constant, linear, cosine or wsd")
_DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "auto": "bf16", "float32": "fp32", "fp32": "fp32",
           "float16": "bf16", "fp16": "bf16"}  # fmt: skip
_NO_FP16 = "bf16 has the size of fp16 and the range of fp32"
_dtype = _choice(_DTYPES, "give bf16 or fp32", {"float16": _NO_FP16, "fp16": _NO_FP16})

CONVERTERS: dict[str, Converter] = {
    "learning_rate": _learning_rate,
    "adam_beta1": _betas,
    "adam_beta2": _betas,
    "optim": _optimizer,
    "optimizer": _optimizer,
    "lr_scheduler_type": _schedule,
    "lr_scheduler": _schedule,
    "lr_scheduler_kwargs": _final_fraction,
    "warmup_steps": _warmup_steps,
    "warmup_ratio": _warmup_ratio,
    "max_steps": lambda value, values: (_whole(value, least=1), ""),
    "max_grad_norm": _clip,
    "logging_strategy": _strategy("logging_steps"),
    "eval_strategy": _strategy("eval_steps"),
    "evaluation_strategy": _strategy("eval_steps"),
    "save_strategy": _strategy("save_steps"),
    "logging_steps": _every(("logging_strategy",)),
    "eval_steps": _every(("eval_strategy", "evaluation_strategy")),
    "save_steps": _every(("save_strategy",)),
    "save_total_limit": lambda value, values: (_whole(value, least=1), ""),
    "report_to": _loggers,
    "bf16": _switch("bf16"),
    "fp16": _switch("bf16", note=_NO_FP16),
    "pure_bf16": _switch("bf16"),
    "dtype": _dtype,
    "torch_dtype": _dtype,
    "torch_compile": _switch(on=True, off=False),
    "load_best_model_at_end": _switch(on=True, off=False),
    "use_cpu": _switch("cpu"),
    "auto_find_batch_size": _switch("auto"),
    "flash_attn": _choice(
        {"auto": "auto", "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2"},
        "no such attention; sdpa is the default",
    ),
    "attn_implementation": _choice(
        {name: name for name in ("eager", "sdpa", "flash_attention_2", "flex_attention")},
        "no such attention; sdpa is the default",
    ),
    "flash_attention": _attention,
    "flex_attention": _attention,
    "sdp_attention": _attention,
    "eager_attention": _attention,
    "dataset": _weighted_datasets,
    "interleave_probs": _weighted_datasets,
    "eval_dataset": _named_datasets,
    "datasets": _listed_datasets,
    "test_datasets": _listed_datasets,
    "val_size": _held_out,
    "val_set_size": _held_out,
    "neat_packing": _switch(on=True),
    "train_on_prompt": _switch("all", "assistant"),
    "train_on_inputs": _switch("all", "assistant"),
    "stage": _stage,
    "activation_offloading": _switch("host"),
    "assistant_only_loss": _trl_train_on,
    "completion_only_loss": _trl_train_on,
    "excess_length_strategy": _choice(
        {"drop": "drop", "truncate": "truncate"}, "longer rows are dropped, and counted"
    ),
    "use_wandb": _axolotl_loggers,
    "wandb_project": _axolotl_loggers,
    "use_tensorboard": _axolotl_loggers,
    "use_trackio": _axolotl_loggers,
}
"""By foreign key; a key that is not here keeps its value."""
