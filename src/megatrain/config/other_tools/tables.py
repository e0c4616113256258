"""The settings of other tools: their key and ours or why there is none, and their defaults.

One table per tool. A config with such a key is refused with the hint from here, and translate.py
translates files with it. docs/migration.md is written from it. A key that no table has is reported
as unknown, unless a prefix says what it belongs to.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from megatrain.config.other_tools.tool_config import Asks, Differs, Tool, ToolConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The translation of one key of another tool."""

    to: str = ""
    """Our key; empty if there is none."""
    why: str = ""
    """Why there is none, or a note on our key."""


ONE_ADAPTER = Differs("adapters are LoRA or DoRA, without this")
EXACT = Differs("weights that are trained are kept exact; model.base is the form of a frozen model")
NO_INT8 = Differs("the base is kept as it is; model.base: nf4 has fewer bits")
HOW_QUANTIZED = "model.base: nf4 is bitsandbytes' NF4 with double scales"
HOW_NARROW = "train.products: fp8 has one form"
STREAMED = "weights are streamed from host memory, without DeepSpeed, FSDP or accelerate"
ONE_PROCESS = "not needed: `megatrain train --gpus N` starts a process per GPU"
RECOMPUTE = "done for all layers, but for those that memory.kept_layers counts"
INDEXED = "rows are tokenized once, by a process per core, and then read by index"
IN_PARTS = "rows are tokenized first, into files that are mapped and not held in memory"
NO_CODE = "code in a model folder is never run"
VERB = "chosen by the command: megatrain train, eval, export"
RESUME = Asks("megatrain train --resume continues from the last checkpoint")
FOLDER = "a run folder that has a run is never overwritten"
HUB = Asks("`megatrain push` uploads the model; `megatrain export` writes a folder")
SAFE = "always done"
OWN_TEMPLATE = Asks(
    "chat template and special tokens come from the tokenizer; data.chat_template replaces it, and "
    "`megatrain data` shows the result"
)
OWN_TOKENIZER = "the tokenizer is read as its folder has it"
NO_METHOD = "only of methods with rewards, whose config is written by hand; see docs/rewards.md"
ONE_REFERENCE = Differs("the reference is the model that training starts from")
ONE_PASS = "always done: one pass before the first step computes the reference"
NO_TRICK = Differs("not supported: it changes the training result")
NO_WHOLE_ROW = "a row is computed on one GPU, by tiles if it is long: memory.tile_tokens"
BY_PROCESSOR = Asks("the model's processor decides it; data.processor_kwargs has its arguments")
IN_GROUPS = Differs("give the rate in optim.groups, by names of params")
NO_TERM = Differs("a term of the loss that is not supported")
NO_EMBEDDING = "adapters are of linear modules and experts, and of no embedding"
FROZEN = Differs("list frozen params in model.frozen")
LIGER = "train.kernels; needs the package liger-kernel and an accelerator"
IN_STEPS = Asks("the number of steps is not known here: set eval.every or save.every")
NO_KERNEL = "not needed: logits are always computed in chunks, with exact results"
BY_ROWS = "rows x accumulation x GPUs; train.batch_tokens where rows are packed"
SHUFFLED = "each epoch has a new order of rows; data.shuffle: false keeps the order of the files"
MIXED = Differs(
    "sources are concatenated; `weight` or `share` of a source in data.train mixes them"
)
MICRO = "evaluation uses train.micro_batch_tokens"
PRINTED = "the log and the report have it"
NAMED = "a run is named after its folder, save.dir"
CACHE = "tokenized rows are cached in $MEGATRAIN_CACHE under a hash of their inputs"
NOTHING_LIKE = "no equivalent"


def _table(renamed: dict[str, str], dropped: dict[str, str]) -> dict[str, Rule]:
    """Return rules from {key: our key, or "our key; note"} and {why: keys}."""
    rules = {}
    for key, text in renamed.items():
        to, _, why = text.partition("; ")
        rules[key] = Rule(to=to, why=why)
    for why, keys in dropped.items():
        rules |= {key: Rule(why=why) for key in keys.split()}
    return rules


