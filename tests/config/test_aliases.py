"""Names of other tools: those that mean a key of ours, and those that do not."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import Config
from megatrain.config.aliases import ALIASES, HINTS, hint, our_key
from megatrain.config.load import resolve_config, write_yaml
from megatrain.config.settings import FIELDS, SECTIONS
from megatrain.config.yaml_reader import parse_document
from megatrain.errors import ConfigError, Notice

KEYS = {f"{section}.{key}" for section in SECTIONS for key in FIELDS[section]}
SMALL = "model: org/tiny\ndata: train.jsonl\n"


def read(text: str, *overrides: str) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a file, and the notices."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        config = resolve_config(parse_document(text.encode(), "run.yaml"), overrides)
    assert all(warning.category is Notice for warning in told)
    return config.model_dump(mode="json"), [str(warning.message) for warning in told]


def refused(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        read(text, *overrides)
    return str(error.value)


DPO, SIMPO, KTO = ({"loss": {"name": name}} for name in ("dpo", "simpo", "kto"))
LORA = {"lora": {"rank": 8}}
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "model_name_or_path": ("a/b", "a/b", {}),
    "base_model": ("a/b", "a/b", {}),
    "model_revision": ("main", "main", {}),
    "revision_of_model": ("main", "main", {}),
    "attn_implementation": ("eager", "eager", {}),
    "flash_attn": ("fa2", "flash_attention_2", {}),
    "dataset_name": ("a.jsonl", "a.jsonl", {}),
    "val_size": (0.1, 0.1, {}),
    "val_set_size": (0, None, {}),
    "max_seq_length": (512, 512, {}),
    "max_length": (512, 512, {}),
    "cutoff_len": (512, 512, {}),
    "sequence_len": (512, 512, {}),
    "excess_length_strategy": ("truncate", "truncate", {}),
    "sample_packing": (False, False, {}),
    "chat_template_jinja": ("{{ messages }}", "{{ messages }}", {}),
    "chat_template_kwargs": ({"enable_thinking": False}, {"enable_thinking": False}, {}),
    "data_seed": (7, 7, {}),
    "lora.r": (16, 16, {}),
    "lora_r": (16, 16, {}),
    "lora_rank": (16, 16, {}),
    "lora_alpha": (32, 32, LORA),
    "lora_dropout": (0.1, 0.1, LORA),
    "target_modules": (["q_proj"], ["q_proj"], LORA),
    "lora_target_modules": ("all-linear", ["all-linear"], LORA),
    "lora_target": ("q_proj,v_proj", ["q_proj", "v_proj"], LORA),
    "target_parameters": (["experts.down_proj"], ["experts.down_proj"], LORA),
    "lora_target_parameters": (["experts.down_proj"], ["experts.down_proj"], LORA),
    "modules_to_save": (["lm_head"], ["lm_head"], LORA),
    "lora_modules_to_save": (["lm_head"], ["lm_head"], LORA),
    "additional_target": ("embed_tokens, lm_head", ["embed_tokens", "lm_head"], LORA),
    "adapter_name_or_path": ("adapters", "adapters", {}),
    "lora_model_dir": ("adapters", "adapters", {}),
    "use_rslora": (True, True, LORA),
    "peft_use_rslora": (True, True, LORA),
    "use_dora": (True, True, LORA),
    "peft_use_dora": (True, True, LORA),
    "pref_beta": (0.2, 0.2, DPO),
    "dpo_beta": (0.2, 0.2, DPO),
    "rl_beta": (0.2, 0.2, KTO),
    "simpo_gamma": (0.5, 0.5, SIMPO),
    "pref_ftx": (0.0, None, DPO),
    "dpo_label_smoothing": (0.1, 0.1, DPO),
    "desirable_weight": (2, 2, KTO),
    "kto_chosen_weight": (2, 2, KTO),
    "kto_desirable_weight": (2, 2, KTO),
    "undesirable_weight": (2, 2, KTO),
    "kto_rejected_weight": (2, 2, KTO),
    "kto_undesirable_weight": (2, 2, KTO),
    "num_train_epochs": (3, 3, {}),
    "num_epochs": (3, 3, {}),
    "max_steps": (-1, None, {}),
    "max_grad_norm": (0, None, {}),
    "torch_compile": (True, True, {}),
    "full_determinism": (True, True, {}),
    "learning_rate": (2e-5, 2e-5, {}),
    "lr": (2e-5, 2e-5, {}),
    "weight_decay": (0.1, 0.1, {}),
    "adam_epsilon": (1e-6, 1e-6, {}),
    "lr_scheduler_type": ("linear", "linear", {}),
    "lr_scheduler": ("constant_with_warmup", "constant", {}),
    "warmup_ratio": (0.1, 0.1, {}),
    "warmup_steps": (100, 100, {}),
    "eval_steps": (50, 50, {}),
    "early_stopping_patience": (2, 2, {"data": {"train": "a.jsonl", "eval": 0.1}}),
    "output_dir": ("runs/a", "runs/a", {}),
    "save_steps": (50, 50, {}),
    "save_total_limit": (3, 3, {}),
    "logging_steps": (5, 5, {}),
    "report_to": ("none", [], {}),
}
"""Aliases: a value there, the value here, and the sections that it needs."""


def test_every_alias_has_a_case() -> None:
    assert CASES.keys() == ALIASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_an_alias_is_read_as_its_key(name: str) -> None:
    given, expected, beside = CASES[name]
    key = ALIASES[name]
    section, _, leaf = key.partition(".")
    needed = {"model": {"name_or_path": "m"}, "data": {"train": "rows.jsonl"}} | beside
    if key in ("model.name_or_path", "data.train"):
        del needed[section]
    text = "".join(f"{part}: {write_yaml(values)}\n" for part, values in needed.items())
    places = {name} if "." in name else {name, f"{section}.{name}"} - {key}
    for place in places:
        found, told = read(text, f"{place}={write_yaml(given)}")
        value = found[section][leaf]
        assert (value[0]["path"] if key == "data.train" else value) == expected, place
        assert told == [f"read {place} as {key}"]
    if "." not in name:
        assert read(f"{text}{name}: {write_yaml(given)}\n")[0] == found


def test_an_alias_leads_to_a_key_and_is_none_itself() -> None:
    assert set(ALIASES.values()) <= KEYS
    for name, key in ALIASES.items():
        section = key.partition(".")[0]
        assert name not in SECTIONS
        assert f"{section}.{name}" in (KEYS & {key}) or f"{section}.{name}" not in KEYS
    assert not ALIASES.keys() & HINTS.keys()
    for path in (("optim", "learning_rate"), ("train", "lr"), ("r",), ("data", "train", "lr")):
        assert our_key(path) is None


def test_one_notice_tells_of_a_file_and_its_overrides() -> None:
    text = SMALL + "num_train_epochs: 3\nlora: {r: 8, target_modules: [q_proj]}\n"
    found, told = read(text, "lr=1e-5", "chat_template_kwargs.enable_thinking=false")
    assert told == [
        "read num_train_epochs as train.epochs, lora.r as lora.rank, lora.target_modules as "
        "lora.targets, lr as optim.learning_rate, chat_template_kwargs.enable_thinking as "
        "data.template_kwargs.enable_thinking"
    ]
    assert found["data"]["template_kwargs"] == {"enable_thinking": False}
    assert read(SMALL)[1] == []


def test_an_override_replaces_the_file_by_either_name() -> None:
    for text in ("lr: 0.1\n", "optim: {learning_rate: 0.1}\n"):
        for override in ("lr=0.2", "optim.learning_rate=0.2", "learning_rate=0.2", "optim.lr=0.2"):
            assert read(SMALL + text, override)[0]["optim"]["learning_rate"] == 0.2


def test_one_setting_by_two_names_has_one_value() -> None:
    both = SMALL + "lr: {}\noptim: {{learning_rate: 0.1}}\n"
    assert read(both.format(0.1))[0]["optim"]["learning_rate"] == 0.1
    assert refused(both.format(0.2)) == (
        "run.yaml:3: lr is 0.2, and optim.learning_rate, which is the same, is 0.1 (run.yaml:4). "
        "Remove one of the two."
    )
    two = refused(SMALL + "lr: 0.2\nlearning_rate: 0.3\n")
    assert two.startswith("run.yaml:4: learning_rate is 0.3, and optim.learning_rate, ")
    assert two.endswith(" is 0.2 (run.yaml:3). Remove one of the two.")
    assert refused(SMALL, "lr=0.1", "optim.learning_rate=0.2") == (
        "override optim.learning_rate=0.2: lr, which is the same, is 0.1. Remove one of the two."
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("lr_scheduler_type: constant",
         "lr_scheduler_type is constant; there is no warm-up with it elsewhere: give "
         "optim.schedule: constant, and optim.warmup: 0 for none."),
        ("lr_scheduler_type: polynomial",
         "optim.schedule is polynomial; give constant, linear, cosine or wsd."),
        ("warmup_ratio: 1", "optim.warmup is 1.0; give a number of steps, like 100, or a fraction "
                            "of the run between 0 and 1, like 0.03."),
        ("warmup_ratio: some", "warmup_ratio is some; give a number."),
        ("save_steps: 0.1", "save.every is 0.1; give steps, like 500, or a time, like 30min."),
        ("lora_target: '(q|v)_proj'", "lora_target is (q|v)_proj; give a list of names, like "
                                      "[q_proj, v_proj], or all-linear."),
        ("report_to: all", "log.to.0 is all; give tensorboard, wandb, trackio or mlflow."),
        ("val_size: 100", "data.eval is 100; give a number below 1."),
    ],
)  # fmt: skip
def test_a_value_that_does_not_suit_is_refused_where_it_stands(line: str, message: str) -> None:
    assert refused(SMALL + line) == f"run.yaml:3: {message}"


def test_all_faults_are_told_at_once() -> None:
    text = SMALL + "optim: adamw_torch\nlr: 0.1\nnum_train_epochs: 0\n"
    assert [line.partition(";")[0] for line in refused(text).splitlines()] == [
        "3 errors",
        "  run.yaml:3: optim is adamw_torch",
        "  run.yaml:4: unknown key lr. The key here is optim.learning_rate.",
        "  run.yaml:5: train.epochs is 0",
    ]


def test_python_takes_our_names() -> None:
    with pytest.raises(ConfigError, match=r"unknown key optim\.lr\. The key here is optim\."):
        Config(model="m", data="a.jsonl", optim={"lr": 1e-5})


REFUSED = {
    "per_device_train_batch_size gradient_accumulation_steps micro_batch_size batch_size "
    "train_batch_size global_batch_size": "set train.batch_rows to rows per device x accumulation",
    "per_device_eval_batch_size eval_batch_size eval_accumulation_steps": "Not needed: evaluation "
    "uses train.micro_batch_tokens.",
    "auto_find_batch_size": "train.micro_batch_tokens is auto.",
    "train_on_inputs train_on_prompt mask_history assistant_only_loss completion_only_loss": "Set "
    "data.train_on to assistant, last, completion or all.",
    "use_peft peft adapter finetuning_type peft_config": "lora.rank turns adapters on",
    "load_in_4bit load_in_8bit quantization_bit quantize bnb_4bit_quant_type gptq": "model.base is",
    "offload offload_optimizer cpu_offload deepspeed fsdp fsdp_config zero_stage "
    "accelerator_config": "Not needed: weights and optimizer states are always in host memory.",
    "nvme nvme_path disk_offload": "The key here is memory.disk.",
    "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing": "Not needed: "
    "layers are computed again in backward.",
    "activation_offloading": "Set memory.tape to host",
    "use_cpu no_cuda": "Set memory.device to cpu.",
    "ddp_timeout local_rank num_gpus nproc_per_node tensor_parallel_size": "train --gpus N",
    "bf16 fp16 pure_bf16 dtype torch_dtype mixed_precision precision tf32": "model.dtype is bf16",
    "flash_attention sdp_attention flex_attention eager_attention use_flash_attention_2": "Set "
    "model.attn to auto, sdpa, eager or flash_attention_2.",
    "rope_scaling rope_type rope_theta": "Set model.rope, like {type: yarn, factor: 4.0}.",
    "new_special_tokens add_special_tokens add_tokens tokens": "List them in model.add_tokens",
    "trust_remote_code": "Code in a model folder is never run.",
    "optimizer": "optim.name is adamw or muon; optim.state is the precision",
    "adam_beta1 adam_beta2 beta1 beta2": "Give both numbers in optim.betas, like [0.9, 0.999].",
    "min_lr cosine_min_lr_ratio lr_scheduler_kwargs": "optim.final_fraction is the last learning",
    "seed": "train.seed is for dropout and new adapters, data.seed for the order of rows.",
    "dataset datasets dataset_dir train_dataset train_file": "see docs/data.md.",
    "dataset_config dataset_train_split dataset_text_field max_samples": "a source in data.train",
    "eval_dataset test_datasets dataset_test_split validation_file": "data.eval takes files",
    "packing neat_packing": "data.packing: packed rows never attend to each other here.",
    "disable_shuffling shuffle_merged_datasets train_sampling_strategy": "Set data.shuffle to",
    "template chat_template chat_template_path default_system eos_token special_tokens":
    "data.chat_template replaces it",
    "enable_thinking": "Give it in data.template_kwargs.",
    "dataloader_num_workers dataset_num_proc preprocessing_num_workers dataset_processes": "Not "
    "needed: rows are tokenized by a process per core.",
    "group_by_length pad_to_sequence_len padding_free": "Not needed: micro-batches are filled by",
    "stage rl loss_type pref_loss dpo_loss_type": "The losses are those of loss.name",
    "beta": "loss.beta is for preferences, loss.kl for rewards.",
    "label_smoothing label_smoothing_factor": "it depends on loss.name what is smoothed",
    "rpo_alpha cpo_alpha": "Set loss.sft, a mean over each answer and then over pairs.",
    "router_aux_loss_coef moe_aux_loss_coef": "Set train.router_aux_loss",
    "use_liger_kernel enable_liger_kernel liger_rms_norm": "Set train.kernels to liger or none.",
    "neftune_noise_alpha noisy_embedding_alpha use_galore use_badam use_apollo use_llama_pro":
    "There is none: it would change what is trained.",
    "freeze_vision_tower freeze_multi_modal_projector freeze_mm_modules": "Set model.media to",
    "freeze_language_model unfrozen_parameters": "Set model.frozen to patterns of names.",
    "eval_strategy evaluation_strategy evals_per_epoch": "eval.every counts steps",
    "early_stopping_steps": "eval.patience counts evaluations.",
    "save_strategy saves_per_epoch": "save.every counts steps or time",
    "load_best_model_at_end metric_for_best_model greater_is_better": "save.best keeps the",
    "resume_from_checkpoint auto_resume_from_checkpoints": "`megatrain train --resume` continues",
    "run_name wandb_name logging_dir overwrite_output_dir": "named after its folder, save.dir.",
    "wandb_project use_wandb": "Set log.to to [wandb], and log.project.",
    "push_to_hub hub_model_id export_dir": "Not in a config: `megatrain export` writes the model.",
    "do_train do_eval do_predict": "Not needed: `megatrain train` trains.",
}  # fmt: skip
"""Names that mean something else, and a part of what is said about them."""
NAMES = {name: said for names, said in REFUSED.items() for name in names.split()}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_means_something_else_is_refused_with_what_to_do(name: str) -> None:
    text = refused(f"{SMALL}{name}: 1\n")
    assert text.startswith(f"run.yaml:3: unknown key {name}. ")
    assert NAMES[name] in text


def test_every_name_that_is_refused_has_a_case() -> None:
    said = {name: hint(name) for name in (*NAMES, "optim")}
    assert set(HINTS.values()) == set(said.values())
    assert HINTS.keys() <= said.keys() | {name for name in HINTS if name.endswith("*")}


def test_a_section_does_not_change_what_is_said() -> None:
    assert refused(SMALL, "memory.nvme=/disk").endswith("The key here is memory.disk.")
    assert "always in host memory." in refused(SMALL, "memory.offload=true")
    assert refused(SMALL, "train.lr=1").endswith("The key here is optim.learning_rate.")


def test_what_is_said_names_keys_and_pages_that_exist() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for said in HINTS.values():
        names = set(re.findall(rf"(?<![/\w])(?:{'|'.join(SECTIONS)})\.\w+", said))
        assert names <= KEYS, said
        for page in re.findall(r"docs/(\w+\.md)", said):
            assert (docs / page).exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("num_train_epoch", "Did you mean train.epochs (num_train_epochs elsewhere)?"),
        ("weight_decays", "Did you mean optim.weight_decay?"),
        ("zzz", "Known here: model, data"),
    ],
)
def test_a_name_that_is_misspelled_has_a_neighbor(name: str, said: str) -> None:
    assert said in refused(f"{SMALL}{name}: 1\n")
