"""A first config: made from a model and rows, read back, planned, and kept by a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatrain.choices import Method
from megatrain.cli.first_config import FirstConfig, first_config
from megatrain.config import load_config
from megatrain.errors import ConfigError, DataError, DoesNotFit, MegaTrainError
from megatrain.run.opening.recipe import ADAPTER_RATES, FINE_TUNING_RATE, PREFERENCE_RATE

MODEL = "Qwen/Qwen3-8B"
SMALL = "Qwen/Qwen3-0.6B"
ROWS: dict[str, dict[str, object]] = {
    "chat": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "pairs": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "marked": {"prompt": "a", "completion": "b", "label": True},
    "classes": {"prompt": "a", "completion": "b", "label": 1},
    "text": {"text": "a b c"},
}


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a file of each kind of rows."""
    monkeypatch.chdir(tmp_path)
    for name, row in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def _read_back(first: FirstConfig, folder: Path) -> object:
    (folder / "first.yaml").write_text(first.text())
    return load_config(folder / "first.yaml")


@pytest.mark.parametrize(
    ("method", "data", "words"),
    [
        ("sft", "chat.jsonl", []),
        ("lora", "[chat.jsonl, {path: chat.jsonl, weight: 2}]", ["train.batch_rows=8"]),
        ("pretrain", "text.jsonl", ["train.steps=5", "save.every=null", "memory.ram=3GB"]),
        ("kto", "marked.jsonl", ["log.to=[wandb]", "model.dtype=fp32", "data.eval=null"]),
        ("simpo", "{path: pairs.jsonl}", ["loss.beta=2.5", "lora.rank=8", "save.dir=a b"]),
    ],
)
def test_the_file_loads_as_the_config(
    rows: Path, method: Method, data: str, words: list[str]
) -> None:
    first = first_config(MODEL, data, method, words)
    assert _read_back(first, rows) == first.config
    text = first.text()
    assert text.startswith("# not planned"), "no machine is named"
    assert re.search(r"^  learning_rate: auto +# ", text, re.M)
    cut = FirstConfig(config=first.config, rows=first.rows)
    less = cut.text().replace("max_length: 2048", "max_length: 1024")
    (rows / "less.yaml").write_text(less)
    assert load_config(rows / "less.yaml") != first.config, "the file is what counts"


@pytest.mark.parametrize(
    ("data", "loss", "note"),
    [
        ("chat.jsonl", "next_token", ""),
        ("pairs.jsonl", "dpo", "--method is not given: pairs.jsonl has pairs of answers, so it is"),
        ("marked.jsonl", "kto", "has answers marked good or bad, so it is kto. --method sft"),
        ("classes.jsonl", "next_token", ""),
        ("text.jsonl", "next_token", "so it is pretrain: every token is trained"),
    ],
)
def test_rows_choose_a_method_and_a_note_says_so(
    rows: Path, data: str, loss: str, note: str
) -> None:
    notes: list[str] = []
    assert first_config(MODEL, data, None, [], notes.append).config.loss.name == loss
    assert note in "".join(notes)
    assert bool(notes) == bool(note)
    given: list[str] = []
    other: Method = "sft" if loss == "kto" else "ipo"
    first_config(MODEL, data, None if loss == "next_token" else other, [], given.append)
    assert given == ([] if loss != "next_token" else notes)


@pytest.mark.parametrize(
    ("method", "data", "words", "fault"),
    [
        ("lora", "pairs.jsonl", [], "one answer a row. Give --method dpo, and lora.rank=16."),
        ("dpo", "chat.jsonl", [], "needs the columns chosen and(?s:.)* Give --method sft."),
        ("pretrain", "chat.jsonl", [], "Give --method sft, with data.train_on=all"),
        ("sft", "missing.jsonl", [], "missing.jsonl"),
        (None, "ids.npy", [], "ids.npy has token ids: (?s:.)*docs/data.md#token-files"),
        ("sft", "chat.jsonl", ["train.epoch=2"], "Did you mean train.epochs"),
        ("sft", "chat.jsonl", ["data.train=text.jsonl"], "--data gives it already"),
        ("sft", "chat.jsonl", ["run.yaml"], "run.yaml is a file, and --model, --data and --method"),
        ("sft", "pairs.jsonl", ["loss.name=dpo"], "--method dpo"),
        (None, None, [], "--data is missing"),
    ],
)
def test_what_does_not_go_together_is_refused(
    rows: Path, method: Method | None, data: str | None, words: list[str], fault: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=fault):
        first_config(MODEL, data, method, words)


