"""TRL's trainers: which of them a file is for, and which loss it trains with.

TRL names the trainer on its command line (`trl dpo --config dpo.yaml`), not in the file. A file is
for the trainers whose configs have all of its keys and that read its rows; where several remain,
the user names one (`--tool trl-dpo`), because learning rates and losses differ between them.
"""

from __future__ import annotations

from megatrain.config.other_tools.asked import NoSuchMethod, RowKind, ToolConfig, trl_names

REWARDS = "rewards are a loop of your own here; see docs/rewards.md"
ONLY = "the losses here are next_token, dpo, ipo, orpo, simpo and kto"
NO_REWARD_MODEL = "reward models are not trained here"
NO_TEACHER = "distillation from a teacher is not supported"
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
        raise NoSuchMethod("loss_type", f"{', '.join(kinds)}{weighed}", f"give one loss; {ONLY}")
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