_HF = _table(
    {
        "output_dir": "save.dir",
        "learning_rate": "optim.learning_rate",
        "weight_decay": "optim.weight_decay",
        "adam_beta1": "optim.betas",
        "adam_beta2": "optim.betas",
        "adam_epsilon": "optim.eps",
        "optim": "optim.name",
        "max_grad_norm": "train.max_grad_norm",
        "num_train_epochs": "train.epochs",
        "max_steps": "train.steps",
        "lr_scheduler_type": "optim.schedule",
        "lr_scheduler_kwargs": "optim.final_fraction",
        "warmup_ratio": "optim.warmup; a number below 1 is a fraction of the run",
        "warmup_steps": "optim.warmup; an integer is steps",
        "logging_steps": "log.every",
        "logging_strategy": "log.every",
        "eval_steps": "eval.every",
        "eval_strategy": "eval.every",
        "evaluation_strategy": "eval.every",
        "save_steps": "save.every",
        "save_strategy": "save.every",
        "save_total_limit": "save.keep",
        "load_best_model_at_end": "save.best",
        "seed": "train.seed",
        "data_seed": "data.seed",
        "report_to": "log.to",
        "bf16": "model.dtype; bf16 or fp32",
        "fp16": "model.dtype; bf16 or fp32",
        "torch_compile": "train.compile",
        "use_cpu": "memory.device",
        "per_device_train_batch_size": f"train.batch_rows; {BY_ROWS}",
        "gradient_accumulation_steps": f"train.batch_rows; {BY_ROWS}",
        "auto_find_batch_size": "train.micro_batch_tokens; auto is the default",
        "use_liger_kernel": LIGER,
        "full_determinism": "train.deterministic",
        "label_smoothing_factor": "loss.label_smoothing",
        "train_sampling_strategy": "data.shuffle; sequential keeps the order of the files",
    },
    {
        VERB: "do_train do_eval do_predict predict_with_generate",
        RESUME: "resume_from_checkpoint",
        FOLDER: "overwrite_output_dir ignore_data_skip",
        RECOMPUTE: "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing",
        STREAMED: "deepspeed fsdp accelerator_config",
        ONE_PROCESS: "ddp_timeout local_rank",
        INDEXED: "dataloader_num_workers",
        Differs(
            "no row is dropped: the last step of an epoch may have fewer"
        ): "dataloader_drop_last",
        MICRO: "per_device_eval_batch_size eval_accumulation_steps bf16_full_eval fp16_full_eval",
        HUB: "push_to_hub hub_model_id",
        NAMED: "run_name",
        PRINTED: "logging_dir logging_first_step disable_tqdm log_level logging_nan_inf_filter",
        NO_TRICK: "neftune_noise_alpha optim_args optim_target_modules",
        SAFE: "save_safetensors remove_unused_columns eval_on_start",
        "packing fills micro-batches with rows of any length": "group_by_length length_column_name",
        "a checkpoint can always be resumed": "save_only_model",
        Differs("the best checkpoint has the lowest evaluation loss"): "metric_for_best_model "
        "greater_is_better",
        "arithmetic follows the dtype": "tf32 half_precision_backend",
        NOTHING_LIKE: "torch_empty_cache_steps eval_delay",
    },
)

_LORA = {
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "use_rslora": "lora.rslora",
    "use_dora": "lora.dora",
}

