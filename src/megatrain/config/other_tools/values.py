"""Values that other tools write differently.

A converter takes a key's value and all keys of the file; it returns ours and a note, or raises
DroppedKey with the reason. If several keys make up one of our keys, each returns the full value.

Evaluations and saves that a tool counts in epochs or in shares of the run are counted in steps
here. The steps of a run are known if its file gives them, or if its rows are in files of this
machine and are not packed; else the user sets the number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatrain.config.other_tools import datasets
from megatrain.config.other_tools.methods import METHODS, OFF, asked_loss, uses_adapters
from megatrain.config.other_tools.tables import ACCUMULATION, IN_STEPS, ROWS, defaults_of
from megatrain.config.other_tools.tool_config import (
    Asks,
    Converter,
    Differs,
    DroppedKey,
    ToolConfig,
    trl_names,
)
from megatrain.config.quantities import read_number, read_tokens, read_whole
from megatrain.config.sections import RopeSettings

PACKED_APART = Differs("there packed rows attend to each other, here never")


def _whole(value: Any, least: int = 0) -> int:
    try:
        number = read_whole(value)
    except ValueError:
        raise DroppedKey(Asks("not an integer")) from None
    if number < least:
        raise DroppedKey(f"{number} leaves it to another key")
    return number


def _number(value: Any) -> float:
    try:
        return read_number(value)
    except ValueError:
        raise DroppedKey(Asks("not a number")) from None


def _choice(
    table: Mapping[str, Any], otherwise: str, notes: Mapping[str, str] | None = None
) -> Converter:
    """Return a converter that uses a table of words."""

    def convert(value: Any, asked: ToolConfig) -> tuple[Any, str]:
        word = str(value).lower()
        if word not in table:
            raise DroppedKey(Differs(otherwise))
        return table[word], (notes or {}).get(word, "")

    return convert


def _switch(on: Any, off: Any = None, note: str = "") -> Converter:
    """Return a converter of a bool; with no value for off, false is dropped."""

    def convert(value: Any, asked: ToolConfig) -> tuple[Any, str]:
        if value in (True, "auto"):
            return on, note
        if off is None:
            raise DroppedKey(OFF)
        return off, ""

    return convert


def _betas(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    first = _number(asked.given("adam_beta1", 0.9))
    return [first, _number(asked.given("adam_beta2", 0.999))], ""


def _warmup_steps(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    if _number(value) == 0 and _number(asked.given("warmup_ratio", 0)) > 0:
        raise DroppedKey("overridden by warmup_ratio")
    return _warmup(value, asked)


def _warmup_ratio(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    if _number(asked.given("warmup_steps", 0)) > 0:
        raise DroppedKey("overridden by warmup_steps")
    return _warmup(float(_number(value)), asked)


def _warmup(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    if asked.get("lr_scheduler_type", asked.get("lr_scheduler")) == "constant":
        return 0, "there the constant schedule has no warm-up"
    return _axolotl_warmup(value, asked) if asked.tool == "Axolotl" else (value, "")


def _axolotl_warmup(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """Return Axolotl's warm-up: its fractions are rounded down, and 1 step becomes 2."""
    by_default = asked.get("warmup_ratio") is None is asked.get("warmup_steps")
    if isinstance(value, int):
        return (2, "there 1 becomes 2") if value == 1 else (value, "")
    steps = whole_run(asked) if asked_loss(asked) == "next_token" else None
    most = 100 if by_default else steps
    if steps is None or most is None or asked.get("warmup_steps") is not None:
        return value, "there 3 % of the run, but at most 100 steps" if by_default else ""
    found = min(int(value * steps), most)
    return 2 if found == 1 else found, f"{value:g} of {steps} steps"


