"""Every setting is read by something: a run is watched as it reads its config."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from megatrain.cli.demo import write_demo
from megatrain.cli.verbs import train_from
from megatrain.config import load_config
from megatrain.config.sections import DataSource, Section
from megatrain.config.settings import SECTIONS
from megatrain.data.training_rows import row_media
from megatrain.integrations.trl_run import grpo_arguments, require_supported
from megatrain.run.opening.model import load_tokenizer
from testkit.media_runs import media_run_config, write_media_world

DRAWN = [
    "loss.name=grpo", "rollouts.engine=vllm", "rollouts.max_new_tokens=4",
    "train.batch_tokens=null", "train.batch_rows=2",
]  # fmt: skip
"""A run whose steps TRL takes: it need not be installed to read the config."""
MODELS: list[type[BaseModel]] = [*SECTIONS.values(), DataSource]
KEYS = {f"{section.__name__}.{key}" for section in MODELS for key in section.model_fields}


@contextmanager
def watched() -> Iterator[set[str]]:
    """Yield the set of keys that code outside the config package reads."""
    found: set[str] = set()

    def read(section: Section, name: str) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("megatrain.") and not caller.startswith("megatrain.config"):
            found.add(f"{object.__getattribute__(section, '__class__').__name__}.{name}")
        return object.__getattribute__(section, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Section, "__getattribute__", read)
        yield found


@pytest.fixture(scope="module")
def read_keys(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What short runs read of their configs: on rows, on drawn answers, on ids and on media."""
    folder = tmp_path_factory.mktemp("watched")
    path = write_demo(folder / "demo", num_steps=2)
    small = ["train.batch_tokens=512", "train.micro_batch_tokens=256", "eval.samples=0"]
    with pytest.MonkeyPatch.context() as patch, watched() as found:
        patch.setenv("MEGATRAIN_CACHE", str(folder / "cache"))
        words = [*small, "train.steps=null", "train.epochs=0.1", "lora.rank=4", "optim.name=muon"]
        train_from(load_config(path, words))
        drawn = load_config(path, DRAWN)
        require_supported(drawn)
        grpo_arguments(drawn, [], 1, str(folder))
        found |= {"RolloutSettings.weights_folder"}
        np.full(4096, 3, np.uint16).tofile(folder / "ids.bin")
        tokens = f"data.train=[{{path: {folder / 'ids.bin'}, dtype: uint16}}]"
        train_from(load_config(path, [f"save.dir={folder / 'tokens'}", tokens, *small]))
        write_media_world(folder, num_rows=2)
        media = media_run_config(folder, folder / "media")
        assert row_media(media, load_tokenizer(folder / "model")) is not None
    if "Config.run_dir" in found:  # which is save.dir, or a name that is made
        found.add("SaveSettings.dir")
    return found & KEYS


def test_every_key_is_read(read_keys: set[str]) -> None:
    assert KEYS - read_keys == set()