_LLAMA_FACTORY = _HF | _table(
    {
        "model_name_or_path": "model.name_or_path",
        "flash_attn": "model.attn",
        "model_revision": "model.revision",
        "dataset": "data.train; the files and formats that dataset_info.json names",
        "eval_dataset": "data.eval; the files and formats that dataset_info.json names",
        "max_samples": "data.train; rows of each source",
        "val_size": "data.eval; held out from each source; there from all together",
        "cutoff_len": "data.max_length",
        "packing": "data.packing",
        "neat_packing": "data.packing; rows never attend to each other",
        "train_on_prompt": "data.train_on",
        "stage": "data.train_on; pt trains on all tokens, sft on the assistant's",
        "moe_aux_loss_coef": "train.router_aux_loss",
        "mask_history": "data.train_on; last trains on the last turn only",
        "enable_thinking": "data.template_kwargs",
        "pure_bf16": "model.dtype; masters are always fp32",
        "new_special_tokens": "model.add_tokens",
        "add_special_tokens": "model.add_tokens",
        "add_tokens": "model.add_tokens; as special tokens",
        "finetuning_type": "lora.rank",
        "lora_rank": "lora.rank",
        "lora_target": "lora.targets",
        "adapter_name_or_path": "lora.path",
        "additional_target": "lora.modules_to_save",
        "pref_beta": "loss.beta",
        "pref_loss": "loss.name",
        "simpo_gamma": "loss.gamma",
        "dpo_label_smoothing": "loss.label_smoothing",
        "kto_chosen_weight": "loss.desirable_weight",
        "kto_rejected_weight": "loss.undesirable_weight",
        "enable_liger_kernel": LIGER,
        "disable_shuffling": "data.shuffle",
        "early_stopping_steps": "eval.patience",
        "use_muon": "optim.name; there experts in one tensor have AdamW",
        "fp8": "train.products",
        "quantization_bit": "model.base",
        "loraplus_lr_ratio": "optim.groups",
        "pref_ftx": "loss.sft",
        "freeze_vision_tower": "model.media",
        "freeze_multi_modal_projector": "model.media",
    }
    | _LORA,
    {
        NO_METHOD: "reward_model",
        NO_TERM: "pref_bco_weight ld_alpha",
        ONE_REFERENCE: "ref_model",
        ONE_ADAPTER: "pissa_init create_new_adapter",
        NO_EMBEDDING: "loraplus_lr_embedding",
        HOW_QUANTIZED: "quantization_method quantization_type double_quantization "
        "quantization_device_map",
        "arithmetic follows the dtype": "upcast_layernorm upcast_lmhead_output",
        OWN_TEMPLATE: "template tool_format default_system",
        OWN_TOKENIZER: "resize_vocab use_fast_tokenizer split_special_tokens",
        NO_CODE: "trust_remote_code",
        CACHE: "overwrite_cache tokenized_path cache_dir preprocessing_batch_size",
        INDEXED: "preprocessing_num_workers",
        IN_PARTS: "streaming buffer_size",
        MIXED: "mix_strategy interleave_probs",
        PRINTED: "plot_loss",
        NO_KERNEL: "use_unsloth",
        RECOMPUTE: "disable_gradient_checkpointing use_unsloth_gc use_reentrant_gc",
        FROZEN: "freeze_language_model",
        BY_PROCESSOR: "image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches",
        "videos are not read": "video_max_pixels video_min_pixels video_fps video_maxlen "
        "use_audio_in_video",
        "sounds are resampled to the rate that the model reads": "audio_sampling_rate",
        NO_TRICK: "use_galore use_badam use_apollo use_adam_mini use_llama_pro "
        "mixture_of_depths shift_attn train_from_scratch use_dft_loss use_asft_loss use_eaft_loss",
        Asks(
            "its factor is cutoff_len over the positions of the model: set model.rope to it, like "
            "{type: yarn, factor: 4.0}; a run whose rows need it names the line"
        ): "rope_scaling",
        HUB: "export_dir hf_hub_token",
        "MegaTrain looks for dataset_info.json there": "dataset_dir",
        "it is `media` of sources with images or sound in data.train": "media_dir",
        "only of finetuning_type freeze": "freeze_trainable_layers freeze_trainable_modules "
        "freeze_extra_modules",
        MICRO: "eval_on_each_dataset infer_backend infer_dtype",
    },
)

