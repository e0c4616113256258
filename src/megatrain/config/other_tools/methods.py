"""The method that a file of another tool names: its loss, and its adapters.

Keys of adapters count only where another key turns adapters on, and those of a loss only where it
is that loss; elsewhere they are dropped. A file whose keys name a method that MegaTrain does not
have is refused by that name: a run with another method would not be that of the file.

TRL names the trainer on its command line (`trl dpo --config dpo.yaml`), not in the file. A file is
for the trainers whose configs have all of its keys and that read its rows; where several remain,
the user names one (`--tool trl-dpo`), because learning rates and losses differ between them.
"""

from __future__ import annotations

from typing import Any

from megatrain.config.other_tools.tool_config import (
    Asks,
    Converter,
    Differs,
    DroppedKey,
    NoSuchMethod,
    RowKind,
    ToolConfig,
    trl_names,
)

REWARDS = "rewards are functions of your own here; write `loss: grpo` by docs/rewards.md"
ONLY = "the losses here are next_token, dpo, ipo, orpo, simpo, apo_zero, robust and kto"
ONE_LOSS = f"give one loss; sft beside another one is loss.sft here, and {ONLY}"
NO_REWARD_MODEL = "reward models are trained from Python here; see docs/python.md and docs/trl.md"
NO_TEACHER = (
    "a teacher goes over the rows ahead of the run here, and not over the student's own answers; "
    "write `loss: distill` by docs/distillation.md"
)
TRAINED = ("sft", "dpo", "kto", "orpo", "cpo")
"""The trainers whose runs can be repeated here."""
REFUSED = {
    "reward": NO_REWARD_MODEL, "rm": NO_REWARD_MODEL, "prm": NO_REWARD_MODEL,
    "grpo": REWARDS, "gdpo": REWARDS, "rloo": REWARDS, "ppo": REWARDS, "online_dpo": REWARDS,
    "xpo": REWARDS, "nash_md": REWARDS, "ebft": REWARDS,
    "gkd": NO_TEACHER, "distillation": NO_TEACHER,
}  # fmt: skip
"""Methods of other tools, and why a run with them cannot be repeated here."""
TRAINERS = (*TRAINED, "reward", "grpo", "rloo", "ppo", "online_dpo", "gkd", "distillation")
_COMMANDS = ("sft", "dpo", "kto", "reward", "grpo", "rloo", "distillation")
"""Trainers with a command of TRL; the others are experimental, or of older versions."""
_PREFERENCES = "dpo kto orpo cpo grpo rloo ppo online_dpo gkd distillation"
_KEYS = {
    "sft gkd": "packing packing_strategy eval_packing completion_only_loss assistant_only_loss "
    "dataset_text_field dataset_kwargs max_seq_length",
    "sft reward gkd": "chat_template_path eos_token",
    "sft dpo kto orpo cpo reward online_dpo gkd": "max_length",
    "sft dpo kto reward gkd": "activation_offloading",
    "sft dpo gkd": "padding_free",
    "dpo": "loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef use_weighting "
    "discopop_tau rpo_alpha reference_free",
    "dpo kto": "precompute_ref_log_probs precompute_ref_batch_size",
    "dpo kto grpo rloo": "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
    "dpo cpo": "label_smoothing",
    "kto": "desirable_weight undesirable_weight",
    "cpo": "cpo_alpha simpo_gamma",
    "reward": "center_rewards_coefficient",
    "ppo": "num_ppo_epochs sft_model_path kl_coef cliprange cliprange_value vf_coef lam "
    "whiten_rewards total_episodes",
    "ppo online_dpo": "reward_model_path missing_eos_penalty",
    "ppo grpo rloo online_dpo gkd distillation": "temperature",
    "grpo rloo online_dpo distillation": "use_vllm vllm_mode vllm_gpu_memory_utilization "
    "vllm_server_host vllm_server_port top_p top_k min_p repetition_penalty generation_kwargs",
    "grpo rloo online_dpo": "reward_weights",
    "grpo rloo": "num_generations num_generations_eval num_iterations epsilon epsilon_high "
    "steps_per_generation generation_batch_size mask_truncated_completions reward_funcs",
    "grpo": "scale_rewards importance_sampling_level delta top_entropy_quantile",
    "rloo": "normalize_advantages reward_clip_range",
    "grpo rloo distillation orpo cpo": "max_completion_length",
    "gkd distillation": "teacher_model_name_or_path teacher_model_init_kwargs",
    "gkd": "lmbda seq_kd",
    _PREFERENCES: "beta max_prompt_length",
}
_HAVE = {key: set(names.split()) for names, keys in _KEYS.items() for key in keys.split()}
"""The trainers that have a key, for keys that not all have."""
_LOSS_TYPES = {
    "sft gkd": "nll chunked_nll dft",
    "dpo": "exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down "
    "discopop sft sigmoid_norm",
    "dpo cpo online_dpo": "sigmoid ipo",
    "dpo cpo": "hinge",
    "kto": "kto apo_zero_unpaired",
    "cpo": "simpo alphapo",
    "grpo": "grpo dr_grpo dapo bnpo luspo cispo sapo vespo",
}
_LOSS_OF = {kind: set(names.split()) for names, kinds in _LOSS_TYPES.items()
            for kind in kinds.split()}  # fmt: skip
