"""Runs on preferences: the reference is computed once, and resuming changes no bit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli.exporting import export_model
from megatrain.cli.verbs import evaluate_model, look_at_data
from megatrain.config import Config
from megatrain.errors import ConfigError, DataError, Interrupted
from megatrain.run.evaluation import references
from megatrain.run.trainer import Trainer
from testkit.runs import State, differences, lines_of, run

pytestmark = pytest.mark.usefixtures("cache_in_world")


@pytest.fixture(scope="module")
def rows(world: Path) -> Path:
    """A folder with pairs, and with the same answers one by one."""
    pairs = [
        {"prompt": f"{n} + 7 =", "chosen": str(n + 7), "rejected": str(7 * n + 1)}
        for n in range(2, 26)
    ]
    marked = [
        {"prompt": row["prompt"], "completion": row[kind], "label": kind == "chosen"}
        for row in pairs
        for kind in ("chosen", "rejected")
    ]
    for name, made in (("pairs", pairs), ("kto", marked)):
        text = "".join(json.dumps(row) + "\n" for row in made)
        (world / f"{name}.jsonl").write_text(text)
    return world


def config_of(rows: Path, at: Path, loss: str | dict[str, Any], format: str = "pairs") -> Config:
    return Config.model_validate(
        {
            "model": {"name_or_path": str(rows / "model-0.0"), "dtype": "fp32"},
            "data": {
                "train": {"path": str(rows / f"{format}.jsonl"), "format": format},
                "eval": 0.25,
                "max_length": 64,
            },
            "loss": loss,
            "train": {"steps": 4, "batch_rows": 6, "micro_batch_tokens": 128},
            "optim": {"learning_rate": 1e-2, "warmup": 0},
            "memory": {"device": "cpu"},
            "eval": {"every": 2, "samples": 1},
            "save": {"dir": str(at), "every": 2},
            "log": {"every": 100},
        }
    )


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of documents of each reference pass."""
    found: list[int] = []
    real = references.compute_references

    def counted(engine: Any, documents: Any, *given: Any, **named: Any) -> Any:
        found.append(len(documents.lengths))
        return real(engine, documents, *given, **named)

    monkeypatch.setattr(references, "compute_references", counted)
    return found


def forget_references(rows: Path) -> None:
    for path in rows.rglob("references-*.bin"):
        path.unlink()


def whole_run(config: Config, at: Path) -> tuple[State, Path]:
    ended = run(config)
    assert ended is not None
    return ended, at


