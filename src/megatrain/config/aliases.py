"""Names of transformers, TRL, PEFT, LLaMA-Factory and Axolotl: the same as a key of ours, or not.

    with_our_keys(document)              # {lr: 1e-5} becomes {optim: {learning_rate: 1e-5}}
    hint("gradient_accumulation_steps")  # a sentence: what to do here

An alias is a name that means exactly what one key here means; a config or an override may use it at
the top, or in the section of that key. A name that means something else, or several things, has a
sentence in place of a key: it is never mapped.

Invariants (tests/config/test_aliases.py)
    1. An alias leads to a key that exists, and is itself no key of ours where it is accepted.
    2. A key under two names has one value, or the config is refused.
    3. Every key that a sentence names exists.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatrain.config.quantities import read_number
from megatrain.config.yaml_reader import Document, Path


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Return a table of {what they mean: names} as one of {name: what it means}."""
    found = {name: meaning for meaning, names in table.items() for name in names.split()}
    assert len(found) == len(" ".join(table.values()).split()), "a name is there twice"
    return found


ALIASES = _by_name(
    {
        "model.name_or_path": "model_name_or_path base_model",
        "model.revision": "model_revision revision_of_model",
        "model.attn": "attn_implementation flash_attn",
        "data.train": "dataset_name",
        "data.eval": "val_size val_set_size",
        "data.max_length": "max_seq_length max_length cutoff_len sequence_len",
        "data.overlong": "excess_length_strategy",
        "data.packing": "sample_packing",
        "data.chat_template": "chat_template_jinja",
        "data.template_kwargs": "chat_template_kwargs",
        "data.seed": "data_seed",
        "lora.rank": "lora.r lora_r lora_rank",
        "lora.alpha": "lora_alpha",
        "lora.dropout": "lora_dropout",
        "lora.targets": "target_modules lora_target_modules lora_target",
        "lora.experts": "target_parameters lora_target_parameters",
        "lora.modules_to_save": "modules_to_save lora_modules_to_save additional_target",
        "lora.path": "adapter_name_or_path lora_model_dir",
        "lora.rslora": "use_rslora peft_use_rslora",
        "lora.dora": "use_dora peft_use_dora",
        "loss.beta": "pref_beta dpo_beta rl_beta",
        "loss.gamma": "simpo_gamma",
        "loss.sft": "pref_ftx",
        "loss.label_smoothing": "dpo_label_smoothing",
        "loss.desirable_weight": "desirable_weight kto_chosen_weight kto_desirable_weight",
        "loss.undesirable_weight": "undesirable_weight kto_rejected_weight kto_undesirable_weight",
        "train.epochs": "num_train_epochs num_epochs",
        "train.steps": "max_steps",
        "train.max_grad_norm": "max_grad_norm",
        "train.compile": "torch_compile",
        "train.deterministic": "full_determinism",
        "optim.learning_rate": "learning_rate lr",
        "optim.weight_decay": "weight_decay",
        "optim.eps": "adam_epsilon",
        "optim.schedule": "lr_scheduler_type lr_scheduler",
        "optim.warmup": "warmup_ratio warmup_steps",
        "eval.every": "eval_steps",
        "eval.patience": "early_stopping_patience",
        "save.dir": "output_dir run_dir",
        "save.every": "save_steps",
        "save.keep": "save_total_limit",
        "log.every": "logging_steps",
        "log.to": "report_to",
    }
)
"""Our key, by its name elsewhere. A name with a dot is accepted in that section alone."""

_ROWS = (
    "A step here is that of all GPUs, and memory decides its micro-batches: set train.batch_rows "
    "to rows per device x accumulation x GPUs, or train.batch_tokens where rows are packed."
)
_TARGETS = "Set data.train_on to assistant, last, completion or all."
_ADAPTERS = "lora.rank turns adapters on, and null trains all weights."
_BASE = "model.base is the form of a frozen model under adapters, like nf4 for QLoRA."
_STREAMED = "Not needed: weights and optimizer states are always in host memory."

