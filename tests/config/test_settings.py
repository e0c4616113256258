"""Settings: described, immutable, at one with the engine, and checked against each other."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from megatrain.config import Config
from megatrain.config.sections import DataSource, RopeSettings
from megatrain.config.settings import SECTIONS
from megatrain.errors import ConfigError
from megatrain.optim.adamw import AdamW
from megatrain.optim.learning_rate import LRSchedule, Shape
from megatrain.step.settings import CHUNK_TOKENS, StepSettings


def make(**sections: Any) -> Config:
    return Config(**{"model": "org/tiny", "data": "train.jsonl", **sections})


def test_every_key_says_what_it_is_in_one_sentence() -> None:
    assert set(SECTIONS) == set(Config.model_fields)
    sections: list[type[BaseModel]] = [*SECTIONS.values(), DataSource, RopeSettings]
    for section in sections:
        for key, field in section.model_fields.items():
            assert field.description, key
            assert field.description.endswith("."), key
            assert field.description.count(". ") == 0, key


def test_nothing_can_be_changed() -> None:
    config = make()
    for target, key in (
        (config, "train"),
        (config.train, "epochs"),
        (config.data.train[0], "path"),
    ):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(target, key, None)
    assert hash(config) == hash(make())


def _default(function: Any, name: str) -> Any:
    return inspect.signature(function).parameters[name].default


def test_defaults_and_choices_are_those_of_the_engine() -> None:
    config = make()
    assert config.memory.chunk_tokens == "auto"
    assert f"at most {CHUNK_TOKENS}" in str(SECTIONS["memory"].model_fields["chunk_tokens"])
    assert config.train.on_nonfinite == StepSettings().on_nonfinite
    assert config.train.compile == StepSettings().compile
    assert config.decided(kernels="none").kernels == StepSettings().kernels
    for key in ("betas", "eps", "weight_decay"):
        assert getattr(config.optim, key) == _default(AdamW, key), key
    for key in ("decay", "final_fraction"):
        assert getattr(config.optim, key) == _default(LRSchedule, key), key
    assert get_args(SECTIONS["optim"].model_fields["schedule"].annotation) == get_args(Shape)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"steps": 5, "epochs": 2}},
         "train.steps is 5 and train.epochs is 2. Give one of them and set the other to null."),
        ({"train": {"batch_rows": 8, "batch_tokens": 4096}},
         "train.batch_rows is 8 and train.batch_tokens is 4096. Give one of them and set the "
         "other to null."),
        ({"data": {"train": "a", "max_length": "8k"}, "train": {"batch_tokens": 4096}},
         "data.max_length is 8192 and train.batch_tokens is 4096: a row would not fit a step. "
         "Raise train.batch_tokens or lower data.max_length."),
        ({"data": {"train": "a", "max_length": "8k"}, "train": {"micro_batch_tokens": 4096}},
         "data.max_length is 8192 and train.micro_batch_tokens is 4096: a row would not fit a "
         "micro-batch. Raise train.micro_batch_tokens, or set it to auto."),
        ({"train": {"micro_batch_tokens": 8192, "batch_tokens": 4096}},
         "train.micro_batch_tokens is 8192 and train.batch_tokens is 4096: a micro-batch is a part "
         "of a step. Lower train.micro_batch_tokens, or set it to auto."),
        ({"train": {"steps": 5}, "optim": {"warmup": 6}},
         "optim.warmup is 6: longer than a run of 5 steps. Shorten it."),
        ({"optim": {"schedule": "wsd", "warmup": 0.6, "decay": 0.5}},
         "optim.warmup is 0.6 and optim.decay is 0.5: longer than the run. Shorten it."),
        ({"model": {"name_or_path": "m", "attn": "flash_attention_2", "dtype": "fp32"}},
         "model.attn is flash_attention_2 and model.dtype is fp32: its kernels compute in bf16 "
         "only. Set model.dtype to bf16, or model.attn to sdpa."),
        ({"train": {"compile": True, "kernels": "liger"}},
         "train.kernels is liger and train.compile is true: a compiled layer has kernels that "
         "torch makes. Set train.kernels to auto, or train.compile to false."),
        ({"model": {"name_or_path": "m", "dtype": "fp32"}, "train": {"products": "fp8"}},
         "train.products is fp8 and model.dtype is fp32: fewer bits than bf16 has are no use to "
         "products in fp32. Set train.products to plain, or model.dtype to bf16."),
        ({"memory": {"tile_tokens": 4096}, "train": {"compile": True}},
         "memory.tile_tokens is 4096 and train.compile is true: a compiled layer computes full "
         "rows. Set memory.tile_tokens to null, or train.compile to false."),
        ({"memory": {"tile_tokens": 4096, "kept_layers": 2}},
         "memory.kept_layers is 2 and memory.tile_tokens is 4096: layers run over tiles to hold "
         "less, and compute each tile again. Set memory.tile_tokens to null, or "
         "memory.kept_layers to 0."),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_meant_together(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make(**sections)
    assert str(error.value) == f"config: {message}"


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"steps": 5, "epochs": None}},
        {"train": {"batch_rows": 5, "batch_tokens": None}},
        {"train": {"batch_rows": 1, "micro_batch_tokens": 8192}},
        {"data": {"train": "a", "max_length": 4096}, "train": {"micro_batch_tokens": 4096}},
        {"train": {"micro_batch_tokens": 4096, "batch_tokens": 4096}},
        {"train": {"steps": 6}, "optim": {"warmup": 6}},
        {"optim": {"schedule": "wsd", "warmup": 0.5, "decay": 0.5}},
        {"optim": {"schedule": "cosine", "warmup": 0.6, "decay": 0.5}},
    ],
)
def test_their_neighbors_are_fine(sections: dict[str, Any]) -> None:
    make(**sections)


def test_rows_of_no_given_length_fit_a_step() -> None:
    assert make(train={"batch_tokens": 1024}).data.max_length == 1024
    assert make(train={"batch_tokens": 4096, "micro_batch_tokens": 512}).data.max_length == 512
    assert make(train={"batch_tokens": 4096}).data.max_length == 2048
    with pytest.raises(ConfigError, match="a row would not fit a step"):
        make(data={"train": "a", "max_length": 2048}, train={"batch_tokens": 1024})


@pytest.mark.parametrize("steps", [1, 7, 100, 12345])
@pytest.mark.parametrize("warmup", [0, 5, 0.03, 0.5, 0.999])
@pytest.mark.parametrize("schedule", get_args(Shape))
def test_what_is_accepted_the_learning_rate_accepts(
    steps: int, warmup: float, schedule: str
) -> None:
    optim = {"warmup": warmup, "schedule": schedule}
    try:
        config = make(train={"steps": steps}, optim=optim).optim
    except ConfigError:
        accepted = False
    else:
        accepted = config.warmup == warmup
    try:
        LRSchedule(peak=1e-5, shape=schedule, num_steps=steps, warmup=warmup)  # type: ignore[arg-type]
    except ConfigError:
        assert not accepted
    else:
        assert accepted


def test_a_step_is_measured_by_tokens_or_by_rows() -> None:
    assert make().train.batch_tokens == "auto"
    assert make().train.batch_rows is make().step_tokens is None
    assert make(train={"batch_tokens": "8k"}).step_tokens == 8192
    by_rows = make(train={"batch_rows": 8})
    assert by_rows.train.batch_tokens is None
    assert by_rows.step_tokens == 8 * 2048
    again = Config.model_validate(by_rows.model_dump())
    assert again == by_rows


def test_the_plan_settles_what_is_left_to_it() -> None:
    settled = make(optim={"warmup": 7}).settled(4096)
    assert settled == make(optim={"warmup": 7}, train={"batch_tokens": 4096})
    for given in ({"batch_tokens": 8192}, {"batch_rows": 8}):
        assert make(train=given).settled(4096) == make(train=given)
    with pytest.raises(ConfigError, match="a micro-batch is a part of a step"):
        make(train={"micro_batch_tokens": 8192}).settled(4096)


class _Rows:
    """As datasets.Dataset: many rows, and a description of several lines."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __iter__(self) -> Iterator[dict[str, str]]:
        return ({"text": "a"} for _ in range(self.num_rows))

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        return f"Rows({{\n    num_rows: {self.num_rows}\n}})"


@pytest.mark.parametrize("key", ["train", "eval"])
@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        (_Rows(10**6), "Rows({ num_rows: 1000000 })"),
        ([{"text": "a"}] * 3, '[{"text": "a"}, {"text": "a"}, {"text": "a"}]'),
        ([{"messages": []}], '[{"messages": []}]'),
    ],
    ids=["dataset", "rows", "one row"],
)
def test_rows_in_place_of_files_are_one_fault(key: str, rows: object, shown: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Config(model="m", data={"train": "a.jsonl", key: rows})
    assert str(refused.value) == (
        f"config: data.{key} is {shown}; give files, folders or Hub ids, not rows. Rows go to "
        "mt.Trainer as train_dataset, or into a file, one JSON object a line."
    )