@pytest.mark.merge
@pytest.mark.parametrize(("loss", "format"), [("dpo", "pairs"), ("kto", "kto")])
def test_a_second_and_a_resumed_run_have_the_bits_of_the_first_without_a_pass(
    loss: str, format: str, rows: Path, tmp_path: Path, passes: list[int]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    forget_references(rows)  # of another test
    expected = whole_run(config_of(rows, first, loss, format), first)
    assert passes == [48 if format == "pairs" else 96]  # with the rows to evaluate on
    with pytest.raises(Interrupted):
        run(config_of(rows, second, loss, format), stop=2)
    forget_references(rows)  # the cache may go while a run rests
    ended = run(config_of(rows, second, loss, format), resume=True)
    assert len(passes) == 1
    assert differences(rows, ended, second, expected) == []


def test_a_resumed_run_that_lost_its_references_is_refused(rows: Path, tmp_path: Path) -> None:
    config = config_of(rows, tmp_path / "run", "ipo")
    with pytest.raises(Interrupted):
        run(config, stop=2)
    (tmp_path / "run" / references.REFERENCES_FILE).unlink()
    with pytest.raises(DataError, match="reference log-probabilities of the run are missing"):
        Trainer(config)


def test_marked_rows_are_shown_and_judged_by_what_they_train(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`data` shows them as `train --data` reads them; `eval` says that its loss is another one."""
    path = rows / "kto.jsonl"
    look_at_data(path, rows / "model-0.0", 64, 1)
    shown = capsys.readouterr().out
    assert "trains on them by kto" in shown
    assert "row 0, desirable" in shown
    look_at_data(path, rows / "model-0.0", 64, 1, "prompt_completion")
    assert "desirable" not in capsys.readouterr().out
    run(config_of(rows, tmp_path / "run", "kto", "kto"))
    last = [line for line in lines_of(tmp_path / "run") if "eval_loss" in line][-1]
    said = evaluate_model(tmp_path / "run", path, 8).splitlines()
    assert said[-2].startswith("loss ")
    assert said[-1].endswith(f"that of kto, {last['eval_loss']:.4f} after step 4")


def test_figures_are_reported_and_the_model_learns_to_prefer(rows: Path, tmp_path: Path) -> None:
    config = config_of(rows, tmp_path / "run", {"name": "dpo", "beta": 0.5})
    run(config)
    lines = lines_of(tmp_path / "run")
    steps = [line for line in lines if "loss" in line]
    evaluated = [line for line in lines if "eval_loss" in line]
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)  # it is its own reference
    assert steps[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert evaluated[0]["eval_loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert steps[-1]["rewards/margins"] > 0.1  # of rows that it has seen
    assert steps[-1]["loss"] < steps[0]["loss"]
    names = {"chosen", "rejected", "margins", "accuracies"}
    assert {f"rewards/{name}" for name in names} <= steps[-1].keys()
    assert {f"eval_rewards/{name}" for name in names} <= evaluated[-1].keys()
    assert "eval_perplexity" not in evaluated[-1]


@pytest.mark.parametrize(
    ("loss", "format", "message"),
    [
        ("next_token", "pairs", "loss.name is next_token, and .* Set loss.name to dpo or ipo or"),
        ("kto", "pairs", "loss.name is kto, .* Give rows of format kto"),
        ("dpo", "kto", "loss.name is dpo, .* Give rows of format pairs .* or set loss.name to kto"),
    ],
)
def test_rows_that_do_not_fit_the_loss_are_refused(
    loss: str, format: str, message: str, rows: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(config_of(rows, tmp_path / "run", loss, format))


def test_eval_refuses_rows_of_preferences(rows: Path) -> None:
    with pytest.raises(ConfigError, match="of such a run"):
        evaluate_model(rows / "model-0.0", rows / "pairs.jsonl", None)


def with_lora(config: Config, lora: dict[str, Any]) -> Config:
    return Config.model_validate(config.model_dump(exclude_unset=True) | {"lora": lora})


def test_the_reference_of_new_adapters_is_the_base_under_them(rows: Path, tmp_path: Path) -> None:
    whole, adapted = tmp_path / "whole", tmp_path / "adapted"
    lora = {"rank": 4, "targets": ["q_proj", "down_proj"]}
    for config in (config_of(rows, whole, "dpo"), with_lora(config_of(rows, adapted, "dpo"), lora)):
        with Trainer(config):
            pass  # the pass is part of opening
    found = [(at / references.REFERENCES_FILE).read_bytes() for at in (whole, adapted)]
    assert found[0] == found[1]


def test_references_of_adapters_that_weigh_otherwise_are_others(
    rows: Path, tmp_path: Path, passes: list[int]
) -> None:
    """Adapters that are trained on are part of the reference, and so is their scale."""
    lora = {"rank": 4, "targets": ["q_proj", "down_proj"]}
    begun = tmp_path / "begun"
    run(with_lora(config_of(rows, begun, "simpo"), lora))
    found: list[bytes] = []
    for alpha in (8, 16, 16):
        adapters, at = (tmp_path / f"{what}-{len(found)}" for what in ("adapters", "run"))
        export_model(begun, adapters)
        (adapters / "megatrain.json").unlink()  # the folder is changed on purpose
        about = adapters / "adapter_config.json"
        about.write_text(json.dumps({**json.loads(about.read_text()), "lora_alpha": alpha}))
        with Trainer(with_lora(config_of(rows, at, "dpo"), {"path": str(adapters)})):
            pass
        found.append((at / references.REFERENCES_FILE).read_bytes())
    assert len(passes) == 2
    assert found[0] != found[1] == found[2]