HINTS = _by_name(
    {
        _ROWS: "per_device_train_batch_size gradient_accumulation_steps micro_batch_size "
        "batch_size train_batch_size global_batch_size",
        "Not needed: evaluation uses train.micro_batch_tokens.": "per_device_eval_batch_size "
        "eval_batch_size eval_accumulation_steps",
        "Not needed: train.micro_batch_tokens is auto.": "auto_find_batch_size",
        _TARGETS: "train_on_inputs train_on_prompt mask_history assistant_only_loss "
        "completion_only_loss",
        _ADAPTERS: "use_peft peft adapter finetuning_type peft_config",
        _BASE: "load_in_4bit load_in_8bit quantiz* bnb_* gptq",
        _STREAMED: "offload offload_* cpu_offload deepspeed* fsdp* zero_* accelerator_config",
        "The key here is memory.disk.": "nvme nvme_path disk_offload",
        "Not needed: layers are computed again in backward.": "gradient_checkpointing "
        "gradient_checkpointing_kwargs activation_checkpointing",
        "Set memory.tape to host, or leave it to the plan.": "activation_offloading",
        "Set memory.device to cpu.": "use_cpu no_cuda",
        "`megatrain train --gpus N` starts a process for each GPU.": "ddp_* local_rank num_gpus "
        "nproc_per_node tensor_parallel_size",
        "model.dtype is bf16 or fp32, and masters are always fp32.": "bf16 fp16 pure_bf16 dtype "
        "torch_dtype mixed_precision precision tf32",
        "Set model.attn to auto, sdpa, eager or flash_attention_2.": "flash_attention "
        "sdp_attention flex_attention eager_attention use_flash_attention_2",
        "Set model.rope, like {type: yarn, factor: 4.0}.": "rope_scaling rope_type rope_theta",
        "List them in model.add_tokens; they are special tokens here.": "new_special_tokens "
        "add_special_tokens add_tokens tokens",
        "Code in a model folder is never run.": "trust_remote_code",
        "optim.name is adamw or muon; optim.state is the precision of its moments.": "optim "
        "optimizer",
        "Give both numbers in optim.betas, like [0.9, 0.999].": "adam_beta1 adam_beta2 beta1 beta2",
        "optim.final_fraction is the last learning rate, as a fraction of the peak.": "min_lr "
        "cosine_min_lr_ratio lr_scheduler_kwargs",
        "train.seed is for dropout and new adapters, data.seed for the order of rows.": "seed",
        "data.train takes files, folders and Hub ids, each with its columns and format; see "
        "docs/data.md.": "dataset dataset_dir train_dataset train_file",
        "data.train takes files, folders and Hub ids. Type completion cuts long texts into pieces, "
        "which is data.overlong: split, not drop; a type of rl that names a format is "
        "data.chat_template.": "datasets",
        "It belongs to a source in data.train: name, split, columns or rows.": "dataset_config "
        "dataset_train_split dataset_text_field max_samples",
        "data.eval takes files, or a fraction of data.train.": "eval_dataset test_datasets "
        "dataset_test_split validation_file",
        "data.packing: packed rows never attend to each other here.": "packing neat_packing",
        "Set data.shuffle to false for the order of the files.": "disable_shuffling "
        "shuffle_merged_datasets train_sampling_strategy",
        "The tokenizer's chat template is used; data.chat_template replaces it, and `megatrain "
        "data` shows the result.": "template chat_template chat_template_path default_system "
        "eos_token special_tokens",
        "Give it in data.template_kwargs.": "enable_thinking",
        "Not needed: rows are tokenized by a process per core.": "dataloader_* dataset_num_proc "
        "preprocessing_num_workers dataset_processes",
        "Not needed: micro-batches are filled by tokens.": "group_by_length pad_to_* padding_free",
        "The losses are those of loss.name; see docs/preferences.md and docs/rewards.md.": "rl "
        "loss_type pref_loss dpo_loss_type",
        "The losses are those of loss.name; pt cuts long texts into pieces, which is "
        "data.overlong: split, not drop.": "stage",
        "loss.beta is for preferences, loss.kl for rewards.": "beta",
        "Name reward functions on the command line, `megatrain train RUN.yaml --rewards "
        "FILE.py:NAME`: no config imports code.": "rewards reward_funcs reward_functions",
        "Set loss.label_smoothing; it depends on loss.name what is smoothed.": "label_smoothing "
        "label_smoothing_factor",
        "Set loss.sft, a mean over each answer and then over pairs.": "rpo_alpha cpo_alpha",
        "Set train.router_aux_loss; it is a mean over the step.": "router_aux_loss_coef "
        "moe_aux_loss_coef",
        "Set train.kernels to liger or none.": "use_liger_kernel enable_liger_kernel liger_*",
        "There is none: it would change what is trained.": "neftune_noise_alpha "
        "noisy_embedding_alpha use_galore use_badam use_apollo use_llama_pro",
        "Set model.media to frozen, projector or all.": "freeze_vision_tower "
        "freeze_multi_modal_projector freeze_mm_modules",
        "Set model.frozen to patterns of names.": "freeze_language_model unfrozen_parameters",
        "eval.every counts steps; null evaluates first and last.": "eval_strategy "
        "evaluation_strategy evals_per_epoch",
        "eval.patience counts evaluations.": "early_stopping_steps",
        "save.every counts steps or time; null saves at the end.": "save_strategy saves_per_epoch",
        "save.best keeps the checkpoint with the lowest evaluation loss.": "load_best_model_at_end "
        "metric_for_best_model greater_is_better",
        "`megatrain train --resume` and trainer.train(resume_from_checkpoint=True) continue "
        "a run.": "resume_from_checkpoint auto_resume_from_checkpoints",
        "A run is named after its folder, save.dir.": "run_name wandb_name logging_dir "
        "overwrite_output_dir",
        "Set log.to to [wandb], and log.project.": "wandb_project use_wandb",
        "Not in a config: `megatrain export` writes the model.": "push_to_hub hub_* export_dir",
        "Not needed: `megatrain train` trains.": "do_train do_eval do_predict",
    }
)
"""What to do here, by the name elsewhere; a name that ends with a star stands for its beginning."""