_AXOLOTL = {
    key: rule
    for key, rule in _HF.items()
    if key
    not in (
        "num_train_epochs",
        "per_device_train_batch_size",
        "lr_scheduler_type",
        "optim",
        "report_to",
    )
} | _table(
    {
        "base_model": "model.name_or_path",
        "revision_of_model": "model.revision",
        "datasets": "data.train",
        "test_datasets": "data.eval",
        "val_set_size": "data.eval",
        "sequence_len": "data.max_length",
        "excess_length_strategy": "data.overlong",
        "sample_packing": "data.packing; rows never attend to each other",
        "train_on_inputs": "data.train_on",
        "micro_batch_size": f"train.batch_rows; {BY_ROWS}",
        "chat_template_jinja": "data.chat_template",
        "chat_template_kwargs": "data.template_kwargs",
        "curriculum_sampling": "data.shuffle",
        "num_epochs": "train.epochs",
        "optimizer": "optim.name",
        "lr_scheduler": "optim.schedule",
        "cosine_min_lr_ratio": "optim.final_fraction",
        "attn_implementation": "model.attn",
        "flash_attention": "model.attn",
        "sdp_attention": "model.attn",
        "flex_attention": "model.attn",
        "eager_attention": "model.attn",
        "use_wandb": "log.to",
        "wandb_project": "log.to",
        "use_tensorboard": "log.to",
        "use_trackio": "log.to",
        "use_mlflow": "log.to",
        "mlflow_experiment_name": "log.to",
        "early_stopping_patience": "eval.patience",
        "tokens": "model.add_tokens; as special tokens",
        "rope_scaling": "model.rope",
        "overrides_of_model_config": "model.rope; of its keys rope_scaling alone",
        "adapter": "lora.rank",
        "lora_r": "lora.rank",
        "lora_alpha": "lora.alpha",
        "lora_dropout": "lora.dropout",
        "lora_target_modules": "lora.targets",
        "lora_target_linear": "lora.targets",
        "lora_model_dir": "lora.path",
        "peft_use_rslora": "lora.rslora",
        "peft_use_dora": "lora.dora",
        "lora_modules_to_save": "lora.modules_to_save",
        "rl": "loss.name",
        "rl_beta": "loss.beta",
        "dpo_beta": "loss.beta",
        "orpo_alpha": "loss.beta",
        "simpo_gamma": "loss.gamma",
        "dpo_label_smoothing": "loss.label_smoothing",
        "cpo_alpha": "loss.sft",
        "loraplus_lr_ratio": "optim.groups",
        "load_in_4bit": "model.base",
        "freeze_mm_modules": "model.media",
        "fp8": "train.products",
        "kto_desirable_weight": "loss.desirable_weight",
        "kto_undesirable_weight": "loss.undesirable_weight",
        "dpo_loss_type": "loss.name",
        "trl": "loss.beta",
        "evals_per_epoch": "eval.every",
        "saves_per_epoch": "save.every",
        "liger_rms_norm": LIGER,
        "liger_glu_activation": LIGER,
    },
    {
        NO_TERM: "dpo_use_weighting dpo_loss_weights",
        NO_EMBEDDING: "loraplus_lr_embedding",
        ONE_PASS: "precompute_ref_log_probs",
        "a sequence is as long as its rows": "dpo_padding_free",
        "data.max_length bounds prompt and answer together": "max_prompt_len",
        ONE_ADAPTER: "relora_steps",
        "not needed: adapters are computed by plain products": "lora_mlp_kernel lora_qkv_kernel "
        "lora_o_kernel",
        NO_INT8: "load_in_8bit",
        Differs("folders in GPTQ are not read: start from the unquantized one"): "gptq",
        OWN_TEMPLATE: "chat_template special_tokens default_system_message",
        OWN_TOKENIZER: "tokenizer_type resize_token_embeddings_to_32x",
        Asks(
            "the tokenizer is the model folder's: if this is another one, put its files there"
        ): "tokenizer_config",
        NO_CODE: "trust_remote_code",
        Differs("plugins are not supported"): "plugins",
        NO_METHOD: "reward_model process_reward_model",
        "taken from the model's config.json": "model_type base_model_config is_llama_derived_model "
        "is_mistral_derived_model is_falcon_derived_model processor_type",
        BY_PROCESSOR: "image_size image_resize_algorithm",
        CACHE: "dataset_prepared_path skip_prepare_dataset",
        Differs("rows that come twice are trained twice"): "dataset_exact_deduplication",
        INDEXED: "dataset_processes dataset_num_proc",
        IN_PARTS: "streaming",
        SHUFFLED: "shuffle_merged_datasets",
        "a sequence is as long as its rows, without padding": "pad_to_sequence_len "
        "eval_sample_packing pad_to_multiple_of",
        FROZEN: "unfrozen_parameters",
        NO_KERNEL: "liger_fused_linear_cross_entropy cut_cross_entropy dpo_use_liger_kernel",
        "not supported; sdpa is the default": "xformers_attention s2_attention",
        RESUME: "auto_resume_from_checkpoints",
        NAMED: "wandb_name",
        PRINTED: "debug",
        NO_TRICK: "noisy_embedding_alpha cosine_constant_lr_ratio qat "
        "loss_watchdog_threshold loss_watchdog_patience lisa_n_layers",
        IN_GROUPS: "lr_groups embedding_lr",
        NO_WHOLE_ROW: "sequence_parallel_degree context_parallel_size tensor_parallel_size",
        NOTHING_LIKE: "strict hub_model_revision eval_table_size eval_max_new_tokens",
    },
)

