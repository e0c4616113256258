"""Config files: round trip, overrides, and every fault at once with its place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.config import Config, dump_config, load_config
from megatrain.config.load import resolve_config
from megatrain.config.yaml_reader import parse_document
from megatrain.errors import ConfigError
from megatrain.fetched import url_of
from megatrain.places import open_place, require_no_secret
from testkit.effort import children_s, require_effort

SMALL = "model: Qwen/Qwen3-8B\ndata: train.jsonl\n"


def load(text: str, *overrides: str) -> Config:
    return resolve_config(parse_document(text.encode(), "run.yaml"), overrides)


def refused(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(text, *overrides)
    assert error.value.exit_code == 2
    return str(error.value)


def test_the_config_of_the_readme_form(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        """
model: {name_or_path: Qwen/Qwen3-8B, dtype: bf16, attn: auto}
data:  {train: [{path: train.jsonl, format: auto}], eval: 0.02, max_length: 2048, packing: true}
train: {epochs: 1, batch_tokens: 128k, micro_batch_tokens: auto, max_grad_norm: 1.0, seed: 42}
optim: {name: adamw, learning_rate: 1e-5, betas: [0.9, 0.95], schedule: cosine, warmup: 0.03}
memory: {device: auto, vram: 20GB, ram: 128GiB, slots: auto, tape: auto}
eval:  {every: 200, samples: 4}
save:  {dir: runs/qwen3-8b-sft, every: 500, keep: 2}
log:   {every: 1, to: [wandb]}
"""
    )
    config = load_config(path, ["train.epochs=2"])
    assert config.model.name_or_path == "Qwen/Qwen3-8B"
    assert config.train.batch_tokens == 131072
    assert config.train.epochs == 2
    assert config.optim.learning_rate == 1e-5
    assert (config.memory.vram, config.memory.ram) == (20 * 10**9, 128 << 30)
    assert config.run_dir == "runs/qwen3-8b-sft"


_NAMES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=12)
_PATHS = st.sampled_from(["a.jsonl", "dir/b c.parquet", "org/name", "null", "1e5", "no", "\u00e9"])
_NUMBERS = st.floats(1e-12, 1, exclude_max=True)
_CONFIGS = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries({"name_or_path": _NAMES | _PATHS},
            optional={"frozen": st.lists(_NAMES, max_size=2), "dtype": st.sampled_from(["fp32"]),
                      "rope": st.none() | st.just({"type": "yarn", "factor": 4, "theta": "1e6"})}),
        "data": st.fixed_dictionaries(
            {"train": st.lists(_PATHS | st.fixed_dictionaries(
                {"path": _PATHS, "weight": _NUMBERS}), min_size=1, max_size=3)},
            optional={"eval": _NUMBERS | _PATHS.filter(lambda p: p != "1e5"),
                      "packing": st.booleans()}),
    },
    optional={
        "train": st.fixed_dictionaries({}, optional={
            "steps": st.none() | st.integers(1000, 10**9), "max_grad_norm": st.none() | _NUMBERS,
            "batch_tokens": st.integers(2048, 1 << 30) | st.just("1M")}),
        "optim": st.fixed_dictionaries({}, optional={
            "learning_rate": _NUMBERS | _NUMBERS.map(str), "eps": _NUMBERS,
            "warmup": st.integers(0, 1000) | _NUMBERS, "betas": st.tuples(_NUMBERS, _NUMBERS)}),
        "memory": st.fixed_dictionaries({}, optional={
            "vram": st.integers(1 << 20, 1 << 45) | st.just("24GB"), "slots": st.integers(2, 9)}),
        "save": _PATHS,
        "log": st.fixed_dictionaries({"to": st.lists(st.sampled_from(["wandb", "trackio"]))}),
    },
)  # fmt: skip


@settings(max_examples=60)
@given(_CONFIGS)
def test_round_trip(value: dict[str, Any]) -> None:
    config = Config(**value)
    text = dump_config(config)
    again = load(text)
    assert again == config
    assert dump_config(again) == text


def test_the_dump_is_complete_and_any_yaml_reader_agrees() -> None:
    config = load(SMALL, "model.name_or_path='no'", "memory.vram=20GB", "data.eval=0.02")
    read = yaml.safe_load(dump_config(config))
    assert {section: set(values) for section, values in read.items()} == {
        section: set(type(settings).model_fields) for section, settings in config
    }
    assert read["model"]["name_or_path"] == "no"
    assert read["optim"]["learning_rate"] == "auto"
    assert read["memory"]["vram"] == "20GB"
    for section, values in config:
        for key in type(values).model_fields:
            assert f"  # {type(values).model_fields[key].description}\n  {key}: " in dump_config(
                config
            )
            assert section


def test_overrides_replace_what_the_file_says() -> None:
    config = load(
        "model: a\ndata: {train: [{path: x}, {path: y}]}\ntrain: {epochs: 3}",
        "model.dtype=fp32", "data.train.1.path=z", "train.epochs=null", "train.steps=100",
        "optim.betas=[0.8, 0.9]", "log.to=wandb", "data.eval=[e.jsonl]", "eval={every: 7}",
    )  # fmt: skip
    assert config.model.dtype == "fp32"
    assert [source.path for source in config.data.train] == ["x", "z"]
    assert (config.train.epochs, config.train.steps) == (None, 100)
    assert config.optim.betas == (0.8, 0.9)
    assert config.log.to == ("wandb",)
    assert config.eval.every == 7


def test_a_section_in_short_form_replaces_one_key_of_it() -> None:
    given = (
        "model: {name_or_path: a, dtype: fp32, frozen: ['*embed*']}\n"
        "data: {train: x.jsonl, eval: 0.1, max_length: 4k}\nloss: {name: grpo, kl: 0.5}\n"
        "save: {dir: x, every: 7}\ntrain: {batch_rows: 4}"
    )
    config = load(
        given, "model=b", "model.dtype=bf16", "data=y.jsonl", "loss=gspo", "save=z",
    )  # fmt: skip
    assert config.model.name_or_path == "b"
    assert (config.model.dtype, config.model.frozen) == ("bf16", ("*embed*",))
    assert [source.path for source in config.data.train] == ["y.jsonl"]
    assert (config.data.eval, config.data.max_length) == (0.1, 4096)
    assert (config.loss.name, config.loss.kl) == ("gspo", 0.5)
    assert (str(config.save.dir), config.save.every) == ("z", 7)
    assert refused(given, "loss=grpoo").startswith("override loss=grpoo: ")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epochs", "override train.epochs: give key=value, like train.epochs=2."),
        ("train.\u00b2=3",
         "override train.\u00b2=3: unknown key train.\u00b2. Known here: epochs, steps, "
         "batch_tokens, batch_rows, micro_batch_tokens, max_grad_norm, "
         "router_aux_loss, seed, on_nonfinite, on_spike, compile, kernels, products, "
         "deterministic, rank_deadline."),
        ("=3", "override =3: give key=value, like train.epochs=2."),
        ("train.epoch=2",
         "override train.epoch=2: unknown key train.epoch. Did you mean train.epochs?"),
        ("train.steps.x=2",
         'override train.steps.x=2: train.steps is {"x": 2}; give a whole number.'),
        ("data.train.0.path=x",
         "override data.train.0.path=x: data.train is train.jsonl, which has no 0. "
         "Give all of data.train."),
        ("train.epochs=[1", "override train.epochs=[1:1: invalid YAML: expected ',' or ']', but "
                            "got "
                            "'<stream end>'"),
        ("train.epochs=0", "override train.epochs=0: train.epochs is 0; give a number above 0."),
    ],
)  # fmt: skip
def test_overrides_that_cannot_be_meant(override: str, message: str) -> None:
    assert refused(SMALL, override) == message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("data: {train: x, cutof_len: 3}",
         "unknown key data.cutof_len. Did you mean data.max_length (cutoff_len elsewhere)?"),
        ("train: {max_lenght: 3}", "unknown key train.max_lenght. Did you mean data.max_length?"),
        ("zzz: 1",
         "unknown key zzz. Known here: model, data, lora, loss, rollouts, train, "
         "optim, memory, eval, save, log."),
        ("log: {zzz: 1}", "unknown key log.zzz. Known here: every, to, project."),
        ("model: {name_or_path: a, dtype: bfloat16}",
         "model.dtype is bfloat16; give bf16 or fp32. Did you mean bf16?"),
        ("data: [{path: a, weigth: 2}]",
         'data is [{"path": "a", "weigth": 2}]; give a mapping with keys from: train, eval, '
         "max_length, overlong, train_on, template_kwargs, chat_template, max_bad, "
         "max_dropped, max_lost_thoughts, processor_kwargs, packing, "
         "shuffle, seed."),
        ("data: {train: [{path: a, weigth: 2}]}",
         "unknown key data.train.0.weigth. Did you mean data.train.0.weight?"),
        ("data: {train: []}", "data.train is []; give at least one."),
        ("model: {name_or_path: a, rope: yarn}", "model.rope is yarn; give a mapping with keys "
         "from: type, factor, theta, original_max_position_embeddings."),
        ("model: {name_or_path: a, rope: {type: yarn}}", "model.rope.factor is missing."),
        ("model: {name_or_path: a, rope: {rope_type: yarn, type: yarn, factor: 2}}",
         "unknown key model.rope.rope_type. Set model.rope, like {type: yarn, factor: 4.0}."),
        ("data: {train: a, eval: 2}", "data.eval is 2; give a number below 1."),
        ("data: {train: a, packing: maybe}", "data.packing is maybe; give true, false or auto."),
        ("data: {train: a, max_length: 2kB}",
         "data.max_length is 2kB; give a number of tokens, like 2048 or 128k."),
        ("optim: {betas: [0.9]}", "optim.betas is [0.9]; give two numbers."),
        ("optim: {learning_rate: 1e5}", "optim.learning_rate is 100000.0; give a number "
         "above 0, 1 or less, or auto."),
        ("memory: {device: gpu}", "memory.device is gpu; give auto, cpu, cuda, cuda:1 or xpu."),
        ("memory: {vram: 24}",
         "memory.vram is 24; that is less than 1 MiB. Give a size with its unit, like 24GB, or "
         "auto."),
        ("save: {keep: true}", "save.keep is true; give a whole number."),
        ("log: {to: [wandbb]}",
         "log.to.0 is wandbb; give tensorboard, wandb, trackio or mlflow. Did you mean wandb?"),
        ("model: {name_or_path: a, attn: flex_attention}",
         "model.attn is flex_attention; give auto, sdpa, eager or flash_attention_2. "
         "flex_attention cannot be trained with: torch has no backward for it on a CPU, and "
         "compiles its masks again for each shape. With auto, documents of packed rows are "
         "attended to alone."),
        ('save: {dir: "a\\0b"}', "save.dir is a\\x00b; give a path or a name."),
    ],
)  # fmt: skip
def test_faults_by_text(line: str, message: str) -> None:
    section = line.partition(":")[0]
    rest = "".join(part + "\n" for part in SMALL.splitlines() if not part.startswith(section))
    assert refused(rest + line) == f"run.yaml:{rest.count(chr(10)) + 1}: {message}"


def test_all_faults_are_told_at_once_in_the_order_of_the_file() -> None:
    text = "data:\n  train: a\n  seed: -1\nmodel:\n  dtype: fp16\noptim:\n  beta: 1\n"
    assert refused(text) == (
        "4 errors\n"
        "  run.yaml:3: data.seed is -1; give 0 or more.\n"
        "  run.yaml:4: model.name_or_path is missing. "
        "Give one, like `name_or_path: Qwen/Qwen3-8B`.\n"
        "  run.yaml:5: model.dtype is fp16; give bf16 or fp32. Did you mean bf16?\n"
        "  run.yaml:7: unknown key optim.beta. Did you mean optim.betas?"
    )


def test_no_file_takes_much_to_refuse() -> None:
    lines = "".join(f"learnin_{number}: {{a: 1}}\n" for number in range(3000))
    assert "3000 errors" in refused(SMALL + lines)
    require_effort(lambda: refused(SMALL + lines), at_most=50)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "2 errors\n  run.yaml: model is missing. Give one, like `model: Qwen/Qwen3-8B`.\n"
             "  run.yaml: data is missing. Give one, like `data: {train: train.jsonl}`."),
        ("3", "run.yaml: the file is 3; give keys and values, like `model: NAME`."),
        ("model: a\ndata:",
         "run.yaml:2: data is missing. Give one, like `data: {train: train.jsonl}`."),
    ],
)  # fmt: skip
def test_files_that_say_too_little(text: str, message: str) -> None:
    assert refused(text) == message


def test_a_section_whose_keys_are_commented_out_has_its_defaults() -> None:
    assert load(SMALL + "train:\n  # epochs: 3\n") == load(SMALL)


def test_importing_takes_little_and_no_torch() -> None:
    code = """