def test_the_method_grpo_is_answered_as_the_loss_is(rows: Path) -> None:
    """Also with all that it needs, which is in a file."""
    faults: list[str]
    lacks = {
        "train.batch_rows": [],
        "rewards": ["rewards=correct"],
        "run.yaml": ["train.batch_rows=8"],
    }
    for what, words in lacks.items():
        faults = []
        given: tuple[tuple[Method | None, list[str]], ...] = (("grpo", []), (None, ["loss=grpo"]))
        for method, loss in given:
            with pytest.raises(ConfigError) as fault:
                first_config(MODEL, "chat.jsonl", method, [*loss, *words])
            faults.append(str(fault.value))
        assert what in faults[0]
        assert faults[0] == faults[1]


def test_rows_are_looked_at_as_the_source_says(rows: Path) -> None:
    (rows / "good.csv").write_text("Frage,Gut,Schlecht\nhi,yes,no\n")
    source = "{path: good.csv, columns: {prompt: Frage, chosen: Gut, rejected: Schlecht}}"
    first = first_config(MODEL, source, None, [])
    assert first.config.loss.name == "dpo"
    assert _read_back(first, rows) == first.config
    with pytest.raises(DataError, match=r"good\.csv"):
        first_config(MODEL, "good.csv", None, [])


def test_a_short_name_becomes_that_of_the_hub_but_no_other_owner_does(rows: Path) -> None:
    notes: list[str] = []
    first = first_config("qwen3-8b", "chat.jsonl", None, [], notes.append)
    assert first.config.model.name_or_path == MODEL
    assert notes == [f"--model qwen3-8b is {MODEL} on the Hugging Face Hub"]
    with pytest.raises(MegaTrainError):  # the Hub is asked, and is not here
        first_config("somebody/Qwen3-8B", "chat.jsonl", None, [])


def test_the_verdict_is_the_first_comment(rows: Path) -> None:
    first = first_config(SMALL, "chat.jsonl", "lora", []).planned("4090", "32GB")
    lines = first.text().splitlines()
    assert re.match(
        r"# fits: [\d.]+k? to [\d.]+k? tok/s, predicted; host .* of 29\.4 GiB, device", lines[0]
    )
    assert lines[1] == "# on RTX 4090 with 32GB (published, not measured)"
    assert _read_back(first, rows) == first.config


@pytest.mark.merge
def test_a_run_that_does_not_fit_is_refused_with_ways_that_do(rows: Path) -> None:
    with pytest.raises(DoesNotFit, match="does not fit: host memory") as error:
        first_config(SMALL, "chat.jsonl", None, []).planned("4090", "4GB")
    (word,) = re.findall(r"^  (lora\.rank=\d+) ", str(error.value), re.M)
    first_config(SMALL, "chat.jsonl", None, [word]).planned("4090", "4GB")


def test_the_comment_has_the_rates_that_auto_means(rows: Path) -> None:
    rates = (FINE_TUNING_RATE, ADAPTER_RATES[FINE_TUNING_RATE])
    assert pytest.approx(FINE_TUNING_RATE / 10) == PREFERENCE_RATE
    said = "auto: 1e-5; 1e-4 for adapters; preferences a tenth of these"
    assert said in first_config(MODEL, "chat.jsonl", None, []).text()
    assert [f"{rate:.0e}".replace("e-0", "e-") for rate in rates] == ["1e-5", "1e-4"]