_TRL = _HF | _table(
    {
        "model_name_or_path": "model.name_or_path",
        "dtype": "model.dtype",
        "torch_dtype": "model.dtype",
        "attn_implementation": "model.attn",
        "model_revision": "model.revision",
        "dataset_name": "data.train",
        "dataset_config": "data.train; name of a source",
        "dataset_train_split": "data.train; split of a source",
        "dataset_test_split": "data.eval; split of a source",
        "dataset_text_field": "data.train; columns of a source",
        "chat_template_path": "data.chat_template",
        "datasets": "data.train",
        "max_length": "data.max_length",
        "max_seq_length": "data.max_length",
        "packing": "data.packing; rows never attend to each other",
        "assistant_only_loss": "data.train_on",
        "completion_only_loss": "data.train_on",
        "activation_offloading": "memory.tape",
        "router_aux_loss_coef": "train.router_aux_loss; the mean over a step, not over each "
        "micro-batch",
        "use_peft": "lora.rank",
        "lora_r": "lora.rank",
        "lora_target_modules": "lora.targets",
        "lora_target_parameters": "lora.experts",
        "lora_modules_to_save": "lora.modules_to_save",
        "loss_type": "loss.name",
        "beta": "loss.beta",
        "simpo_gamma": "loss.gamma",
        "label_smoothing": "loss.label_smoothing",
        "cpo_alpha": "loss.sft",
        "rpo_alpha": "loss.sft",
        "load_in_4bit": "model.base",
        "desirable_weight": "loss.desirable_weight",
        "undesirable_weight": "loss.undesirable_weight",
    }
    | _LORA,
    {
        "adapters are those of a causal model": "lora_task_type",
        ONE_REFERENCE: "sync_ref_model",
        "only of sync_ref_model": "ref_model_mixup_alpha ref_model_sync_steps",
        ONE_PASS: "precompute_ref_log_probs precompute_ref_batch_size",
        NO_TERM: "ld_alpha use_weighting f_divergence_type reference_free",
        "only of loss types that are not supported": "loss_weights",
        "models without dropout train the same": "disable_dropout",
        Differs("longer rows are cut at the end"): "truncation_mode",
        NO_INT8: "load_in_8bit",
        HOW_QUANTIZED: "use_bnb_nested_quant",
        OWN_TEMPLATE: "eos_token",
        OWN_TOKENIZER: "pad_token",
        NO_CODE: "trust_remote_code",
        NO_METHOD: "num_generations",
        "data.max_length bounds prompt and answer together": "max_prompt_length "
        "max_completion_length",
        INDEXED: "dataset_num_proc dataset_batch_size",
        IN_PARTS: "dataset_streaming",
        SHUFFLED: "shuffle_dataset",
        "the row format is detected; see data.train.format": "dataset_kwargs",
        "a sequence is as long as its rows, without padding": "padding_free pad_to_multiple_of "
        "eval_packing",
        Differs("packed rows are never cut"): "packing_strategy",
        Asks("set what it changes in model: dtype, attn, revision"): "model_init_kwargs",
    },
)

