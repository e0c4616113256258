"""A migrated run takes as many steps as the tool it came from, by that tool's own arithmetic.

LLaMA-Factory, Axolotl and TRL all train with the Trainer of transformers:

    batches per epoch   ceil(rows / (rows per device x devices))
    steps per epoch     ceil(batches / accumulation)
    steps               max_steps, or ceil(epochs x steps per epoch)

and hold out ceil(fraction x rows) of the rows, as datasets.train_test_split does.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatrain.config import Config
from megatrain.config.other_tools.tool_config import Tool
from megatrain.config.other_tools.translate import migrate_document
from megatrain.config.yaml_reader import Document
from megatrain.data.steps.order import MixedOrder
from megatrain.data.steps.steps import Steps
from megatrain.data.tokens.documents import hold_out, num_rows
from testkit.made_documents import MadeDocuments

LENGTH = 30
"""Tokens of a row, far below every limit: what is packed or not decides how many make a step."""


def theirs(
    rows: int, *, per_device: int, accumulated: int = 1, gpus: int = 1, epochs: float = 1.0,
    max_steps: int = -1, held_out: float = 0.0,
) -> int:  # fmt: skip
    if max_steps > 0:
        return max_steps
    rows -= math.ceil(held_out * rows)
    batches = math.ceil(math.ceil(rows / per_device) / gpus)
    return math.ceil(epochs * max(math.ceil(batches / accumulated), 1))


def ours(config: Config, rows: int, length: int = LENGTH) -> int:
    """The steps of a run on so many rows, counted as the trainer counts them."""
    documents: Any = MadeDocuments([length] * rows)
    if isinstance(config.data.eval, float):
        documents, _ = hold_out(documents, config.data.eval, 0)
    batch_tokens = config.train.batch_tokens
    assert batch_tokens != "auto", "a batch size of another tool is a number"
    steps = Steps(
        documents,
        MixedOrder([num_rows(documents)], [1.0], 0),
        batch_tokens=batch_tokens,
        batch_rows=config.train.batch_rows,
        micro_batch_tokens=config.data.max_length,
        max_length=config.data.max_length,
        packing=bool(config.data.packing),
    )
    return config.train.steps or math.ceil(steps.count() * (config.train.epochs or 1))


def migrated(tool: Tool, values: dict[str, Any], gpus: int = 1) -> Config:
    all_sources: dict[Tool, dict[str, Any]] = {
               "LLaMA-Factory": {"dataset": "rows", "dataset_dir": "ONLINE"},
               "Axolotl": {"datasets": [{"path": "rows.jsonl"}]},
               "TRL": {"dataset_name": "someone/rows"}}  # fmt: skip
    model = {"Axolotl": {"base_model": "m"}}.get(tool, {"model_name_or_path": "m"})
    document = Document(name="x.yaml", value=model | all_sources[tool] | values)
    known = {"trainer": "sft"} if tool == "TRL" else {}
    return Config(**migrate_document(document, tool, num_gpus=gpus, **known).config)


CASES: list[tuple[Tool, dict[str, Any], dict[str, Any]]] = [
    ("TRL", {}, {"per_device": 8, "epochs": 3}),
    ("TRL", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4,
             "num_train_epochs": 1}, {"per_device": 2, "accumulated": 4}),
    ("TRL", {"per_device_train_batch_size": 1, "num_train_epochs": 2.5},
     {"per_device": 1, "epochs": 2.5}),
    ("TRL", {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
             "num_train_epochs": 1}, {"per_device": 4, "accumulated": 2, "gpus": 4}),
    ("TRL", {"max_steps": 17}, {"per_device": 8, "max_steps": 17}),
    ("TRL", {"max_steps": -1, "num_train_epochs": None, "per_device_train_batch_size": None},
     {"per_device": 8, "epochs": 3}),
    ("LLaMA-Factory", {}, {"per_device": 8, "epochs": 3}),
    ("LLaMA-Factory", {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8,
                       "num_train_epochs": 3.0, "cutoff_len": 2048, "val_size": 0.1},
     {"per_device": 1, "accumulated": 8, "epochs": 3, "held_out": 0.1}),
    ("LLaMA-Factory", {"per_device_train_batch_size": 2, "num_train_epochs": 0.3, "packing": False},
     {"per_device": 2, "epochs": 0.3}),
    ("LLaMA-Factory", {"per_device_train_batch_size": 2, "val_size": 0.07},
     {"per_device": 2, "epochs": 3, "gpus": 2, "held_out": 0.07}),
    ("Axolotl", {}, {"per_device": 1}),
    ("Axolotl", {"micro_batch_size": 2, "gradient_accumulation_steps": 3, "num_epochs": 4},
     {"per_device": 2, "accumulated": 3, "epochs": 4}),
    ("Axolotl", {"micro_batch_size": 2, "val_set_size": 0.05, "num_epochs": 2,
                 "sample_packing": False, "sequence_len": 4096},
     {"per_device": 2, "epochs": 2, "held_out": 0.05}),
    ("Axolotl", {"micro_batch_size": 4, "max_steps": 9, "num_epochs": 3},
     {"per_device": 4, "max_steps": 9}),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "values", "formula"), CASES)
@pytest.mark.parametrize("rows", [7, 64, 100, 333])
def test_a_migrated_run_takes_as_many_steps(
    tool: Tool, values: dict[str, Any], formula: dict[str, Any], rows: int
) -> None:
    config = migrated(tool, values, formula.get("gpus", 1))
    assert ours(config, rows) == theirs(rows, **formula)


def test_a_batch_by_tokens_would_be_noticed() -> None:
    config = migrated("TRL", {"per_device_train_batch_size": 2})
    by_tokens = config.model_dump() | {
        "train": {"batch_tokens": 2 * 1024, "epochs": 3},
        "data": config.data.model_dump() | {"packing": True},
    }
    assert ours(Config(**by_tokens), 100) != theirs(100, per_device=2, epochs=3)


@pytest.mark.parametrize(
    ("tool", "values"),
    [
        ("TRL", {"packing": True, "max_length": 1024}),
        ("LLaMA-Factory", {"packing": True, "cutoff_len": 1024}),
        ("LLaMA-Factory", {"neat_packing": True, "cutoff_len": 1024}),
        ("LLaMA-Factory", {"stage": "pt", "cutoff_len": 1024}),
        ("Axolotl", {"sample_packing": True, "sequence_len": 1024, "micro_batch_size": 8,
                     "num_epochs": 3}),
    ],
)  # fmt: skip
def test_packed_rows_that_fill_their_sequences_take_as_many_steps(
    tool: Tool, values: dict[str, Any]
) -> None:
    """Four rows of 256 tokens fill a sequence of 1024, and eight sequences are a step."""
    config = migrated(tool, values)
    assert (config.train.batch_tokens, config.train.batch_rows) == (8 * 1024, None)
    assert ours(config, 320, length=256) == theirs(320 // 4, per_device=8, epochs=3) == 30
