"""Configs of other tools: every key accounted for, every value where it belongs, and loadable."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.config import Config
from megatrain.config.load import resolve_config
from megatrain.config.other_tools.datasets import llama_factory
from megatrain.config.other_tools.methods import TRAINED
from megatrain.config.other_tools.tables import (
    ALWAYS,
    BY_TRAINER,
    DEFAULTS,
    NULL_MEANS,
    REQUIRED,
    ROWS,
    TABLES,
)
from megatrain.config.other_tools.tool_config import DroppedKey, RowKind, Tool, ToolConfig
from megatrain.config.other_tools.translate import (
    Migration,
    migrate,
    migrate_document,
    tool_named,
)
from megatrain.config.other_tools.values import BY_TOOL, CONVERTERS
from megatrain.config.settings import FIELDS, SECTIONS
from megatrain.config.yaml_reader import Document, parse_document, read_document
from megatrain.errors import ConfigError

EXAMPLES = Path(__file__).parent / "examples"
TOOLS: dict[str, Tool] = {
    "llama_factory.yaml": "LLaMA-Factory",
    "llama_factory_lora.json": "LLaMA-Factory",
    "axolotl.yaml": "Axolotl",
    "trl.yaml": "TRL",
}

ADDED = ("default", "missing")
"""Outcomes of keys that are not in the file."""


def unaccounted(values: dict[str, Any], result: Migration) -> list[str]:
    """Return what breaks the law: each key of the file one line, each value of ours told."""
    lines = Counter(line.key for line in result.lines if line.outcome not in ADDED)
    faults = [key for key in values if lines[key] != 1]
    told = {line.ours: line.value for line in result.lines if line.ours}
    for section, settings in result.config.items():
        for key, value in settings.items():
            if (f"{section}.{key}", value) not in [*told.items()]:
                faults.append(f"{section}.{key}")
    return faults


@pytest.mark.parametrize("name", TOOLS)
def test_every_key_is_accounted_for(name: str) -> None:
    document = read_document(EXAMPLES / name)
    result = migrate(EXAMPLES / name)
    assert result.tool == TOOLS[name]
    assert unaccounted(document.value, result) == []
    for line in result.lines:
        assert bool(line.ours) == (line.outcome in ("mapped", "changed", "default")), line
        assert line.ours or line.note, line
    assert name.endswith("json") or len(document.value) >= 45


def test_a_key_passed_over_in_silence_would_be_noticed() -> None:
    values = read_document(EXAMPLES / "trl.yaml").value
    result = migrate(EXAMPLES / "trl.yaml")
    result.lines = [line for line in result.lines if line.key != "hub_model_id"]
    result.config["train"]["seed"] = 1
    assert unaccounted(values, result) == ["hub_model_id", "train.seed"]


@pytest.mark.parametrize("name", TOOLS)
def test_what_comes_out_loads(name: str) -> None:
    result = migrate(EXAMPLES / name)
    loaded = resolve_config(parse_document(result.to_yaml().encode(), "run.yaml"))
    assert loaded == Config(**result.config)


def test_llama_factory() -> None:
    config = Config(**migrate(EXAMPLES / "llama_factory.yaml").config)
    assert config.model.attn == "flash_attention_2"
    assert [(s.path, s.format, s.weight) for s in config.data.train] == [
        (str(EXAMPLES / "data" / "identity.json"), "alpaca", 1.0),
        (str(EXAMPLES / "data" / "alpaca_en_demo.json"), "alpaca", 1.0),
    ]
    assert (config.data.eval, config.data.max_length) == (0.1, 4096)
    assert (config.data.overlong, config.data.train_on) == ("truncate", "assistant")
    assert (config.train.batch_tokens, config.data.packing) == (1 * 8 * 4096, True)
    assert (config.optim.schedule, config.optim.final_fraction) == ("cosine", 0.1)
    assert (config.optim.betas, config.optim.warmup) == ((0.9, 0.98), 0.1)
    assert config.log.to == ("wandb", "mlflow")


def test_axolotl() -> None:
    config = Config(**migrate(EXAMPLES / "axolotl.yaml").config)
    assert [(s.path, s.format) for s in config.data.train] == [
        ("fozziethebeat/alpaca_messages_2k_test", "messages"),
        ("tatsu-lab/alpaca", "alpaca"),
        ("books/a.jsonl", "text"),
        ("books/b.jsonl", "text"),
    ]
    assert config.train.batch_tokens == 1 * 2 * 8192
    assert (config.train.epochs, config.train.compile) == (2, True)
    assert (config.optim.warmup, config.optim.eps) == (100, 1e-5)
    assert config.log.to == ("tensorboard", "wandb")


def test_trl() -> None:
    config = Config(**migrate(EXAMPLES / "trl.yaml").config)
    assert config.train.max_grad_norm is None
    assert config.save.every is None
    assert config.optim.schedule == "wsd"
    assert config.optim.betas == (0.9, 0.999)
    assert config.train.epochs == 1
    assert config.memory.tape == "host"


def _migrated(tool: Tool, *, trainer: str = "sft", **values: Any) -> Migration:
    known = {"trainer": trainer} if tool == "TRL" else {}
    return migrate_document(Document(name="x.yaml", value=values), tool, **known)


@pytest.mark.parametrize(
    ("tool", "values", "line"),
    [
        ("TRL", {"output_dir": "out"}, "mapped output_dir save.dir = out"),
        ("TRL", {"fp16": True}, "changed fp16 model.dtype = bf16 "
         "(use bf16: the size of fp16 and the range of fp32)"),
        ("LLaMA-Factory", {"lora_new_thing": 1},
         "dropped lora_new_thing adapters are LoRA or DoRA, without this"),
        ("Axolotl", {"adapter": "qlora", "lora_r": 32}, "changed adapter lora.rank = 32 (qlora "
         "needs load_in_4bit: set model.base to nf4)"),
        ("Axolotl", {"adapter": "qlora", "load_in_4bit": True},
         "changed load_in_4bit model.base = nf4"),
        ("LLaMA-Factory", {"quantization_bit": 4}, "changed quantization_bit model.base = nf4"),
        ("TRL", {"use_peft": True, "load_in_4bit": True}, "changed load_in_4bit model.base = nf4 "
         "(there scales are in fp32, here in 8 bits (double quantization))"),
        ("Axolotl", {"adapter": "lora", "load_in_4bit": True,
                     "bnb_config_kwargs": {"bnb_4bit_quant_type": "fp4"}},
         "dropped load_in_4bit the base is kept as it is: model.base has nf4 and no other form"),
        ("LLaMA-Factory", {"quantization_bit": 8}, "dropped quantization_bit the base is kept as "
         "it is: model.base has nf4 and no other form"),
        ("TRL", {"load_in_4bit": True},
         "dropped load_in_4bit weights that are trained are kept in full"),
        ("LLaMA-Factory", {"use_muon": True, "optim": "adamw_8bit"}, "changed use_muon optim.name "
         "= muon (there experts in one tensor have AdamW)"),
        ("LLaMA-Factory", {"use_muon": True, "optim": "adamw_8bit"},
         "dropped optim overridden by use_muon"),
        ("LLaMA-Factory", {"use_muon": True, "weight_decay": 0.1}, "changed use_muon optim.name = "
         "muon (there weight decay is for norms and biases too)"),
        ("LLaMA-Factory", {"fp8": True, "fp8_backend": "torchao"}, "changed fp8 train.products = "
         "fp8 (a scale for each tensor; there for each row, or by earlier steps (te))"),
        ("LLaMA-Factory", {"fp8": True, "fp8_backend": "torchao"},
         "dropped fp8_backend train.products: fp8 has one form"),
        ("Axolotl", {"fp8": True},
         "changed fp8 train.products = fp8 (a scale for each tensor, as there)"),
        ("TRL", {"label_smoothing_factor": 0.1},
         "mapped label_smoothing_factor loss.label_smoothing = 0.1"),
        ("Axolotl", {"adapter": "lora", "loraplus_lr_ratio": 16},
         'changed loraplus_lr_ratio optim.groups = [{params: ["*lora_B*"], times: 16}]'),
        ("Axolotl", {"rl": "dpo", "dpo_label_smoothing": 0.1}, "mapped dpo_label_smoothing "
         "loss.label_smoothing = 0.1 (since 1.0 TRL ignores it with sigmoid: remove it if your run "
         "did, too)"),
        ("Axolotl", {"kd_alpha": 0.9},
         "dropped kd_alpha distillation is `loss: distill`; see docs/distillation.md"),
        ("TRL", {"lora_r": 8}, "dropped lora_r adapters are off, every weight is trained"),
        ("TRL", {"beta": 0.2}, "dropped beta it belongs to dpo and ipo and orpo and simpo and "
         "apo_zero and robust and kto: set loss.name to train so"),
        ("LLaMA-Factory", {"stage": "pt"}, "changed stage data.train_on = "
         "all (pt trains on all tokens, sft on the assistant's)"),
        ("Axolotl", {"optimizer": "paged_adamw_8bit"},
         'default - optim.state = "8bit" (optimizer is paged_adamw_8bit; auto is fp32 wherever '
         "that fits)"),
        ("TRL", {"optim": "adamw_anyprecision"},
         "default - optim.state = bf16 (optim is adamw_anyprecision; auto is fp32 wherever that "
         "fits)"),
        ("Axolotl", {"optimizer": "lion"},
         "dropped optimizer the optimizers are adamw and muon"),
        ("Axolotl", {"lr_scheduler": "polynomial"}, "dropped lr_scheduler schedule not supported; "
                                        "give constant, linear, cosine or wsd"),
        ("TRL", {"lr_scheduler_type": "polynomial"}, "default lr_scheduler_type optim.schedule = "
         "linear (lr_scheduler_type is dropped: this is TRL's default)"),
        ("TRL", {"assistant_only_loss": None}, "dropped assistant_only_loss null: TRL's default "
                                        "applies"),
        ("TRL", {"max_length": None}, "dropped max_length there null never cuts a row: set "
                                      "data.max_length to the length of your longest row"),
        ("TRL", {"lr_scheduler_type": "constant", "warmup_ratio": 0.1},
         "changed warmup_ratio optim.warmup = 0 (there the constant schedule has no warm-up)"),
        ("Axolotl", {}, "default warmup_ratio optim.warmup = 0.03 (Axolotl does this when "
         "warmup_ratio is absent; there 3 % of the run, but at most 100 steps)"),
        ("LLaMA-Factory", {"mask_history": True}, "changed mask_history data.train_on = last "
         "(last trains on the last turn only)"),
        ("LLaMA-Factory", {"enable_thinking": False}, "changed enable_thinking "
         "data.template_kwargs = {enable_thinking: false}"),
        ("LLaMA-Factory", {"packing": True}, "mapped packing data.packing = true (there packed "
                                        "rows attend to each other, here never)"),
        ("LLaMA-Factory", {"new_special_tokens": "<a>, <b>", "add_tokens": ["<c>"]},
         'changed new_special_tokens model.add_tokens = ["<a>", "<b>", "<c>"]'),
        ("Axolotl", {"curriculum_sampling": True}, "changed curriculum_sampling data.shuffle = "
         "false"),
        ("TRL", {"load_best_model_at_end": True},
         "mapped load_best_model_at_end save.best = true"),
        ("Axolotl", {"datasets": [{"path": "a.jsonl", "type": "alpaca"}]},
         'changed datasets data.train = [{path: "a.jsonl", format: alpaca}] (Axolotl uses the '
         "Alpaca prompt for these rows; here they use the chat template)"),
        ("Axolotl", {"datasets": [{"path": "a/b", "name": "c", "split": "d", "revision": "e",
                                   "type": "input_output", "shards": 3}]},
         'changed datasets data.train = [{path: "a/b", name: c, split: d, revision: e}] (type '
         "input_output is unknown: the format is detected; not used: shards)"),
        ("Axolotl", {"save_steps": 0.1}, "dropped save_steps the number of steps is not known "
         "here: set eval.every or save.every"),
        ("Axolotl", {"datasets": [{"type": "alpaca"}]},
         "dropped datasets entry 1 has no path"),
        ("Axolotl", {"per_device_train_batch_size": 1},
         "unknown per_device_train_batch_size not a key of Axolotl"),
        ("TRL", {"eval_strategy": "epoch", "eval_steps": 3},
         "dropped eval_steps overridden by eval_strategy, which is epoch"),
        ("TRL", {"gradient_accumulation_steps": "many"},
         "dropped gradient_accumulation_steps not an integer"),
        ("TRL", {"lr_scheduler_kwargs": {"min_lr": 1e-6}, "learning_rate": 1e-5},
         "changed lr_scheduler_kwargs optim.final_fraction = 0.1 (of the peak)"),
        ("TRL", {"no_such_thing": 1},
         "unknown no_such_thing unknown key; see docs/config.md"),
        ("TRL", {}, "default learning_rate optim.learning_rate = 2.0e-05 (TRL does "
         "this when learning_rate is absent)"),
        ("TRL", {}, "default router_aux_loss_coef train.router_aux_loss = model (TRL does this "
         "when router_aux_loss_coef is absent)"),
        ("TRL", {"router_aux_loss_coef": 0.01}, "mapped router_aux_loss_coef "
         "train.router_aux_loss = 0.01 (the mean over a step, not over each micro-batch)"),
        ("LLaMA-Factory", {"new_special_tokens": "<call>, </call>"},
         'changed new_special_tokens model.add_tokens = ["<call>", "</call>"]'),
        ("Axolotl", {"tokens": ["<call>"]},
         'mapped tokens model.add_tokens = ["<call>"] (as special tokens)'),
        ("TRL", {"lr_scheduler_type": "warmup_stable_decay"},
         "changed lr_scheduler_type optim.schedule = wsd (the decay is linear over optim.decay; "
         "there it is half a cosine unless decay_type says otherwise)"),
        ("Axolotl", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
         "changed rope_scaling model.rope = {type: yarn, factor: 4.0}"),
        ("Axolotl", {"overrides_of_model_config": {"rope_scaling": {"type": "linear",
                                                                    "factor": 2}}},
         "changed overrides_of_model_config model.rope = {type: linear, factor: 2} (of its keys "
         "rope_scaling alone)"),
        ("Axolotl", {"overrides_of_model_config": {"hidden_size": 2}},
         "dropped overrides_of_model_config of the model's config only rope_scaling can be "
         "changed, by model.rope"),
        ("Axolotl", {"rope_scaling": {"type": "dynamic", "factor": 2}},
         "dropped rope_scaling type is not one that model.rope takes; see docs/config.md"),
        ("LLaMA-Factory", {"rope_scaling": "yarn"},
         "dropped rope_scaling its factor is cutoff_len over the positions of the model: set "
         "model.rope to it, like {type: yarn, factor: 4.0}; a run whose rows need it names the "
         "line"),
        ("LLaMA-Factory", {"moe_aux_loss_coef": 0.01},
         "mapped moe_aux_loss_coef train.router_aux_loss = 0.01"),
    ],
)  # fmt: skip
def test_lines_by_text(tool: Tool, values: dict[str, Any], line: str) -> None:
    told = _migrated(tool, **values).report().splitlines()
    assert line in [" ".join(words.split()) for words in told]


_LORA = {"rank": 16, "alpha": 32, "dropout": 0.05}


@pytest.mark.parametrize(
    ("tool", "values", "lora"),
    [
        ("TRL", {"use_peft": True}, {**_LORA, "targets": ["q_proj", "v_proj"]}),
        ("TRL", {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear",
                 "use_rslora": True},
         {**_LORA, "rank": 4, "targets": ["all-linear"], "rslora": True}),
        ("TRL", {"use_peft": True, "use_dora": True, "lora_modules_to_save": ["lm_head"],
                 "lora_target_parameters": ["mlp.experts.down_proj"], "lora_target_modules": "q"},
         {**_LORA, "targets": ["q"], "dora": True, "modules_to_save": ["lm_head"],
          "experts": ["mlp.experts.down_proj"]}),
        ("TRL", {"use_peft": False}, {}),
        ("LLaMA-Factory", {}, {"rank": 8, "targets": ["all-linear"]}),
        ("LLaMA-Factory", {"additional_target": "embed_tokens, lm_head", "use_dora": False},
         {"rank": 8, "targets": ["all-linear"], "modules_to_save": ["embed_tokens", "lm_head"],
          "dora": False}),
        ("LLaMA-Factory", {"finetuning_type": "full", "lora_rank": 4}, {}),
        ("LLaMA-Factory", {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "q_proj, v"},
         {"rank": 4, "targets": ["q_proj", "v"]}),
        ("LLaMA-Factory", {"adapter_name_or_path": "saved", "lora_rank": 4}, {"path": "saved"}),
        ("Axolotl", {}, {}),
        ("Axolotl", {"adapter": "lora", "lora_r": 64, "lora_alpha": 8,
                     "lora_target_linear": True},
         {"rank": 64, "alpha": 8, "targets": ["all-linear"]}),
        ("Axolotl", {"adapter": "lora", "lora_r": 8, "lora_target_linear": True,
                     "lora_target_modules": ["q_proj"]}, {"rank": 8, "targets": ["all-linear"]}),
        ("Axolotl", {"adapter": "lora", "lora_r": 8, "lora_target_modules": ["q_proj"],
                     "lora_target_linear": True}, {"rank": 8, "targets": ["all-linear"]}),
        ("Axolotl", {"adapter": "lora", "lora_r": 8, "lora_target_modules": ["q_proj"],
                     "lora_target_linear": False}, {"rank": 8, "targets": ["q_proj"]}),
        ("Axolotl", {"adapter": "lora", "lora_model_dir": "saved"}, {"path": "saved"}),
    ],
)  # fmt: skip
def test_adapters_where_the_tool_would_train_them(
    tool: Tool, values: dict[str, Any], lora: dict[str, Any]
) -> None:
    result = _migrated(tool, **values)
    assert result.config.get("lora", {}) == lora
    assert unaccounted(values, result) == []


@pytest.mark.parametrize(
    ("tool", "values", "dtype"),
    [
        ("TRL", {"bf16": True}, "bf16"),
        ("TRL", {"bf16": False}, "fp32"),
        ("TRL", {"bf16": False, "fp16": True}, "bf16"),
        ("TRL", {"bf16": False, "dtype": "bfloat16"}, "bf16"),
        ("TRL", {"dtype": "float32", "bf16": False}, "fp32"),
        ("TRL", {"dtype": "float32", "bf16": True}, "bf16"),
        ("TRL", {"bf16": True, "dtype": "float32"}, "bf16"),
        ("TRL", {"bf16": False, "dtype": "auto"}, "bf16"),
        ("TRL", {"dtype": "float32"}, None),  # TRL's own bf16 is on by default, as ours
        ("Axolotl", {"bf16": "auto"}, "bf16"),
        ("Axolotl", {"bf16": False, "fp16": False}, "fp32"),
        ("LLaMA-Factory", {"bf16": False, "fp16": False}, None),
        ("LLaMA-Factory", {"bf16": False, "pure_bf16": True}, "bf16"),
    ],
)  # fmt: skip
def test_a_switch_that_is_off_means_another_dtype(
    tool: Tool, values: dict[str, Any], dtype: str | None
) -> None:
    """Whatever the order of keys, and whatever is the default here."""
    for written in (values, dict(reversed(values.items()))):
        result = _migrated(tool, **written)
        assert result.get("model.dtype") == dtype
        assert unaccounted(written, result) == []
    asks = [line.key for line in result.lines if line.effect == "needs you"]
    is_the_folders = tool == "LLaMA-Factory" or values.get("dtype") == "auto"
    assert ("bf16" in asks) == (is_the_folders and not values.get("pure_bf16"))


@pytest.mark.parametrize(
    ("tool", "key", "value", "effect"),
    [
        ("Axolotl", "dataset_exact_deduplication", True, "changes results"),
        ("Axolotl", "dataset_exact_deduplication", False, "same"),
        ("Axolotl", "tokenizer_config", "other/tokenizer", "needs you"),
        ("TRL", "packing_strategy", "wrapped", "changes results"),
        ("TRL", "packing_strategy", "bfd", "same"),
        ("TRL", "model_init_kwargs", {"dtype": "float32"}, "needs you"),
        ("TRL", "save_strategy", "best", "changes results"),
    ],
)
def test_what_a_run_does_otherwise_is_said(tool: Tool, key: str, value: Any, effect: str) -> None:
    (line,) = (line for line in _migrated(tool, **{key: value}).lines if line.key == key)
    assert line.effect == effect


@pytest.mark.parametrize(
    ("tool", "values", "loss"),
    [
        ("LLaMA-Factory", {"stage": "sft", "pref_beta": 0.3}, {}),
        ("LLaMA-Factory", {"stage": "dpo"}, {"name": "dpo", "beta": 0.1}),
        ("LLaMA-Factory", {"stage": "dpo", "pref_loss": "simpo"},
         {"name": "simpo", "beta": 0.1, "gamma": 0.5}),
        ("LLaMA-Factory", {"stage": "dpo", "pref_loss": "orpo", "pref_beta": 0.3},
         {"name": "orpo", "beta": 0.3}),
        ("LLaMA-Factory", {"stage": "kto", "kto_chosen_weight": 2.0},
         {"name": "kto", "beta": 0.1, "desirable_weight": 2.0}),
        ("Axolotl", {"rl": "ipo", "rl_beta": 0.2}, {"name": "ipo", "beta": 0.2}),
        ("Axolotl", {"rl": "dpo", "dpo_loss_type": ["ipo"]}, {"name": "ipo", "beta": 0.1}),
        ("Axolotl", {"rl": "dpo", "rl_beta": 0.2, "trl": {"beta": 0.3}},
         {"name": "dpo", "beta": 0.3}),
        ("Axolotl", {"rl": "orpo", "orpo_alpha": 0.2}, {"name": "orpo", "beta": 0.2}),
        ("TRL", {"loss_type": "sigmoid", "label_smoothing": 0.1},
         {"name": "dpo", "beta": 0.1, "label_smoothing": 0.1}),
        ("TRL", {"loss_type": ["sigmoid"]}, {"name": "dpo", "beta": 0.1}),
        ("TRL", {"loss_type": ["ipo"], "beta": 0.2}, {"name": "ipo", "beta": 0.2}),
        ("TRL", {"desirable_weight": 1.5}, {"name": "kto", "beta": 0.1, "desirable_weight": 1.5}),
        ("TRL", {"loss_type": "simpo", "beta": 2.0, "cpo_alpha": 0.0},
         {"name": "simpo", "beta": 2.0, "sft": None, "gamma": 0.5}),
        ("TRL", {"loss_type": "simpo"}, {"name": "simpo", "beta": 0.1, "gamma": 0.5, "sft": 1.0}),
        ("TRL", {"loss_type": "robust"}, {"name": "robust", "beta": 0.1, "label_smoothing": 0.0}),
        ("Axolotl", {"rl": "dpo", "dpo_loss_type": "apo_zero"}, {"name": "apo_zero", "beta": 0.1}),
        ("LLaMA-Factory", {"stage": "dpo", "pref_ftx": 0.2},
         {"name": "dpo", "sft": 0.2, "beta": 0.1}),
        ("LLaMA-Factory", {"stage": "kto", "pref_ftx": 0.2}, {"name": "kto", "beta": 0.1}),
        ("TRL", {"loss_type": "nll"}, {}),
    ],
)  # fmt: skip
def test_losses_with_the_values_of_the_tool(
    tool: Tool, values: dict[str, Any], loss: dict[str, Any]
) -> None:
    result = _migrated(tool, trainer="", **values)
    assert result.config.get("loss", {}) == loss
    assert unaccounted(values, result) == []


@pytest.mark.parametrize(
    ("tool", "trainer", "values", "page"),
    [
        ("TRL", "gkd", {}, "docs/distillation.md"),
        ("TRL", "distillation", {}, "docs/distillation.md"),
        ("TRL", "grpo", {}, "docs/rewards.md"),
        ("TRL", "reward", {}, "docs/trl.md"),
        ("Axolotl", "", {"kd_trainer": True}, "docs/distillation.md"),
        ("Axolotl", "", {"rl": "grpo"}, "docs/rewards.md"),
        ("LLaMA-Factory", "", {"stage": "ppo"}, "docs/rewards.md"),
    ],
)
def test_a_method_that_is_written_by_hand_is_refused_with_its_page(
    tool: Tool, trainer: str, values: dict[str, Any], page: str
) -> None:
    with pytest.raises(ConfigError, match=page):
        _migrated(tool, trainer=trainer, **values)


@pytest.mark.parametrize(
    ("values", "rows", "train_on"),
    [
        ({}, "strings", "completion"),
        ({}, "turns", "completion"),
        ({}, "other", "all"),
        ({}, None, "all"),
        ({"completion_only_loss": None, "assistant_only_loss": None}, "turns", "completion"),
        ({"completion_only_loss": False}, "strings", "all"),
        ({"completion_only_loss": True}, None, "completion"),
        ({"assistant_only_loss": True}, "other", "assistant"),
        ({"assistant_only_loss": False}, "turns", "completion"),
    ],
)
def test_trl_trains_on_completions_where_rows_have_them(
    values: dict[str, Any], rows: RowKind | None, train_on: str
) -> None:
    value = {"dataset_name": "rows.jsonl", **values}
    document = Document(name="x.yaml", value=value)
    result = migrate_document(document, "TRL", trainer="sft", rows_of=lambda _: rows)
    assert result.get("data.train_on") == train_on
    unsure = [line for line in result.lines if "set data.train_on: completion" in line.note]
    assert bool(unsure) == (rows is None and not values)
    assert result.get("data.chat_template") == ("none" if rows == "strings" else None)


def test_strings_of_trl_pass_through_no_template() -> None:
    value = {"dataset_name": "rows.jsonl", "chat_template_path": "own.jinja"}
    document = Document(name="x.yaml", value=value)
    result = migrate_document(document, "TRL", rows_of=lambda _: "strings")
    assert result.get("data.chat_template") == "none"
    assert unaccounted(value, result) == []


def test_a_key_that_is_null_leaves_the_default_of_the_tool() -> None:
    for tool in TABLES:
        absent = _migrated(tool)
        null: dict[str, Any] = {
            key: None for key in DEFAULTS[tool] if (tool, key) not in NULL_MEANS
        }
        nulls = _migrated(tool, **null)
        assert nulls.config == absent.config


@pytest.mark.parametrize(
    ("values", "train", "judged"),
    [
        ({"dataset_name": "openai/gsm8k", "dataset_config": "main"},
         [{"path": "openai/gsm8k", "name": "main"}], None),
        ({"dataset_name": "a/b", "dataset_train_split": "sft", "eval_strategy": "steps"},
         [{"path": "a/b", "split": "sft"}], [{"path": "a/b", "split": "test"}]),
        ({"dataset_name": "a/b", "dataset_test_split": "held", "eval_strategy": "epoch"},
         [{"path": "a/b"}], [{"path": "a/b", "split": "held"}]),
        ({"datasets": [{"path": "a/b", "name": "c"}, {"path": "d/e"}]},
         [{"path": "a/b", "name": "c"}, {"path": "d/e"}], None),
    ],
)  # fmt: skip
def test_configuration_and_split_of_a_dataset_are_kept(
    values: dict[str, Any], train: list[Any], judged: list[Any] | None
) -> None:
    result = _migrated("TRL", **values)
    assert (result.get("data.train"), result.get("data.eval")) == (train, judged)


def _info(names: str) -> Any:
    asked = ToolConfig({"dataset": names}, tool="LLaMA-Factory", folder=EXAMPLES)
    return llama_factory(names, asked)[0]


def test_names_of_llama_factory_are_the_files_and_formats_they_stand_for() -> None:
    at = EXAMPLES / "data"
    assert _info("identity,chats,sums,books") == [
        {"path": str(at / "identity.json"), "format": "alpaca"},
        {"path": str(at / "chats.jsonl"), "format": "messages"},
        {"path": "openai/gsm8k", "name": "main", "split": "test", "format": "prompt_completion"},
        {"path": str(at / "books.txt"), "format": "text"},
    ]
    assert _info("pairs,marked") == [
        {"path": str(at / "pairs.json"), "format": "pairs"},
        {"path": str(at / "marked.json"), "format": "kto"},
    ]


def test_columns_and_tags_of_llama_factory_are_kept() -> None:
    at = EXAMPLES / "data"
    assert _info("odd,ranked,tagged,cut") == [
        {"path": str(at / "odd.json"), "format": "prompt_completion",
         "columns": {"prompt": "ask", "completion": "say"}},
        {"path": str(at / "ranked.json"), "format": "pairs", "columns": {"chosen": "better"}},
        {"path": str(at / "t.json"), "format": "messages", "roles": {"user": "customer"}},
        {"path": str(at / "cut.json"), "format": "alpaca", "rows": 100},
    ]  # fmt: skip
    values = {"dataset": "odd,cut", "eval_dataset": "chats", "max_samples": 500}
    document = Document(name="x.yaml", value=values)
    result = migrate_document(document, "LLaMA-Factory", folder=EXAMPLES)
    config = Config(**result.config | {"model": {"name_or_path": "m"}})
    assert [source.rows for source in config.data.train] == [500, 100]
    assert isinstance(config.data.eval, tuple)
    assert config.data.eval[0].rows == 500
    assert config.data.train[0].columns == {"prompt": "ask", "completion": "say"}
    assert _effects(result)["max_samples"] == "changes results"  # num_samples of one of them
    assert unaccounted(values, result) == []


@pytest.mark.parametrize(
    ("entry", "expected", "rl"),
    [
        ({"type": "chat_template", "field_messages": "talk", "field_tools": "tools",
          "message_property_mappings": {"role": "who", "content": "said"},
          "roles": {"user": ["human", "client"], "assistant": ["gpt"]}},
         {"format": "messages", "columns": {"messages": "talk", "role": "who", "content": "said"},
          "roles": {"user": ["client"]}}, None),
        ({"type": "chat_template", "field_messages": "conversations",
          "message_property_mappings": {"role": "from", "content": "value"}},
         {"format": "messages"}, None),
        ({"type": "completion", "field": "body", "split": "train[:10%]"},
         {"format": "text", "columns": {"text": "body"}, "split": "train[:10%]"}, None),
        ({"type": {"field_instruction": "ask", "field_output": "say", "format": "{instruction}"}},
         {"format": "alpaca", "columns": {"instruction": "ask", "output": "say"}}, None),
        ({"type": {"field_prompt": "ask", "field_chosen": "good", "field_rejected": "bad"}},
         {"format": "pairs", "columns": {"prompt": "ask", "chosen": "good", "rejected": "bad"}},
         "dpo"),
        ({"type": "user_defined.default", "field_label": "ok"},
         {"format": "kto", "columns": {"label": "ok"}}, "kto"),
    ],
)  # fmt: skip
def test_fields_of_axolotl_are_kept(
    entry: dict[str, Any], expected: dict[str, Any], rl: str | None
) -> None:
    values: dict[str, Any] = {"datasets": [{"path": "a.jsonl", **entry}], "rl": rl}
    result = _migrated("Axolotl", **values)
    assert result.get("data.train") == [{"path": "a.jsonl", **expected}]
    Config(**result.config | {"model": {"name_or_path": "m"}})


@pytest.mark.parametrize("method", [["dpo"], {"name": "dpo"}, 7])
def test_a_method_of_axolotl_that_is_no_name_is_refused(method: Any) -> None:
    with pytest.raises(ConfigError, match="rl"):
        _migrated("Axolotl", datasets=[{"path": "a", "type": "alpaca"}], rl=method)


def test_the_text_column_of_trl_is_kept() -> None:
    result = _migrated("TRL", dataset_name="a/b", dataset_text_field="body")
    assert result.get("data.train") == [
        {"path": "a/b", "format": "text", "columns": {"text": "body"}}
    ]
    plain = _migrated("TRL", dataset_name="a/b", dataset_text_field="text")
    assert plain.get("data.train") == [{"path": "a/b"}]


def _with_pictures(**values: Any) -> Migration:
    document = Document(name="x.yaml", value={"dataset": "pictures", **values})
    return migrate_document(document, "LLaMA-Factory", folder=EXAMPLES)


def test_images_of_llama_factory_are_kept() -> None:
    result = _with_pictures(media_dir="/photos")
    assert result.get("data.train") == [
        {"path": str(EXAMPLES / "data" / "p.json"), "format": "prompt_completion",
         "columns": {"prompt": "ask", "completion": "say", "images": "shots"},
         "media": "/photos"},
    ]  # fmt: skip
    assert _effects(result)["dataset"] == "changes results"
    Config(**result.config | {"model": {"name_or_path": "m"}})


@pytest.mark.parametrize(
    ("values", "media"),
    [
        ({}, "frozen"),
        ({"freeze_vision_tower": True, "freeze_multi_modal_projector": False}, "projector"),
        ({"freeze_vision_tower": False, "freeze_multi_modal_projector": False}, "all"),
        ({"freeze_vision_tower": False}, None),
        ({"freeze_vision_tower": False, "finetuning_type": "lora"}, None),
        ({"dataset": "identity", "freeze_vision_tower": True}, None),
    ],
)
def test_towers_train_as_there_where_rows_have_images(
    values: dict[str, Any], media: str | None
) -> None:
    result = _with_pictures(**{"finetuning_type": "full"} | values)
    assert result.get("model.media") == media
    lost = media is None and "dataset" not in values
    assert (_effects(result).get("freeze_vision_tower") == "changes results") == lost


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("films", "column clips for videos is not supported"),
        ("calls", "function_tag act is not a supported name"),
        ("code", "script_url are not supported"),
        ("none", "none is not in"),
    ],
)
def test_datasets_that_cannot_be_read_as_there_are_refused_by_name(name: str, reason: str) -> None:
    with pytest.raises(DroppedKey, match=reason):
        _info(name)


def test_every_dataset_that_cannot_be_read_is_named_with_those_that_can() -> None:
    with pytest.raises(DroppedKey) as error:
        _info("films,identity,calls,code")
    said = str(error.value)
    for name in ("films", "calls", "code"):
        assert f"{name} of " in said
    assert "The others are" in said
    assert str(EXAMPLES / "data" / "identity.json") in said
    listed = [{"type": "alpaca"}, {"path": "a/b", "data_files": "x.json"}, {"path": "c/d"}]
    result = _migrated("Axolotl", datasets=listed)
    (line,) = [line for line in result.lines if line.key == "datasets"]
    assert (line.outcome, line.effect) == ("dropped", "needs you")
    for part in ("entry 1 has no path", "a/b: selecting single files", '"path": "c/d"'):
        assert part in line.note


def test_a_name_without_dataset_info_is_not_asked_of_the_hub() -> None:
    result = _migrated("LLaMA-Factory", dataset="identity", dataset_dir="nowhere")
    (line,) = [line for line in result.lines if line.key == "dataset"]
    assert line.outcome == "dropped"
    assert "identity: names from nowhere/dataset_info.json, which does not exist here" in line.note
    assert result.get("data.train") is None


def _effects(result: Migration) -> dict[str, str]:
    return {line.key: line.effect for line in reversed(result.lines)}


def test_lines_are_sorted_by_what_they_mean_for_the_run() -> None:
    result = _migrated("LLaMA-Factory", stage="sft", neftune_noise_alpha=5, do_train=True,
                       ddp_timeout=1, push_to_hub=True, use_dora=False, no_such_key=1,
                       use_galore=True, template="llama3", packing=True)  # fmt: skip
    effects = _effects(result)
    changes = {key for key, effect in effects.items() if effect == "changes results"}
    assert changes == {"neftune_noise_alpha", "use_galore", "packing", "-"}
    needs = {key for key, effect in effects.items() if effect == "needs you"}
    assert needs == {"push_to_hub", "no_such_key", "template"}
    report = result.report()
    titles = [line for line in report.splitlines() if line.endswith(":")]
    num_same = len(result.lines) - 7
    assert titles == ["Changes results (4):", "Needs you (3):", f"Same as there ({num_same}):"]
    places = [report.index(word) for word in ("neftune", "template", "ddp_timeout")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("tool", "key", "on", "effect"),
    [
        ("TRL", "load_in_4bit", True, "changes results"),
        ("TRL", "load_in_8bit", True, "changes results"),
        ("TRL", "ld_alpha", 1.0, "changes results"),
        ("TRL", "optim", "lion_32bit", "changes results"),
        ("TRL", "lr_scheduler_type", "polynomial", "changes results"),
        ("TRL", "metric_for_best_model", "accuracy", "changes results"),
        ("TRL", "metric_for_best_model", "eval_loss", "same"),
        ("TRL", "f_divergence_type", "js_divergence", "changes results"),
        ("TRL", "f_divergence_type", "reverse_kl", "same"),
        ("TRL", "truncation_mode", "keep_start", "same"),
        ("TRL", "hub_model_id", "a/b", "needs you"),
        ("TRL", "resume_from_checkpoint", "last", "needs you"),
        ("TRL", "eval_strategy", "epoch", "needs you"),
        ("TRL", "use_liger_kernel", True, "needs you"),
        ("TRL", "use_liger_kernel", False, "same"),
        ("LLaMA-Factory", "use_galore", True, "changes results"),
        ("LLaMA-Factory", "max_samples", 1000, "needs you"),
        ("LLaMA-Factory", "mix_strategy", "concat", "same"),
        ("Axolotl", "plugins", ["axolotl.integrations.liger.LigerPlugin"], "same"),
        ("Axolotl", "plugins", ["mine.Plugin"], "changes results"),
        ("Axolotl", "unfrozen_parameters", ["lm_head"], "changes results"),
    ],
)
def test_a_dropped_key_counts_as_what_it_does(tool: Tool, key: str, on: Any, effect: str) -> None:
    assert _effects(_migrated(tool, **{key: on}))[key] == effect


@pytest.mark.parametrize("tool", TABLES)
def test_a_key_that_is_off_changes_nothing(tool: Tool) -> None:
    off: dict[str, Any] = dict.fromkeys(
        (key for key, rule in TABLES[tool].items() if not rule.to), False
    )
    assert {_effects(_migrated(tool, **off))[key] for key in off} == {"same"}


def test_features_that_exist_are_named() -> None:
    named = _migrated("TRL", push_to_hub=True, ddp_timeout=1, ld_alpha=1.0).report()
    assert "`megatrain push` uploads the model" in named
    assert "`megatrain train --gpus N` starts a process per GPU" in named
    assert "a term of the loss that is not supported" in named
    assert _migrated("TRL", use_liger_kernel=True).get("train.kernels") == "liger"
    assert _migrated("LLaMA-Factory", enable_liger_kernel=True).get("train.kernels") == "liger"
    assert _migrated("Axolotl", liger_rms_norm=True).get("train.kernels") == "liger"
    assert _migrated("TRL", use_liger_kernel=False).get("train.kernels") == "none"
    both = _migrated("TRL", use_liger_kernel=True, torch_compile=True)
    assert (both.get("train.kernels"), both.get("train.compile")) == (None, True)


def _adapted(kind: str | None, **values: Any) -> Migration:
    value = {"model_name_or_path": "some/model", "use_peft": True, **values}
    document = Document(name="x.yaml", value=value)
    return migrate_document(document, "TRL", trainer="sft", model_type_of=lambda _: kind)


def test_modules_that_peft_would_adapt_are_written() -> None:
    for kind, targets in (("qwen3", ["q_proj", "v_proj"]), ("gpt_neox", ["query_key_value"]),
                          ("phi", ["q_proj", "v_proj", "fc1", "fc2"])):  # fmt: skip
        result = _adapted(kind)
        (line,) = [line for line in result.lines if line.ours == "lora.targets"]
        assert (line.outcome, line.value, line.effect) == ("default", targets, "same")
        assert line.note.endswith(f"PEFT's table for the model type {kind}")
    assert _adapted("qwen3", lora_target_modules=["o_proj"]).get("lora.targets") == ["o_proj"]
    assert _adapted("qwen3", use_peft=False).get("lora.targets") is None


def test_modules_of_a_model_of_unknown_type_are_said_aloud() -> None:
    result = _adapted(None)
    (line,) = [line for line in result.lines if line.ours == "lora.targets"]
    assert (line.value, line.effect) == (["q_proj", "v_proj"], "needs you")
    assert "the type of this model is not known on this machine" in line.note
    result = _adapted("qwen3_moe")
    (line,) = [line for line in result.lines if line.key == "lora_target_modules"]
    assert (line.outcome, line.effect) == ("missing", "needs you")
    assert "PEFT has no default for the model type qwen3_moe" in line.note


def test_keys_without_which_axolotl_does_not_start_are_asked_for() -> None:
    result = _migrated("Axolotl", adapter="lora")
    missing = {line.key for line in result.lines if line.outcome == "missing"}
    assert missing == {"learning_rate", "lora_r", "lora_alpha", "lora_target_modules"}
    result = _migrated("Axolotl", rl="simpo", learning_rate=1e-6)
    found = {line.key: line.effect for line in result.lines if line.outcome == "missing"}
    assert found == {"simpo_gamma": "needs you"}
    assert (result.get("loss.sft"), _effects(result)["cpo_alpha"]) == (1.0, "changes results")


@pytest.mark.parametrize(
    ("tool", "values", "rows", "every"),
    [
        ("Axolotl", {"evals_per_epoch": 4, "saves_per_epoch": 2, "max_steps": 80}, None,
         (20, 40)),
        ("Axolotl", {"evals_per_epoch": 4, "saves_per_epoch": 1, "num_epochs": 2,
                     "micro_batch_size": 2}, 100, (13, 50)),
        ("Axolotl", {"evals_per_epoch": 4, "saves_per_epoch": 1}, None, (None, None)),
        ("Axolotl", {"evals_per_epoch": 4, "sample_packing": True}, 100, (None, None)),
        ("TRL", {"eval_strategy": "epoch", "save_strategy": "epoch"}, 100, (13, 13)),
        ("TRL", {"eval_strategy": "epoch", "max_steps": 5}, None, (None, None)),
        ("TRL", {"eval_steps": 0.1, "save_steps": 0.25, "max_steps": 50}, None, (5, 13)),
        ("LLaMA-Factory", {"save_strategy": "epoch", "val_size": 0.1, "eval_strategy": "epoch"},
         100, (12, 12)),
    ],
)  # fmt: skip
def test_evaluations_and_saves_by_epochs_are_kept_where_steps_are_known(
    tool: Tool, values: dict[str, Any], rows: int | None, every: tuple[int | None, int | None]
) -> None:
    sources: dict[Tool, dict[str, Any]] = {
        "Axolotl": {"datasets": [{"path": "rows.jsonl"}]},
        "TRL": {"dataset_name": "rows.jsonl"},
        "LLaMA-Factory": {"dataset": "rows.jsonl", "dataset_dir": "ONLINE"},
    }
    known = {"trainer": "sft"} if tool == "TRL" else {}
    document = Document(name="x.yaml", value=sources[tool] | values)
    result = migrate_document(document, tool, num_rows_of=lambda _: rows, **known)
    assert (result.get("eval.every"), result.get("save.every")) == every
    assert unaccounted(document.value, result) == []
    asked = [line.key for line in result.lines if "steps is not known" in line.note]
    counted = [key for key in values if "per_epoch" in key or values[key] == "epoch"]
    assert asked == (counted if every == (None, None) else [])


def test_gpus_that_compute_a_row_together_are_no_rows() -> None:
    values = {"micro_batch_size": 2, "gradient_accumulation_steps": 3, "context_parallel_size": 4}
    result = migrate_document(Document(name="x.yaml", value=values), "Axolotl", num_gpus=8)
    assert result.get("train.batch_rows") == 2 * 3 * (8 // 4)
    (line,) = [line for line in result.lines if line.key == "micro_batch_size"]
    assert line.note == "2 rows x 3 accumulated x 8 GPUs / 4 that compute a row together"


def test_a_tool_is_found_by_the_names_people_type() -> None:
    for name in ("llamafactory", "LLaMA-Factory", "llama_factory"):
        assert tool_named(name) == ("LLaMA-Factory", "")
    assert (tool_named("Axolotl"), tool_named("trl")) == (("Axolotl", ""), ("TRL", ""))
    for name in ("trl-dpo", "TRL_DPO", "trl dpo"):
        assert tool_named(name) == ("TRL", "dpo")
    assert tool_named("trl-online-dpo") == ("TRL", "online_dpo")
    with pytest.raises(ConfigError, match="LLaMA-Factory, Axolotl, TRL, trl-sft, trl-dpo, trl-kto"):
        tool_named("torchtune")


def test_steps_win_over_epochs() -> None:
    result = _migrated("TRL", num_train_epochs=3, max_steps=100)
    assert "epochs" not in result.config["train"]
    assert [line.outcome for line in result.lines if line.key == "num_train_epochs"] == ["dropped"]
    assert result.get("train.steps") == 100


@pytest.mark.parametrize("text", ["learning_rate: 1.0e-5\n", "{}", "zzz: 1"])
def test_a_file_that_could_be_of_any_tool(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        migrate_document(parse_document(text.encode(), "x.yaml"))
    assert str(error.value) == (
        "x.yaml: cannot detect its tool: LLaMA-Factory, Axolotl, TRL share the same number of its "
        "keys. Name the tool, like `--tool trl`."
    )


def test_a_file_without_keys() -> None:
    with pytest.raises(ConfigError, match=r"^x.yaml: it has no keys and values. Is it a config\?$"):
        migrate_document(parse_document(b"- a", "x.yaml"))


def test_the_tables_are_about_keys_that_exist() -> None:
    ours = {f"{section}.{key}" for section in SECTIONS for key in FIELDS[section]}
    known = {key for table in TABLES.values() for key in table}
    assert set(CONVERTERS) <= known
    assert {*BY_TOOL, *NULL_MEANS} <= {(tool, key) for tool in TABLES for key in TABLES[tool]}
    assert set(TABLES) == set(DEFAULTS) == set(ALWAYS) == set(ROWS) == set(REQUIRED)
    assert set(BY_TRAINER) == set(TRAINED)
    assert {key for keys in BY_TRAINER.values() for key in keys} <= set(TABLES["TRL"])
    for tool, table in TABLES.items():
        assert {rule.to for rule in table.values() if rule.to} <= ours
        assert set(ALWAYS[tool]) <= ours
        assert {*DEFAULTS[tool], *REQUIRED[tool], ROWS[tool][0]} <= set(table)
        assert set(REQUIRED[tool].values()) <= ours


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
    | st.sampled_from(["no", "auto", "steps", "cosine", "0.1", "a,b", "wandb"]),
    lambda inner: st.lists(inner, max_size=2)
    | st.dictionaries(st.sampled_from(["path", "type", "data_files", "min_lr"]), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("tool", TABLES)
@given(data=st.data())
def test_whatever_the_values_every_key_is_accounted_for(tool: Tool, data: st.DataObject) -> None:
    keys = st.sampled_from(sorted(TABLES[tool]))
    values = data.draw(st.dictionaries(keys, _VALUES, max_size=6))
    trainer = data.draw(st.sampled_from(("", *TRAINED)))
    try:
        result = _migrated(tool, trainer=trainer, **values)
    except ConfigError:  # a method that is not here, or TRL without a trainer
        named = pytest.raises(ConfigError, match="TRL|" + "|".join(map(re.escape, values)))
        with named:
            _migrated(tool, trainer=trainer, **values)
        return
    told = [line.key for line in result.lines if line.outcome not in ADDED]
    assert sorted(told) == sorted(values)
    assert len(result.report().splitlines()) >= len(result.lines)
    with suppress(ConfigError):  # a foreign value that is none of ours is told when it is loaded
        resolve_config(parse_document(result.to_yaml().encode("utf-8", "replace"), "x.yaml"))


@pytest.mark.parametrize("key", ["dataset", "dataset_dir"])
def test_a_name_that_is_too_long_for_a_path_is_only_a_name(key: str, tmp_path: Path) -> None:
    given = {"model_name_or_path": "m", "stage": "sft", "finetuning_type": "full", "dataset": "a"}
    lines = [f"{name}: {value}\n" for name, value in (given | {key: "x" * 5000}).items()]
    (tmp_path / "run.yaml").write_text("".join(lines))
    assert key in migrate(tmp_path / "run.yaml").report()