_ELSEWHERE = _table(
    {
        "lr": "optim.learning_rate",
        "min_lr": "optim.final_fraction; a fraction of the peak",
        "batch_size": f"train.batch_rows; {BY_ROWS}",
        "global_batch_size": f"train.batch_rows; {BY_ROWS}",
        "max_seq_len": "data.max_length",
        "model_max_length": "data.max_length",
        "block_size": "data.max_length",
        "betas": "optim.betas",
        "clip_grad_norm": "train.max_grad_norm",
        "gradient_clipping": "train.max_grad_norm",
        "precision": "model.dtype",
        "checkpoint_dir": "save.dir",
        "grad_accum": f"train.batch_rows; {BY_ROWS}",
        "rope_type": "model.rope; its key type",
        "rope_theta": "model.rope; its key theta",
    },
    {STREAMED: "zero_stage cpu_offload", EXACT: "quantize", INDEXED: "num_workers"},
)
_PREFIXES = {
    ONE_ADAPTER: ("lora", "qlora", "dora_", "peft", "adapter"),
    EXACT: ("quant", "load_in_", "gptq", "awq"),
    HOW_QUANTIZED: ("bnb_",),
    HOW_NARROW: ("fp8_",),
    STREAMED: ("deepspeed", "fsdp", "zero_", "accelerate"),
    ONE_PROCESS: ("ddp_", "nproc", "num_gpus", "tensor_parallel"),
    NO_METHOD: ("ppo_", "grpo_", "reward_model"),
    NO_TERM: ("dpo_", "kto_", "orpo_"),
    "distillation is `loss: distill`; see docs/distillation.md": ("kd_",),
    HUB: ("hub_", "push_to"),
    INDEXED: ("dataloader_",),
    NAMED: ("wandb_",),
    PRINTED: ("include_",),
    "MLflow reads MLFLOW_TRACKING_URI; a run is named after its folder": ("mlflow_", "hf_mlflow_"),
    NO_KERNEL: ("liger_", "unsloth_", "use_unsloth", "flash_attn_"),
    ONE_REFERENCE: ("ref_model_",),
    "only of use_galore, use_apollo and use_badam": ("galore_", "apollo_", "badam_"),
    "only of pissa_init": ("pissa_",),
    NOTHING_LIKE: ("torch_compile_", "ray_"),
}
"""Why there is no key for any other key with this beginning."""
TABLES: dict[Tool, dict[str, Rule]] = {
    "LLaMA-Factory": _LLAMA_FACTORY,
    "Axolotl": _AXOLOTL,
    "TRL": _TRL,
}
NAMES = _ELSEWHERE | _AXOLOTL | _TRL | _LLAMA_FACTORY
"""Every key of the other tools. Where tools disagree, our key is the same."""