"""The trainers that have a loss_type."""
_ROWS: dict[RowKind, set[str]] = {
    "strings": {"sft", "gkd"},
    "turns": {"sft", "gkd"},
    "other": {"sft", "gkd"},
    "pairs": {"dpo", "orpo", "cpo", "reward"},
    "kto": {"kto"},
}
"""The trainers that read such rows."""
LOSSES: dict[tuple[str, str], str] = {
    ("sft", "nll"): "next_token", ("sft", "chunked_nll"): "next_token",
    ("dpo", "sigmoid"): "dpo", ("dpo", "ipo"): "ipo",
    ("dpo", "apo_zero"): "apo_zero", ("dpo", "robust"): "robust",
    ("kto", "kto"): "kto", ("orpo", ""): "orpo", ("cpo", "simpo"): "simpo",
}  # fmt: skip
"""Our losses by trainer and loss_type."""
_FIRST = {"sft": "nll", "dpo": "sigmoid", "kto": "kto", "cpo": "sigmoid"}
"""The loss_type of a trainer whose file has none."""


def find_trainer(asked: ToolConfig) -> str:
    """Return the trainer that a file of TRL is for. Raises NoSuchMethod if it is not clear."""
    fitting = [name for name in TRAINERS if name in _candidates(asked)]
    usual = [name for name in fitting if name in _COMMANDS] or fitting
    if len(usual) == 1:
        return usual[0]
    if usual and not any(name in TRAINED for name in fitting):
        raise NoSuchMethod("", None, f"its keys are those of TRL's {_or(usual)}: {why(usual[0])}")
    shown = [name for name in fitting if name in (*TRAINED, *_COMMANDS)]
    found = f"these keys and rows fit {_or(shown)}" if fitting else "no trainer has all its keys"
    example = next((name for name in fitting if name in TRAINED), "sft")
    raise NoSuchMethod(
        "",
        None,
        f"TRL names the trainer on its command line, not in the file, and {found}. Learning rates "
        f"and losses differ between them: name it, like `--tool trl-{example}`",
    )


def _candidates(asked: ToolConfig) -> set[str]:
    names = set(TRAINERS)
    for key in asked:
        if asked[key] is not None:
            names &= _HAVE.get(key, names)
    kinds = loss_types(asked)
    if len(kinds) > 1:
        names &= {"dpo"}
    for kind in kinds:
        names &= _LOSS_OF.get(kind, names)
    for source in trl_names(asked):
        rows = asked.rows_of(source)
        names &= names if rows is None else _ROWS[rows]
    return names


