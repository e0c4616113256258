"""Configs of three tools, in the style of their examples: migrated as the tool itself reads them.

theirs.json has the values that the tools' own classes read from the files in configs/, and the
learning rates of transformers' scheduler with them (proofs/migrated.py). A migrated config has the
same method, learning rates, batch, length, optimizer and adapters, or the file is refused by the
name of its method.
"""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli.starting import init_config
from megatrain.config import Config
from megatrain.config.other_tools import tables
from megatrain.config.other_tools.methods import PEFT_TARGETS
from megatrain.config.other_tools.translate import migrate, tool_named
from megatrain.errors import ConfigError
from megatrain.optim.learning_rate import LearningRate
from proofs.migrated import STEPS, TYPES, differences

CONFIGS = Path(__file__).parent / "configs"
TABLE: dict[str, Any] = json.loads((CONFIGS.parent / "theirs.json").read_text())
THEIRS: dict[str, Any] = TABLE["configs"]
REFUSED = {
    "trl/sft_dft.yaml": "loss_type is dft of TRL's sft: the losses here are next_token, dpo",
    "trl/dpo_mpo.yaml": r"loss_type is sigmoid, bco_pair, sft with the weights \[0.8, 0.2, 1.0\]",
    "trl/cpo_sigmoid.yaml": "loss_type is sigmoid of TRL's cpo: the losses here are",
    "trl/grpo.yaml": "TRL's grpo is not a method here: rewards .* by docs/rewards.md",
    "trl/rloo.yaml": "TRL's rloo is not a method here: rewards .* by docs/rewards.md",
    "trl/ppo.yaml": "TRL's ppo is not a method here: rewards .* by docs/rewards.md",
    "trl/online_dpo.yaml": "TRL's online_dpo is not a method here: rewards .* docs/rewards.md",
    "trl/reward.yaml": "TRL's reward is not a method here: reward models are trained from Python",
    "llama_factory/ppo_lora.yaml": "stage is ppo: rewards .* by docs/rewards.md",
    "llama_factory/reward_lora.yaml": "stage is rm: reward models are trained from Python",
    "llama_factory/dpo_hinge.yaml": "pref_loss is hinge: the losses here are",
    "llama_factory/sft_oft.yaml": "finetuning_type is oft: lora is the only kind of adapter",
    "llama_factory/sft_freeze.yaml": "finetuning_type is freeze: .* model.frozen",
    "axolotl/dpo_two_losses.yaml": "dpo_loss_type is sigmoid, sft: give one loss; .* loss.sft",
    "axolotl/grpo_lora.yaml": "rl is grpo: rewards .* by docs/rewards.md",
    "axolotl/gdpo.yaml": "rl is gdpo: rewards .* by docs/rewards.md",
    "axolotl/reward_model.yaml": "reward_model is True: reward models are trained from Python",
    "axolotl/process_reward_model.yaml": "process_reward_model is True: reward models",
}
"""Files whose method is not here, and the error."""
OTHERS = sorted(set(THEIRS) - set(REFUSED))
TOOLS = {"trl": "trl", "llama_factory": "llamafactory", "axolotl": "axolotl"}


def test_there_is_a_file_for_every_method_and_values_for_every_file() -> None:
    on_disk = {f"{path.parent.name}/{path.name}" for path in CONFIGS.glob("*/*.yaml")}
    assert on_disk == set(THEIRS)
    assert len(OTHERS) >= 36
    methods = {THEIRS[name]["method"] for name in THEIRS}
    assert methods >= {"sft", "pt", "dpo", "kto", "orpo", "ppo", "grpo", "reward", "rm", "simpo"}


def command(name: str) -> str:
    """Return what --tool is for a file: the command that its first line has."""
    words = (CONFIGS / name).read_text().split("\n", 1)[0].split()
    return f"trl-{words[2]}" if words[1] == "trl" else TOOLS[name.partition("/")[0]]


def migrated(name: str) -> Config:
    tool, trainer = tool_named(command(name))
    found = migrate(CONFIGS / name, tool, trainer=trainer, model_type_of=TYPES.get)
    return Config(**found.config)