DEFAULTS: dict[Tool, dict[str, Any]] = {
    "LLaMA-Factory": {
        "learning_rate": 5e-5, "num_train_epochs": 3, "lr_scheduler_type": "linear",
        "adam_beta2": 0.999, "warmup_steps": 0, "cutoff_len": 2048, "packing": False,
        "finetuning_type": "lora", "lora_target": "all", "pref_loss": "sigmoid",
        "pref_beta": 0.1, "simpo_gamma": 0.5, "freeze_vision_tower": True,
    },
    "Axolotl": {
        "adam_beta2": 0.999, "num_epochs": 1, "sequence_len": 512, "warmup_ratio": 0.03,
        "sample_packing": False, "rl_beta": 0.1, "cpo_alpha": 1.0,
    },
    "TRL": {
        "num_train_epochs": 3, "lr_scheduler_type": "linear", "adam_beta2": 0.999,
        "warmup_steps": 0, "max_length": 1024, "packing": False, "dataset_test_split": "test",
        "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": "PEFT",
    },
}  # fmt: skip
"""A tool's value for a key that is absent, null or dropped."""
BY_TRAINER: dict[str, dict[str, Any]] = {
    "sft": {
        "learning_rate": 2e-5, "assistant_only_loss": False, "router_aux_loss_coef": "model",
    },
    "dpo": {"learning_rate": 1e-6, "beta": 0.1, "router_aux_loss_coef": "model"},
    "kto": {
        "learning_rate": 1e-6, "beta": 0.1, "router_aux_loss_coef": "model",
        "train_sampling_strategy": "sequential",
    },
    "orpo": {"learning_rate": 1e-6, "beta": 0.1},
    "cpo": {"learning_rate": 1e-6, "beta": 0.1, "simpo_gamma": 0.5, "cpo_alpha": 1.0},
}  # fmt: skip
"""TRL's values that depend on the trainer."""
REQUIRED: dict[Tool, dict[str, str]] = {
    "LLaMA-Factory": {},
    "Axolotl": {
        "learning_rate": "optim.learning_rate", "lora_r": "lora.rank", "lora_alpha": "lora.alpha",
        "simpo_gamma": "loss.gamma",
    },
    "TRL": {},
}  # fmt: skip
"""Keys without which a run of a tool does not start, and ours: the user sets them."""

ALWAYS: dict[Tool, dict[str, tuple[Any, str]]] = {
    "LLaMA-Factory": {
        "data.overlong": (
            "truncate",
            Differs("there prompt and answer of longer rows are cut in proportion; here the end"),
        )
    },
    "Axolotl": {},
    "TRL": {"data.overlong": ("truncate", "TRL always cuts longer rows at the end")},
}
"""Behavior of a tool without a key: our key, value and note."""

NULL_MEANS: dict[tuple[Tool, str], tuple[tuple[str, ...], str]] = {
    ("TRL", "max_length"): (
        ("data.max_length", "data.overlong"),
        Asks("there null never cuts a row: set data.max_length to the length of your longest row"),
    ),
}
"""Keys whose null is not the default: our keys that then keep their value, and why."""

ROWS: dict[Tool, tuple[str, int]] = {
    "LLaMA-Factory": ("per_device_train_batch_size", 8),
    "Axolotl": ("micro_batch_size", 1),
    "TRL": ("per_device_train_batch_size", 8),
}
"""The key that counts the rows of a micro-batch, and its default."""
ACCUMULATION = "gradient_accumulation_steps"


def defaults_of(asked: ToolConfig) -> dict[str, Any]:
    """Return the tool's values for keys that are absent, null or dropped."""
    return DEFAULTS[asked.tool] | BY_TRAINER.get(asked.trainer, {})


def prefix_rule(key: str) -> Rule | None:
    """Return the rule for a key by its prefix, like lora_anything."""
    for why, prefixes in _PREFIXES.items():
        if key.lower().startswith(prefixes):
            return Rule(why=why)
    return None


def is_elsewhere(key: str) -> bool:
    """Return whether another tool has this very key, and we have its setting."""
    return key in NAMES and bool(NAMES[key].to)


def hint(key: str) -> str:
    """Return a hint for a key of another tool, or one similar to it; else an empty string."""
    name = key.lower().replace("-", "_")
    rule = NAMES.get(name) or prefix_rule(name)
    if rule is not None:
        return f"The key here is {_ours(rule)}." if rule.to else f"No such setting: {rule.why}."
    near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.85)
    if near and NAMES[near[0]].to:
        return f"Did you mean {NAMES[near[0]].to} ({near[0]} elsewhere)?"
    return ""


def _ours(rule: Rule) -> str:
    return f"{rule.to} ({rule.why})" if rule.why else rule.to