def loss_types(asked: ToolConfig) -> list[str]:
    """Return the loss types of a file of TRL: it writes them as a list, and reads a word too."""
    given = asked.get("loss_type")
    return [] if given is None else [str(one) for one in (given if isinstance(given, list) else
                                                         [given])]  # fmt: skip


def trained_loss(asked: ToolConfig) -> str:
    """Return our name of the loss of a file of TRL. Raises NoSuchMethod."""
    trainer = asked.trainer
    if trainer not in TRAINED:
        raise NoSuchMethod("", None, f"TRL's {trainer} is not a method here: {why(trainer)}")
    if trainer == "orpo":
        return "orpo"
    kinds = loss_types(asked) or [_FIRST[trainer]]
    if len(kinds) > 1:
        weights = asked.get("loss_weights")
        weighed = f" with the weights {weights}" if weights else ""
        raise NoSuchMethod("loss_type", f"{', '.join(kinds)}{weighed}", ONE_LOSS)
    found = LOSSES.get((trainer, kinds[0]))
    if found is None:
        raise NoSuchMethod("loss_type", f"{kinds[0]} of TRL's {trainer}", ONLY)
    return found


def why(method: str) -> str:
    """Return why a method of another tool cannot be repeated here."""
    return REFUSED.get(method, ONLY)


def named_trainer(name: str) -> str | None:
    """Return the trainer that a user calls by this name, None if there is none."""
    plain = name.lower().replace("-", "_")
    return plain if plain in {*TRAINERS, *REFUSED} else None


def _or(names: list[str]) -> str:
    return "".join(names) if len(names) < 2 else f"{', '.join(names[:-1])} or {names[-1]}"


PEFT = "PEFT"
"""In place of a list of modules: PEFT chooses them by the model's type."""
NO_ADAPTERS = "adapters are off, every weight is trained"
OFF = "off, as by default here"
_NESTED = {
    "LLaMA-Factory": "double_quantization", "Axolotl": "bnb_4bit_use_double_quant",
    "TRL": "use_bnb_nested_quant",
}  # fmt: skip
"""The key by which scales of 4-bit weights are kept in 8 bits; TRL alone does not by default."""
_NESTED_HERE = Differs("there scales are in fp32, here in 8 bits (double quantization)")
_RANKS = {"LLaMA-Factory": ("lora_rank", 8), "Axolotl": ("lora_r", 8), "TRL": ("lora_r", 16)}
"""The key of the rank, and its default."""
_LOSSES = {
    "LLaMA-Factory": {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"},
    "Axolotl": {"dpo": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo", "kto": "kto"},
}
"""Our losses, by what pref_loss and rl call them."""
_STAGES = {"sft": "next_token", "pt": "next_token", "kto": "kto"}
_OTHER_LOSSES = ("use_dft_loss", "use_asft_loss", "use_eaft_loss")
_OFF = (None, False, "", "none", "false")
_WITH_BETA = ("dpo", "ipo", "orpo", "simpo", "apo_zero", "robust", "kto")
_WITH_SFT = ("dpo", "ipo", "simpo", "apo_zero", "robust")


QUERY_AND_VALUE = ("q_proj", "v_proj")
PEFT_TARGETS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("gemma", "gemma2", "gemma3_text", "gemma4", "gpt_neo", "gptj", "llama", "llama4",
         "mistral", "mixtral", "opt", "qwen2", "qwen3", "stablelm"),
        QUERY_AND_VALUE,
    ),
    **dict.fromkeys(("bloom", "chatglm", "falcon", "gpt_neox"), ("query_key_value",)),
    "codegen": ("qkv_proj",),
    "gpt2": ("c_attn",),
    "gpt_bigcode": ("c_attn",),
    "mpt": ("Wqkv",),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
}  # fmt: skip
"""The modules that PEFT adapts by the model's type, where a config of TRL names none: the part of
its TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING that has causal decoders.
`python -m proofs.migrated --check` compares it with the installed PEFT."""