def _loss(name: str, theirs: dict[str, Any]) -> str:
    """Return our name of the loss that the tool computes."""
    method, values = theirs["method"], theirs["values"]
    kinds = values.get("loss_type")
    kind = kinds[0] if isinstance(kinds, list) else kinds
    if method in ("sft", "pt"):
        return "next_token"
    if method == "dpo":
        return "dpo" if kind == "sigmoid" else str(kind)
    return str(kind) if method == "cpo" else str(method)


def _rates(config: Config) -> list[float]:
    steps = config.train.steps or STEPS
    optim = config.optim
    rate = LearningRate(
        peak=float(optim.learning_rate),
        shape=optim.schedule,
        num_steps=steps,
        warmup=optim.warmup,
        decay=optim.decay,
        final_fraction=optim.final_fraction,
    )
    return [rate.rate(place) for place in (0, 1, steps // 20, steps // 2, steps - 1)]


def faults(name: str, config: Config, theirs: dict[str, Any]) -> list[str]:
    """Return the values in which a migrated config differs from what the tool reads."""
    values = theirs["values"]
    loss = config.loss
    length = values["max_length"]
    if name.startswith("llama_factory") and values["packing"] and theirs["method"] == "sft":
        length += 1  # its collator pads by one
    tokens = config.train.batch_tokens
    packed_rows = tokens / config.data.max_length if isinstance(tokens, int) else None
    rows = config.train.batch_rows or packed_rows
    pairs: dict[str, tuple[Any, Any]] = {
        "loss": (loss.name, _loss(name, theirs)),
        "rates": (_rates(config), pytest.approx(values["rates"], rel=1e-9)),
        "rows": (rows, values["rows"]),
        "steps": (config.train.steps, values["steps"]),
        "weight_decay": (config.optim.weight_decay, values["weight_decay"]),
        "betas": ([*config.optim.betas], values["betas"]),
        "eps": (config.optim.eps, values["eps"]),
        "max_grad_norm": (config.train.max_grad_norm, values["max_grad_norm"]),
        "max_length": (config.data.max_length, length),
        "packing": (config.data.packing, values["packing"]),
        "lora": (_lora(config), _their_lora(values["lora"])),
        "base": (config.model.base, "nf4" if _has_narrow_base(name) else "auto"),
    }
    if values["steps"] is None:
        pairs["epochs"] = (config.train.epochs, values["epochs"])
    if not name.startswith("axolotl"):  # which shuffles its rows once, before training
        pairs["order"] = (config.data.shuffle, not values["sequential"])
    if loss.name != "next_token":
        pairs["beta"] = (loss.beta, values["beta"])
    if loss.name in ("dpo", "robust"):
        pairs["label_smoothing"] = (loss.label_smoothing or 0, values["label_smoothing"])
    if loss.name == "simpo":
        pairs["gamma"] = (loss.gamma, values["simpo_gamma"])
        pairs["sft"] = (loss.sft or 0, values.get("cpo_alpha", 0))
    if loss.name == "kto":
        weights = values["desirable_weight"], values["undesirable_weight"]
        pairs["weights"] = ((loss.desirable_weight or 1, loss.undesirable_weight or 1), weights)
    return [f"{key}: {one} and {other}" for key, (one, other) in pairs.items() if one != other]


def _has_narrow_base(name: str) -> bool:
    text = (CONFIGS / name).read_text()
    return "load_in_4bit: true" in text or "quantization_bit: 4" in text


def _lora(config: Config) -> dict[str, Any] | None:
    lora = config.lora
    if lora.rank is None:
        return None
    alpha = 2 * lora.rank if lora.alpha is None else lora.alpha
    targets = sorted(lora.targets)
    return {"rank": lora.rank, "alpha": alpha, "dropout": lora.dropout, "targets": targets}


def _their_lora(lora: dict[str, Any] | None) -> dict[str, Any] | None:
    every = lora is not None and lora["targets"] in ("all-linear", ["all"])
    return {**lora, "targets": ["all-linear"]} if lora is not None and every else lora


@pytest.mark.parametrize("name", OTHERS)
def test_a_config_is_migrated_as_its_tool_reads_it(name: str) -> None:
    assert faults(name, migrated(name), THEIRS[name]) == []


def test_a_wrong_learning_rate_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    dpo = tables.BY_TRAINER["dpo"] | {"learning_rate": 2e-5}
    monkeypatch.setitem(tables.BY_TRAINER, "dpo", dpo)
    wrong = {name: faults(name, migrated(name), THEIRS[name]) for name in OTHERS}
    found = {name: [fault.partition(":")[0] for fault in wrong[name]] for name in OTHERS}
    expected = ("full", "ipo", "list", "robust")
    assert {name: keys for name, keys in found.items() if keys} == {
        f"trl/dpo_{name}.yaml": ["rates"] for name in expected
    }


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"optim": {"warmup": 0.2}}, "rates"),
        ({"train": {"batch_rows": 4}}, "rows"),
        ({"lora": {"targets": ["all-linear"]}}, "lora"),
        ({"loss": {"name": "ipo"}}, "loss"),
    ],
)
def test_another_value_would_be_noticed(change: dict[str, Any], fault: str) -> None:
    name = "trl/dpo_lora.yaml"
    values = migrated(name).model_dump()
    for section, keys in change.items():
        values[section] |= keys
    found = faults(name, Config(**values), THEIRS[name])
    assert [line.partition(":")[0] for line in found] == [fault]


