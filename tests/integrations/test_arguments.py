"""What a trainer's arguments ask of the engine, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.errors import ConfigError
from megatrain.integrations.arguments import (
    REFUSED,
    REFUSED_OBJECTS,
    check_arguments,
    optimizer_of,
    precision_of,
)
from megatrain.integrations.trl import streamed
from testkit.worlds import world_of


def arguments(**changes: Any) -> Any:
    """Return arguments that can be honored, but for `changes`."""
    given: dict[str, Any] = {
        **dict.fromkeys(REFUSED),
        "label_smoothing_factor": 0.0,
        "fp16": False,
        "optim": "adamw_torch",
        "world_size": 1,
        "bf16": True,
        "bf16_full_eval": False,
        "load_best_model_at_end": False,
        "save_only_model": False,
        "model_init_kwargs": {"dtype": "bfloat16"},
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
    }
    return SimpleNamespace(**given | changes)


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_cannot_be_honored_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=") as error:
        check_arguments(arguments(**{name: 0.1}), {})
    assert REFUSED[name] in str(error.value)


@pytest.mark.parametrize("name", REFUSED_OBJECTS)
def test_an_object_that_cannot_be_honored_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: "):
        check_arguments(arguments(), {name: object()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": "adafactor"}, "optim=adafactor"),
        ({"world_size": 2}, "2 processes"),
        ({"load_best_model_at_end": True, "save_only_model": True}, "save_only_model"),
        ({"bf16": False, "model_init_kwargs": None, "bf16_full_eval": True}, "bf16_full_eval"),
        ({"model_init_kwargs": {"device_map": "auto"}}, "device_map"),
        ({"chat_template_path": "Qwen/Qwen3-0.6B"}, "chat_template_path"),
    ],
)
def test_other_wishes_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_arguments(arguments(**changes), {})


@pytest.mark.parametrize(
    ("bf16", "dtype", "expected"),
    [(True, None, "bf16"), (False, None, "fp32"), (False, "bfloat16", "bf16")],
)
def test_compute_has_the_precision_of_the_arguments(bf16: bool, dtype: Any, expected: str) -> None:
    asked = None if dtype is None else {"dtype": dtype}
    assert precision_of(arguments(bf16=bf16, model_init_kwargs=asked)) == expected


def test_a_precision_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="dtype is float16"):
        precision_of(arguments(bf16=False, model_init_kwargs={"dtype": "float16"}))


def test_params_decay_as_the_trainer_says() -> None:
    decoder = world_of("llama in fp32").decoder
    norm, matrix = "model.norm.weight", "lm_head.weight"
    usual = {param.name for param in decoder.params if "norm" not in param.name}
    for decayed in (usual, usual - {matrix}, usual | {norm}):
        optimizer = optimizer_of(
            arguments(), decoder, lambda step: 0.0, decayed, state="fp32", num_threads=1
        )
        treated = optimizer.treated(decoder.params)
        assert {name for name, one in treated.items() if one.weight_decay == 0.1} == decayed


def test_a_trainer_that_nobody_has_tried_is_refused() -> None:
    class PPOTrainer:
        pass

    with pytest.raises(ConfigError, match="PPOTrainer cannot be streamed, but these can: DPO"):
        streamed(PPOTrainer)