def uses_adapters(asked: ToolConfig) -> bool:
    """Return whether a config trains adapters."""
    if asked.tool == "LLaMA-Factory":
        return bool(asked.given("finetuning_type", "lora") == "lora")
    if asked.tool == "Axolotl":
        return asked.get("adapter") in ("lora", "qlora") or bool(asked.get("lora_model_dir"))
    return bool(asked.get("use_peft"))


def _turned_on(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """Return the rank, for the key that turns adapters on."""
    if not uses_adapters(asked):
        raise DroppedKey(NO_ADAPTERS)
    _refuse_beside_folder(asked)
    key, default = _RANKS[asked.tool]
    if value == "qlora" and not asked.get("load_in_4bit"):
        return asked.given(key, default), Asks("qlora needs load_in_4bit: set model.base to nf4")
    return asked.given(key, default), ""


def _refuse_beside_folder(asked: ToolConfig) -> None:
    if asked.get("adapter_name_or_path") or asked.get("lora_model_dir"):
        raise DroppedKey("the folder of the adapter that training starts from has its own")


def _if_on(convert: Converter) -> Converter:
    """Return the converter for a key that counts only where adapters are on."""

    def checked(value: Any, asked: ToolConfig) -> tuple[Any, str]:
        if not uses_adapters(asked):
            raise DroppedKey(NO_ADAPTERS)
        if convert is not _started_from:
            _refuse_beside_folder(asked)
        return convert(value, asked)

    return checked


def _kept(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    return value, ""


def _targets(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """Return the names of modules: a list, or text with commas."""
    if value == PEFT:
        return _peft_targets(asked)
    names, _ = _modules(value, asked)
    if asked.tool == "Axolotl" and asked.get("lora_target_linear"):
        return ["all-linear"], "lora_target_linear adds every linear module"
    if any(name in ("all", "all-linear") for name in names):
        return ["all-linear"], ""
    return names, ""


def _modules(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """Return names: a list, or text with commas."""
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise DroppedKey(Asks("not a list of names"))
    return [name.strip() for name in listed if name.strip()], ""


def _peft_targets(asked: ToolConfig) -> tuple[list[str], str]:
    """Return the modules that PEFT adapts, and a note. Raises DroppedKey if it refuses."""
    kind = asked.model_type
    if kind is None:
        return [*QUERY_AND_VALUE], Asks(
            "PEFT's table for llama, mistral, qwen2, qwen3, gemma and others; the type of this "
            "model is not known on this machine: if it is another one, set lora.targets to those "
            "of TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING in PEFT"
        )
    if kind not in PEFT_TARGETS:
        raise DroppedKey(
            Asks(
                f"PEFT has no default for the model type {kind}, so TRL does not start without "
                "lora_target_modules: set lora.targets; without it all linear modules are adapted"
            )
        )
    return [*PEFT_TARGETS[kind]], f"PEFT's table for the model type {kind}"


def _every_linear(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    if not value:
        raise DroppedKey("off: lora_target_modules decides")
    return ["all-linear"], ""


def _started_from(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, list) or len(listed) != 1:
        raise DroppedKey(Asks("give one adapter: several are not merged"))
    return listed[0], ""


def _narrow_base(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """Return the form of the frozen model for a key that asks for 4 bits."""
    if value in _OFF:
        raise DroppedKey(OFF)
    if not uses_adapters(asked):
        raise DroppedKey(Differs("weights that are trained are kept in full"))
    given = asked.get("bnb_config_kwargs")
    details = {**asked, **(given if isinstance(given, dict) else {})}
    kinds = (details.get(key) for key in ("quantization_type", "bnb_4bit_quant_type"))
    bits = "4" if value is True else str(value)
    kind = next((str(one) for one in kinds if one is not None), "nf4")
    method = str(asked.given("quantization_method", "bnb"))
    if (bits, kind) != ("4", "nf4") or method not in ("bnb", "bitsandbytes"):
        raise DroppedKey(Differs("the base is kept as it is: model.base has nf4 and no other form"))
    is_nested = details.get(_NESTED[asked.tool])
    if is_nested is None:
        is_nested = asked.tool != "TRL"
    return "nf4", "" if is_nested else _NESTED_HERE


def _faster_b(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """Return the group of LoRA+."""
    if not uses_adapters(asked):
        raise DroppedKey(NO_ADAPTERS)
    return [{"params": ["*lora_B*"], "times": value}], ""


def require_method(asked: ToolConfig) -> None:
    """Raise NoSuchMethod if a file names a loss or a kind of adapter that MegaTrain lacks."""
    asked_loss(asked)
    if asked.tool == "LLaMA-Factory":
        kind = asked.given("finetuning_type", "lora")
        if kind == "freeze":
            raise NoSuchMethod(
                "finetuning_type", kind, "set it to full here, and list frozen params in "
                "model.frozen of the new file"
            )  # fmt: skip
        if kind not in ("lora", "full"):
            raise NoSuchMethod("finetuning_type", kind, "lora is the only kind of adapter")
        for key in _OTHER_LOSSES:
            if asked.get(key) not in _OFF:
                raise NoSuchMethod(key, asked[key], ONLY)
    if asked.tool == "Axolotl":
        if asked.get("adapter") not in (*_OFF, "lora", "qlora"):
            raise NoSuchMethod("adapter", asked["adapter"], "lora is the only kind of adapter")
        others = {"reward_model": NO_REWARD_MODEL, "process_reward_model": NO_REWARD_MODEL,
                  "kd_trainer": NO_TEACHER}  # fmt: skip
        for key, reason in others.items():
            if asked.get(key) not in _OFF:
                raise NoSuchMethod(key, asked[key], reason)


def asked_loss(asked: ToolConfig) -> str:
    """Return our name of the loss that a config trains with. Raises NoSuchMethod."""
    if asked.tool == "TRL":
        return trained_loss(asked)
    if asked.tool == "LLaMA-Factory":
        stage = str(asked.given("stage", "sft"))
        if stage in _STAGES:
            return _STAGES[stage]
        if stage != "dpo":
            raise NoSuchMethod("stage", stage, why(stage))
        return _named_loss("pref_loss", asked.given("pref_loss", "sigmoid"), asked)
    if asked.get("rl") in _OFF:
        return "next_token"
    found = _named_loss("rl", asked["rl"], asked)
    kinds = asked.get("dpo_loss_type") if found == "dpo" else None
    if kinds is None:
        return found
    listed = kinds if isinstance(kinds, list) else [kinds]
    ours = LOSSES.get(("dpo", str(listed[0]))) if len(listed) == 1 else None
    if ours is None:
        raise NoSuchMethod("dpo_loss_type", ", ".join(map(str, listed)), ONE_LOSS)
    return ours


def _named_loss(key: str, value: Any, asked: ToolConfig) -> str:
    found = _LOSSES[asked.tool].get(str(value))
    if found is None:
        raise NoSuchMethod(key, value, why(str(value)))
    return found


def _loss_name(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    found = asked_loss(asked)
    if found == "next_token":
        raise DroppedKey("the loss is that of the next token, as by default here")
    return found, ""


def _own_loss(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """Return the weight of the chosen answer's own loss, beside a preference."""
    loss = asked_loss(asked)
    if _is_zero(value):
        raise DroppedKey(OFF)
    if loss == "next_token":
        raise DroppedKey("it belongs to preferences")
    if loss not in _WITH_SFT:
        raise DroppedKey(Differs(f"{loss} has no such term here"))
    return value, ""


def _own_loss_by_tokens(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """Return the same for TRL, whose mean is over the tokens of a micro-batch."""
    weight, _ = _own_loss(value, asked)
    return weight, Differs(
        "the chosen answer's own loss is the mean over an answer, then over pairs; there over all "
        "tokens of a micro-batch"
    )


def _cpo_alpha(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    if asked_loss(asked) != "simpo":
        raise DroppedKey("it belongs to simpo")
    return (None, "off, as here") if _is_zero(value) else _own_loss_by_tokens(value, asked)


def _is_zero(value: Any) -> bool:
    return value in (*_OFF, 0, "0", "0.0")


def _trl_block(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """Return beta of Axolotl's block for TRL; its other keys are those of rewards."""
    if asked_loss(asked) == "next_token" or not isinstance(value, dict) or "beta" not in value:
        raise DroppedKey("its keys are those of rewards")
    return value["beta"], "its beta, which wins over rl_beta"


def _rl_beta(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    block = asked.get("trl")
    if isinstance(block, dict) and block.get("beta") is not None:
        raise DroppedKey("overridden by beta of trl")
    return _of_losses(*_WITH_BETA)(value, asked)


def _of_losses(*names: str) -> Converter:
    """Return a converter for a key of some losses; `names` are ours."""

    def convert(value: Any, asked: ToolConfig) -> tuple[Any, str]:
        if asked_loss(asked) not in names:
            raise DroppedKey(f"it belongs to {' and '.join(names)}: set loss.name to train so")
        return value, ""

    return convert


def _smoothing_of_pairs(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    _of_losses("dpo", "simpo", "robust")(value, asked)
    if asked.tool == "LLaMA-Factory" or asked_loss(asked) != "dpo" or _is_zero(value):
        return value, ""
    return value, Asks("since 1.0 TRL ignores it with sigmoid: remove it if your run did, too")


def _orpo_alpha(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    if asked.get("rl_beta") is not None:
        raise DroppedKey("overridden by rl_beta")
    return _rl_beta(value, asked)


METHODS: dict[str, Converter] = {
    "finetuning_type": _turned_on,
    "adapter": _turned_on,
    "use_peft": _turned_on,
    "lora_rank": _if_on(_kept),
    "lora_r": _if_on(_kept),
    "lora_alpha": _if_on(_kept),
    "lora_dropout": _if_on(_kept),
    "lora_target": _if_on(_targets),
    "lora_target_modules": _if_on(_targets),
    "lora_target_linear": _if_on(_every_linear),
    "use_rslora": _if_on(_kept),
    "peft_use_rslora": _if_on(_kept),
    "use_dora": _if_on(_kept),
    "peft_use_dora": _if_on(_kept),
    "additional_target": _if_on(_modules),
    "lora_modules_to_save": _if_on(_modules),
    "lora_target_parameters": _if_on(_modules),
    "adapter_name_or_path": _if_on(_started_from),
    "lora_model_dir": _if_on(_started_from),
    "loraplus_lr_ratio": _faster_b,
    "quantization_bit": _narrow_base,
    "load_in_4bit": _narrow_base,
    "pref_loss": _loss_name,
    "rl": _loss_name,
    "loss_type": _loss_name,
    "pref_beta": _of_losses(*_WITH_BETA),
    "rl_beta": _rl_beta,
    "trl": _trl_block,
    "dpo_loss_type": _loss_name,
    "dpo_beta": _of_losses("dpo", "ipo", "apo_zero", "robust"),
    "beta": _of_losses(*_WITH_BETA),
    "orpo_alpha": _orpo_alpha,
    "simpo_gamma": _of_losses("simpo"),
    "label_smoothing": _smoothing_of_pairs,
    "dpo_label_smoothing": _smoothing_of_pairs,
    "pref_ftx": _own_loss,
    "rpo_alpha": _own_loss_by_tokens,
    "cpo_alpha": _cpo_alpha,
    "desirable_weight": _of_losses("kto"),
    "undesirable_weight": _of_losses("kto"),
    "kto_chosen_weight": _of_losses("kto"),
    "kto_rejected_weight": _of_losses("kto"),
    "kto_desirable_weight": _of_losses("kto"),
    "kto_undesirable_weight": _of_losses("kto"),
}
"""Converters by key of the other tool."""