def our_key(path: Path) -> str | None:
    """Return the key that a path of a config means by another name; None: it is no alias."""
    *section, name = map(str, path)
    if len(section) > 1 or "." in name:
        return None
    place = f"{section[0]}." if section else ""
    key = ALIASES.get(f"{place}{name}") or ALIASES.get(name)
    is_ours = key == f"{place}{name}"  # like optim.learning_rate, which is an alias at the top
    return key if key is not None and key.startswith(place) and not is_ours else None


def with_our_keys(document: Document) -> tuple[Document, dict[str, str]]:
    """Return a document with aliases replaced by our keys, and {alias: key} of those.

    An alias stays where its value does not suit the key, or its key has another value: the checks
    of the config refuse it then (faults.py). No section of the document is in short form.
    """
    value, lines = dict(document.value), dict(document.lines)
    read_as: dict[str, str] = {}
    for path in [*_paths(value)]:
        given = value[path[0]] if len(path) == 1 else value[path[0]][path[1]]
        ours, new = read_alias(path, given)
        section, leaf = str(ours[0]), str(ours[-1])
        holder = value.get(section)
        if ours == path or not isinstance(holder, dict | None):
            continue
        holder = dict(holder or {})
        if holder.setdefault(leaf, new) != new:
            continue
        value[section] = holder
        del (holder if len(path) == 2 else value)[path[-1]]
        for old in [old for old in lines if old[: len(path)] == path]:
            lines.setdefault((*ours, *old[len(path) :]), lines[old])
        read_as[".".join(path)] = ".".join(map(str, ours))
    return replace(document, value=value, lines=lines), read_as


def _paths(value: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, part in value.items():
        yield (name,)
        if isinstance(part, dict) and our_key((name,)) is None:
            yield from ((name, key) for key in part)


def read_alias(path: Path, value: Any) -> tuple[Path, Any]:
    """Return the path and the value that a path and its value mean; both stay if it is no alias.

    They also stay if the value does not suit the key.
    """
    for end in (1, 2):
        if (key := our_key(path[:end])) is not None and len(path) >= end:
            try:
                new = read_value(str(path[-1]), value) if len(path) == end else value
            except ValueError:
                break
            return (*key.split("."), *path[end:]), new
    return path, value


def hint(name: str) -> str:
    """Return what to do in place of a name of another tool; empty: nobody knows it."""
    if name in ALIASES:
        return f"The key here is {ALIASES[name]}."
    beginnings = (known for known in HINTS if known.endswith("*"))
    found = next((known for known in beginnings if name.startswith(known[:-1])), name)
    return HINTS.get(name) or HINTS.get(found, "")


def near_hint(name: str) -> str:
    """Return the key of an alias that is spelled like a name; empty: there is none."""
    for near in difflib.get_close_matches(name, ALIASES, n=1, cutoff=0.85):
        key = ALIASES[near]
        elsewhere = "" if key.endswith(f".{near}") else f" ({near} elsewhere)"
        return f"Did you mean {key}{elsewhere}?"
    return ""


def read_value(name: str, value: Any) -> Any:
    """Return the value of an alias as its key here has it.

    Raises ValueError, with the end of the sentence "NAME is VALUE; ...".
    """
    return _READERS[name](value) if name in _READERS else value


def _unless_zero(value: Any) -> Any:
    """Return a number; 0 and less turn the setting off, which is null here."""
    try:
        return value if read_number(value) > 0 else None
    except ValueError:
        return value


def _fraction(value: Any) -> float:
    """Return a share of the run, so that 1 is not read as a step."""
    return float(read_number(value))


def _modules(value: Any) -> Any:
    """Return names of modules, which may be one text with commas."""
    if not isinstance(value, str):
        return value
    if value in ("all", "all-linear"):
        return ["all-linear"]
    if any(sign in value for sign in "\\()[]|^$+?"):  # PEFT takes a text as a regular expression
        raise ValueError("give a list of names, like [q_proj, v_proj], or all-linear")
    return [name.strip() for name in value.split(",")]


def _trackers(value: Any) -> Any:
    return [] if value in ("none", ["none"], None) else value


def _schedule(value: Any) -> Any:
    if value == "constant":
        raise ValueError(
            "there is no warm-up with it elsewhere: give optim.schedule: constant, and "
            "optim.warmup: 0 for none"
        )
    return "constant" if value == "constant_with_warmup" else value


def _attention(value: Any) -> Any:
    return {"disabled": "eager", "fa2": "flash_attention_2"}.get(str(value), value)


_READERS: dict[str, Callable[[Any], Any]] = {
    "max_steps": _unless_zero,
    "max_grad_norm": _unless_zero,
    "val_size": _unless_zero,
    "val_set_size": _unless_zero,
    "pref_ftx": _unless_zero,
    "warmup_ratio": _fraction,
    "target_modules": _modules,
    "lora_target_modules": _modules,
    "lora_target": _modules,
    "additional_target": _modules,
    "report_to": _trackers,
    "lr_scheduler_type": _schedule,
    "lr_scheduler": _schedule,
    "flash_attn": _attention,
}
"""Aliases whose values have another form; a value that no reader changes is checked as ours."""