def _final_fraction(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    options = value if isinstance(value, dict) else {}
    if "min_lr_rate" in options:
        return _number(options["min_lr_rate"]), ""
    if "min_lr" in options and _number(asked.get("learning_rate") or 0) > 0:
        fraction = _number(options["min_lr"]) / _number(asked["learning_rate"])
        return float(f"{fraction:.6g}"), "of the peak"
    if not options:
        raise DroppedKey("none")
    raise DroppedKey(
        Differs("only the final rate of a schedule is supported; optim.decay is the decay of wsd")
    )


def _in_steps(steps_key: str) -> str:
    return "the log is counted in steps" if steps_key == "logging_steps" else IN_STEPS


def _strategy(steps_key: str) -> Converter:
    def convert(value: Any, asked: ToolConfig) -> tuple[Any, str]:
        if value in ("no", False):
            if steps_key == "logging_steps":
                raise DroppedKey("logging cannot be turned off")
            return None, "at the end only"
        if value == "best":
            raise DroppedKey(Differs("save.every counts steps; save.best keeps the best model"))
        raise DroppedKey(_in_steps(steps_key) if value == "epoch" else f"{steps_key} decides")

    return convert


def _every(strategy_keys: tuple[str, ...]) -> Converter:
    def convert(value: Any, asked: ToolConfig) -> tuple[Any, str]:
        for key in strategy_keys:
            if asked.get(key) in ("no", "epoch", False):
                raise DroppedKey(f"overridden by {key}, which is {asked[key]}")
        if 0 < _number(value) < 1:
            raise DroppedKey(_in_steps(strategy_keys[0].replace("strategy", "steps")))
        return _whole(value, least=1), ""

    return convert


def _tokens(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """Return the new tokens of all keys that name some: lists, or text with commas."""
    found: dict[str, None] = {}
    for key in ("new_special_tokens", "add_special_tokens", "add_tokens", "tokens"):
        given = asked.given(key, [])
        listed = given.split(",") if isinstance(given, str) else given
        if not isinstance(listed, list) or not all(isinstance(token, str) for token in listed):
            raise DroppedKey(Asks("not a list of tokens"))
        found |= {token.strip(): None for token in listed if token.strip() and token.isprintable()}
    if not found:
        raise DroppedKey("no tokens")
    return list(found), ""


def _rope(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """Return a scaling of positions by our keys."""
    names = {"rope_type": "type", "rope_theta": "theta"}
    if not isinstance(value, dict):
        raise DroppedKey(Asks("not a mapping with type and factor"))
    given = {names.get(str(key), str(key)): part for key, part in value.items()}
    try:
        RopeSettings.model_validate(given)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or "the mapping"
        raise DroppedKey(
            Differs(f"{where} is not one that model.rope takes; see docs/config.md")
        ) from None
    return given, ""


def _model_overrides(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    if not isinstance(value, dict) or set(value) != {"rope_scaling"}:
        raise DroppedKey(
            Differs("of the model's config only rope_scaling can be changed, by model.rope")
        )
    return _rope(value["rope_scaling"], asked)


def _held_out(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    if asked.get("eval_dataset") or asked.get("test_datasets"):
        raise DroppedKey("overridden by the rows to evaluate on")
    fraction = _number(value)
    if fraction <= 0:
        raise DroppedKey("no rows are held out, as by default here")
    if fraction >= 1:
        raise DroppedKey(Asks("a number of rows; set data.eval to a fraction"))
    return fraction, ""


def _loggers(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    names = [value] if isinstance(value, str) else value
    known = ("tensorboard", "wandb", "trackio", "mlflow")
    if not isinstance(names, list):
        raise DroppedKey(Asks("not a list of names"))
    kept = [name for name in names if name in known]
    lost = [str(name) for name in names if name not in (*known, "none")]
    return kept, Asks(f"not supported: {', '.join(lost)}") if lost else ""


def _axolotl_loggers(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    if not value:
        raise DroppedKey(OFF)
    keys = {"use_tensorboard": "tensorboard", "use_wandb": "wandb", "wandb_project": "wandb",
            "use_trackio": "trackio", "use_mlflow": "mlflow",
            "mlflow_experiment_name": "mlflow"}  # fmt: skip
    return sorted({name for key, name in keys.items() if asked.get(key)}), ""


def _attention(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    if not value:
        raise DroppedKey(OFF)
    kinds = {"flash_attention": "flash_attention_2", "flex_attention": "auto",
             "sdp_attention": "sdpa", "eager_attention": "eager"}  # fmt: skip
    return next(ours for key, ours in kinds.items() if asked.get(key)), ""


def _trl_train_on(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    if asked_loss(asked) != "next_token":
        raise DroppedKey("preferences always train on the answers")
    completion = asked.get("completion_only_loss")
    if completion:
        return "completion", ""
    if asked.get("assistant_only_loss"):
        return "assistant", ""
    if completion is False:
        return "all", ""
    rows = [asked.rows_of(name) for name in trl_names(asked)]
    if rows and set(rows) <= {"strings", "turns"}:
        return "completion", "rows of prompt and completion: TRL trains on the completion"
    if None in rows or not rows:
        return "all", Asks(
            "TRL trains on the completion of rows with columns prompt and completion: for those, "
            "set data.train_on: completion, and data.chat_template: none if they are strings"
        )
    return "all", ""


def _llama_factory_train_on(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    stage = asked.given("stage", "sft")
    if stage in ("dpo", "kto"):
        raise DroppedKey("preferences always train on the answers")
    if stage == "pt" or asked.get("train_on_prompt"):
        return "all", ""
    return ("last", "") if asked.get("mask_history") else ("assistant", "")


def _llama_factory_packing(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    if asked.get("neat_packing"):
        return True, ""
    if asked.get("packing") is None:
        return asked.get("stage") == "pt", ""
    return bool(value), PACKED_APART if value else ""


def _template_arguments(key: str) -> Converter:
    return lambda value, asked: ({key: value}, "")


def _template(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """Return a template by its text or file; the name of a built-in template is dropped."""
    if not isinstance(value, str):
        raise DroppedKey(Asks("not a template"))
    if "{" in value or Path(value).suffix == ".jinja":
        return value, ""
    raise DroppedKey(Asks("not a template file: the model tokenizer's chat template is used"))


_order = _choice(
    {"random": True, "sequential": False},
    "rows of similar length are not put together: the order is random",
)


def _liger(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    if not value:
        return "none", ""
    if asked.get("torch_compile"):
        raise DroppedKey("torch.compile makes its own kernels")
    if asked.get("use_cpu"):
        raise DroppedKey("these kernels do not run on a CPU")
    return "liger", Asks("it needs the package liger-kernel and an accelerator")


def _per_epoch(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """Drop a number per epoch, unless cadence.py knows the steps of the run."""
    raise DroppedKey(IN_STEPS if value else OFF)


def _clip(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    return (None, "no clipping") if _number(value) == 0 else (value, "")


def _smoothing(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    if _number(value) == 0:
        raise DroppedKey(OFF)
    if asked_loss(asked) != "next_token":
        raise DroppedKey("trainers of preferences do not read it")
    return value, ""


def _muon(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    if value in (None, False):
        raise DroppedKey(OFF)
    if _number_or_0(asked.get("weight_decay")) > 0:
        return "muon", Differs("there weight decay is for norms and biases too")
    return "muon", ""


def _llama_factory_optimizer(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    if asked.get("use_muon"):
        raise DroppedKey("overridden by use_muon")
    return _optimizer(value, asked)


def _narrow_products(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    if value in (None, False):
        raise DroppedKey(OFF)
    if asked.tool == "Axolotl":
        return "fp8", "a scale for each tensor, as there"
    return "fp8", Differs("a scale for each tensor; there for each row, or by earlier steps (te)")


def _towers(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """Return the part of a joint model that is trained, by LLaMA-Factory's freeze_ keys."""
    if not datasets.have_media(asked):
        raise DroppedKey("no dataset here is known to have images or sound")
    keys = ("freeze_vision_tower", "freeze_multi_modal_projector")
    tower, projector = (bool(asked.given(key, otherwise=True)) for key in keys)
    if uses_adapters(asked):
        if tower and projector:
            raise DroppedKey("as by default here with adapters")
        raise DroppedKey(Differs("with adapters, towers and projectors stay as they are"))
    if projector and not tower:
        raise DroppedKey(Differs("a tower is trained with its projector: set model.media to all"))
    return "all" if not tower else "frozen" if projector else "projector", ""


_SCHEDULES = {
    "constant": "constant", "constant_with_warmup": "constant", "linear": "linear",
    "cosine": "cosine", "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd",
}  # fmt: skip
_ADAMW = (
    "adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw_32bit",
    "adamw_apex_fused",
)  # fmt: skip
NARROW_ADAMW = {
    "adamw_anyprecision": "bf16", "adamw_8bit": "8bit", "adamw_bnb_8bit": "8bit",
    "adamw_torch_8bit": "8bit", "paged_adamw_8bit": "8bit", "adamw_torch_4bit": "8bit",
    "ao_adamw_8bit": "8bit", "ao_adamw_4bit": "8bit", "ao_adamw_fp8": "8bit",
}  # fmt: skip
"""The optimizers that keep their moments in less than fp32, and our optim.state."""
_optimizer = _choice(
    dict.fromkeys((*_ADAMW, *NARROW_ADAMW), "adamw") | {"muon": "muon"},
    "the optimizers are adamw and muon",
)
_schedule = _choice(
    _SCHEDULES,
    "schedule not supported; give constant, linear, cosine or wsd",
    {
        "warmup_stable_decay": Differs(
            "the decay is linear over optim.decay; there it is half a cosine unless decay_type "
            "says otherwise"
        )
    },
)
_DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "auto": "bf16", "float32": "fp32", "fp32": "fp32",
           "float16": "bf16", "fp16": "bf16"}  # fmt: skip
_NO_FP16 = Differs("use bf16: the size of fp16 and the range of fp32")
_DTYPE_KEYS = ("dtype", "torch_dtype")
_OF_FOLDER = Asks("there the model's folder decides: set model.dtype to fp32 if it is in float32")
_dtype_word = _choice(_DTYPES, "give bf16 or fp32", {"float16": _NO_FP16, "fp16": _NO_FP16})


def _is_on(key: str, asked: ToolConfig) -> bool:
    return asked.get(key) not in (None, False)


def _dtype(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    for key in ("bf16", "fp16"):
        if _is_on(key, asked):
            raise DroppedKey(f"{key} decides; masters are always fp32")
    if asked.get("bf16") is None:
        raise DroppedKey("there products are in bf16 unless bf16 is false; masters are always fp32")
    return _dtype_word(value, asked)


def _bf16(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """Return the dtype; off means another one, whatever ours is by default."""
    if value is not False:
        return "bf16", ""
    for key in ("fp16", "pure_bf16", *_DTYPE_KEYS):
        if _is_on(key, asked) and asked[key] != "auto":
            raise DroppedKey(f"{key} decides")
    if asked.tool == "LLaMA-Factory" or any(asked.get(key) == "auto" for key in _DTYPE_KEYS):
        raise DroppedKey(_OF_FOLDER)
    return "fp32", "there everything is in fp32 without it"


CONVERTERS: dict[str, Converter] = {
    "new_special_tokens": _tokens,
    "add_special_tokens": _tokens,
    "add_tokens": _tokens,
    "tokens": _tokens,
    "rope_scaling": _rope,
    "overrides_of_model_config": _model_overrides,
    "adam_beta1": _betas,
    "adam_beta2": _betas,
    "optim": _optimizer,
    "optimizer": _optimizer,
    "use_muon": _muon,
    "fp8": _narrow_products,
    "label_smoothing_factor": _smoothing,
    "freeze_vision_tower": _towers,
    "freeze_multi_modal_projector": _towers,
    "freeze_mm_modules": _switch("frozen"),
    "lr_scheduler_type": _schedule,
    "lr_scheduler": _schedule,
    "lr_scheduler_kwargs": _final_fraction,
    "warmup_steps": _warmup_steps,
    "warmup_ratio": _warmup_ratio,
    "max_steps": lambda value, asked: (_whole(value, least=1), ""),
    "max_grad_norm": _clip,
    "logging_strategy": _strategy("logging_steps"),
    "eval_strategy": _strategy("eval_steps"),
    "evaluation_strategy": _strategy("eval_steps"),
    "save_strategy": _strategy("save_steps"),
    "logging_steps": _every(("logging_strategy",)),
    "eval_steps": _every(("eval_strategy", "evaluation_strategy")),
    "save_steps": _every(("save_strategy",)),
    "save_total_limit": lambda value, asked: (_whole(value, least=1), ""),
    "report_to": _loggers,
    "bf16": _bf16,
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
        "not supported; sdpa is the default",
    ),
    "attn_implementation": _choice(
        {name: name for name in ("eager", "sdpa", "flash_attention_2")}
        | {"flex_attention": "auto"},
        "not supported; sdpa is the default",
    ),
    "flash_attention": _attention,
    "flex_attention": _attention,
    "sdp_attention": _attention,
    "eager_attention": _attention,
    "dataset": datasets.llama_factory,
    "eval_dataset": datasets.llama_factory,
    "max_samples": datasets.max_samples,
    "dataset_text_field": datasets.text_field,
    "datasets": datasets.listed_sources,
    "test_datasets": datasets.listed_sources,
    "dataset_name": datasets.trl_train,
    "dataset_config": datasets.trl_train,
    "dataset_train_split": datasets.trl_train,
    "dataset_test_split": datasets.trl_eval,
    "val_size": _held_out,
    "val_set_size": _held_out,
    "neat_packing": _switch(on=True),
    "train_on_prompt": _llama_factory_train_on,
    "mask_history": _llama_factory_train_on,
    "stage": _llama_factory_train_on,
    "train_on_inputs": _switch("all", "assistant"),
    "enable_thinking": _template_arguments("enable_thinking"),
    "chat_template_path": _template,
    "chat_template_jinja": _template,
    "curriculum_sampling": _switch(on=False, off=True),
    "disable_shuffling": _switch(on=False, off=True),
    "train_sampling_strategy": _order,
    "use_liger_kernel": _liger,
    "enable_liger_kernel": _liger,
    "liger_rms_norm": _liger,
    "liger_glu_activation": _liger,
    "evals_per_epoch": _per_epoch,
    "saves_per_epoch": _per_epoch,
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
    "use_mlflow": _axolotl_loggers,
    "mlflow_experiment_name": _axolotl_loggers,
} | METHODS
"""Converters by key of the other tool; any other key keeps its value."""
HARMLESS: dict[str, tuple[Any, ...]] = {
    "chat_template": ("tokenizer_default",),
    "f_divergence_type": ("reverse_kl",),
    "packing_strategy": ("bfd",),
    "greater_is_better": (False,),
    "metric_for_best_model": ("loss", "eval_loss"),
    "mix_strategy": ("concat",),
    "plugins": (
        ["axolotl.integrations.liger.LigerPlugin"],
        ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"],
    ),
    "truncation_mode": ("keep_start",),
}
"""Values of keys without an equivalent with which the run stays the same."""
BY_TOOL: dict[tuple[str, str], Converter] = {
    ("LLaMA-Factory", "packing"): _llama_factory_packing,
    ("LLaMA-Factory", "optim"): _llama_factory_optimizer,
}
"""Keys that mean something else in one tool."""


def converter(key: str, asked: ToolConfig) -> Converter | None:
    """Return the converter of a key's value, None if the value is kept."""
    return BY_TOOL.get((asked.tool, key)) or CONVERTERS.get(key)


def batch(asked: ToolConfig, max_length: Any, *, packed: bool) -> tuple[str, int, str]:
    """Return our key for the batch, its value, and how it was computed.

    A row of a packed batch is a sequence that several rows fill, so the batch is counted in tokens.
    """
    key, default = ROWS[asked.tool]
    rows = _whole(asked.given(key, default), least=1)
    accumulated = _whole(asked.given(ACCUMULATION, 1), least=1)
    gpus, shared = asked.num_gpus, asked.num_gpus // asked.num_replicas
    total = rows * accumulated * asked.num_replicas
    made_of = f"{rows} rows x {accumulated} accumulated x {gpus} GPU{'s' * (gpus > 1)}"
    made_of += f" / {shared} that compute a row together" * (shared > 1)
    if not packed:
        return "train.batch_rows", total, made_of
    try:
        longest = read_tokens(max_length)
    except ValueError:
        raise DroppedKey(Asks("the longest row is not known")) from None
    note = f"{made_of} x {longest} tokens, packed: the step count depends on how rows fill them"
    return "train.batch_tokens", total * longest, note


_PER_EPOCH = {"evals_per_epoch": "eval.every", "saves_per_epoch": "save.every"}
_STRATEGIES = {
    "eval_strategy": "eval.every", "evaluation_strategy": "eval.every",
    "save_strategy": "save.every",
}  # fmt: skip
_STEPS = {"eval_steps": "eval.every", "save_steps": "save.every"}


def counted_in_epochs(key: str, asked: ToolConfig) -> str:
    """Return our key for a key that counts in epochs or shares of the run, else an empty string."""
    value = asked[key]
    if key in _PER_EPOCH:
        return _PER_EPOCH[key] if _number_or_0(value) > 0 else ""
    if key in _STRATEGIES:
        return _STRATEGIES[key] if value == "epoch" else ""
    if key in _STEPS and not any(asked.get(name) in ("no", "epoch", False) for name in _STRATEGIES
                                 if _STRATEGIES[name] == _STEPS[key]):  # fmt: skip
        return _STEPS[key] if 0 < _number_or_0(value) < 1 else ""
    return ""


def steps_between(key: str, asked: ToolConfig, sources: Sequence[Any], held_out: Any) -> int | None:
    """Return the steps for such a key, None if the steps of the run are not known."""
    epoch = _steps_of_an_epoch(asked, sources, held_out)
    given = asked.given("num_train_epochs", asked.given("num_epochs", 0))
    usual = defaults_of(asked).get("num_train_epochs", defaults_of(asked).get("num_epochs"))
    epochs = _number_or_0(given) or _number_or_0(usual)
    whole = whole_run(asked) or (math.ceil(epochs * epoch) if epoch else None)
    if key in _STRATEGIES:
        return epoch
    if not whole:
        return None
    share = _number_or_0(asked[key])
    if key in _PER_EPOCH:
        share = 1 / (share * epochs)
    return max(math.ceil(Fraction(whole) * Fraction(share).limit_denominator(1 << 20)), 1)


def whole_run(asked: ToolConfig) -> int | None:
    """Return the steps that a file gives, None if its epochs decide."""
    steps = _number_or_0(asked.get("max_steps"))
    return int(steps) if steps > 0 else None


def _steps_of_an_epoch(asked: ToolConfig, sources: Sequence[Any], held_out: Any) -> int | None:
    counts = [_rows_of(source, asked) for source in sources]
    if not counts or None in counts:
        return None
    rows = sum(number for number in counts if number is not None)
    if isinstance(held_out, float):
        rows -= math.ceil(held_out * rows)
    key, default = ROWS[asked.tool]
    try:
        per_device, accumulated = (
            _whole(asked.given(key, default), least=1),
            _whole(asked.given(ACCUMULATION, 1), least=1),
        )
    except DroppedKey:
        return None
    return max(math.ceil(math.ceil(rows / (per_device * asked.num_replicas)) / accumulated), 1)


def _rows_of(source: Any, asked: ToolConfig) -> int | None:
    """Return the rows that a source gives, None if they are not known."""
    keys = source if isinstance(source, dict) else {"path": source}
    count = asked.num_rows_of(str(keys.get("path")))
    if count is None or "split" in keys:
        return None
    return min(count, int(keys.get("rows", count)))


def _number_or_0(value: Any) -> float:
    try:
        return _number(value)
    except DroppedKey:
        return 0
