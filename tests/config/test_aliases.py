"""Names of other tools: those that mean a key of ours, and those that do not."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import Config
from megatrain.config.aliases import ALIASES, HINTS, our_key
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
    "flash_attn": ("fa2", "flash_attention_2", {}),
    "dataset_name": ("a.jsonl", "a.jsonl", {}),
    "val_set_size": (0, None, {}),
    "max_seq_length": (512, 512, {}),
    "excess_length_strategy": ("truncate", "truncate", {}),
    "chat_template_kwargs": ({"enable_thinking": False}, {"enable_thinking": False}, {}),
    "lora.r": (16, 16, {}),
    "lora_target": ("q_proj,v_proj", ["q_proj", "v_proj"], LORA),
    "additional_target": ("embed_tokens, lm_head", ["embed_tokens", "lm_head"], LORA),
    "use_dora": (True, True, LORA),
    "dpo_beta": (0.2, 0.2, DPO),
    "simpo_gamma": (0.5, 0.5, SIMPO),
    "pref_ftx": (0.0, None, DPO),
    "kto_chosen_weight": (2, 2, KTO),
    "max_steps": (-1, None, {}),
    "max_grad_norm": (0, None, {}),
    "lr": (2e-5, 2e-5, {}),
    "lr_scheduler": ("constant_with_warmup", "constant", {}),
    "warmup_ratio": (0.1, 0.1, {}),
    "warmup_steps": (100, 100, {}),
    "early_stopping_patience": (2, 2, {"data": {"train": "a.jsonl", "eval": 0.1}}),
    "save_steps": (50, 50, {}),
    "report_to": ("none", [], {}),
}
"""Aliases of each kind: a value there, the value here, and the sections that it needs."""


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


def test_python_takes_our_names() -> None:
    with pytest.raises(ConfigError, match=r"unknown key optim\.lr\. The key here is optim\."):
        Config(model="m", data="a.jsonl", optim={"lr": 1e-5})


REFUSED = {
    "per_device_train_batch_size": "set train.batch_rows to rows per device x accumulation",
    "train_on_inputs": "Set data.train_on to assistant, last, completion or all.",
    "bnb_4bit_quant_type": "model.base is",
    "nvme": "The key here is memory.disk.",
    "trust_remote_code": "Code in a model folder is never run.",
    "neftune_noise_alpha": "There is none: it would change what is trained.",
}
"""Names that mean something else, and a part of what is said about them."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_means_something_else_is_refused_with_what_to_do(name: str) -> None:
    text = refused(f"{SMALL}{name}: 1\n")
    assert text.startswith(f"run.yaml:3: unknown key {name}. ")
    assert REFUSED[name] in text


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