import sys
import megatrain.config
print({"torch", "transformers", "typer", "rich", "numpy"} & set(sys.modules))
"""

    def import_() -> None:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout == "set()\n", done.stderr

    require_effort(import_, at_most=15, clock=children_s)


SECRET = "AKIAIOSFODNN7:wJalr/XUtn+FEMI"
WITH_SECRET = f"s3://{SECRET}@bucket/run"


def _refused(text: str) -> str:
    assert "a URL, s3://..., with a name or a password" in text
    assert "AWS_SECRET_ACCESS_KEY" in text
    assert not any(part in text for part in SECRET.split(":"))
    return text.split(" is a URL")[0]


@pytest.mark.parametrize(
    "key",
    [
        *("save", "save.dir", "model", "model.name_or_path", "data", "data.train", "data.eval"),
        *("loss.teacher", "lora.path", "rollouts.server", "unknown.key", "output_dir"),
    ],
)
def test_a_secret_in_a_url_is_refused_by_the_name_of_its_key(key: str) -> None:
    """In a file, as an override and from Python; the secret is in no message."""
    section, _, leaf = key.partition(".")
    value: Any = {leaf: WITH_SECRET} if leaf else WITH_SECRET
    assert _refused(refused(SMALL, f"{key}={WITH_SECRET}")).startswith(section)
    assert _refused(refused(yaml.safe_dump({section: value}))) == key
    with pytest.raises(ConfigError) as error:
        Config.model_validate({"model": "m", "data": "rows.jsonl", section: value})
    assert _refused(str(error.value)) == key


def test_a_secret_in_a_list_of_sources_is_refused() -> None:
    sources = {"model": "m", "data": {"train": ["a.jsonl", {"path": WITH_SECRET}]}}
    assert _refused(refused(yaml.safe_dump(sources))) == "data.train.1.path"


@pytest.mark.parametrize(
    "name",
    [
        "s3://bucket/run",
        "file:///mnt/a@b/run",
        "s3://bucket/a@b",
        "hf://datasets/me/rows@main",
        "runs/me@host",
    ],
)
def test_names_with_an_at_sign_hold_no_secret(name: str) -> None:
    Config.model_validate({"model": name, "data": name})
    require_no_secret("http://127.0.0.1:8000/a@b")


@pytest.mark.parametrize(
    "url", ["s3://key@bucket", "S3://k:s@b", "https://me:pass@host/x", " gs://a:b/c@d", WITH_SECRET]
)
def test_forms_of_secrets(url: str) -> None:
    for use in (require_no_secret, url_of, open_place):
        with pytest.raises(ConfigError, match=r"a URL, .*://\.\.\., with a name or a password"):
            use(url)