@pytest.mark.parametrize("name", REFUSED)
def test_a_method_that_is_not_here_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(ConfigError, match=REFUSED[name]) as error:
        init_config(tmp_path / "run.yaml", CONFIGS / name, tool=command(name), say=said.append)
    assert str(error.value).startswith(f"{CONFIGS / name}:")
    assert (said, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize("name", [name for name in THEIRS if name.startswith("trl/")])
def test_a_file_of_trl_without_its_command_is_of_its_trainer_or_refused(name: str) -> None:
    """No key of some files tells the trainer; none is read as a file of another one."""
    trainer = THEIRS[name]["method"]
    found = _by_keys_alone(name)
    if isinstance(found, Config):
        assert (name in REFUSED, found) == (False, migrated(name))
    elif name not in REFUSED:
        assert re.search(rf"fit .*\b{trainer}\b.* name it, like `--tool trl-\w+`", found), found


def _by_keys_alone(name: str) -> Config | str:
    """Return the migrated config, or the error, of a file whose command is not known."""
    try:
        return Config(**migrate(CONFIGS / name, model_type_of=TYPES.get).config)
    except ConfigError as refusal:
        return str(refusal)


def test_some_files_of_trl_tell_their_trainer_and_those_of_others_need_none() -> None:
    told = {name for name in OTHERS if isinstance(_by_keys_alone(name), Config)}
    assert {"trl/dpo_list.yaml", "trl/kto_lora.yaml", "trl/cpo_simpo.yaml"} <= told
    assert {name for name in OTHERS if not name.startswith("trl/")} <= told


def test_modules_to_adapt_are_those_of_peft() -> None:
    theirs = TABLE["peft_targets"]
    for kind, targets in PEFT_TARGETS.items():
        named = re.findall(r"\w+_proj", theirs[kind]) if isinstance(theirs[kind], str) else None
        assert [*targets] == (named or theirs[kind]), kind
    no_decoders = {
        "t5", "mt5", "bart", "blip-2", "bert", "roberta", "xlm-roberta", "electra", "deberta",
        "deberta-v2", "layoutlm", "RefinedWebModel", "RefinedWeb", "btlm", "rwkv", "rwkv7",
    }  # fmt: skip
    assert set(theirs) - set(PEFT_TARGETS) == no_decoders


def test_a_tool_that_says_something_else_would_be_noticed() -> None:
    found = deepcopy(TABLE)
    found["configs"]["trl/dpo_full.yaml"]["values"]["rates"][0] = 2e-5
    found["peft_targets"]["qwen3"] = ["q_proj"]
    assert differences(TABLE, TABLE) == []
    told = differences(TABLE, found)
    assert [line.split(":")[0] for line in told] == [
        "configs trl/dpo_full.yaml",
        "peft_targets qwen3",
    ]
