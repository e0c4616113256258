"""Rows of the Hub: the split and configuration that was asked for, at one commit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from megatrain.data.rows.hub_rows import HubRows, located
from megatrain.data.rows.skipped import SkippedRows
from megatrain.data.rows.source import open_source
from megatrain.data.tokens.prepare import prepare
from megatrain.errors import ConfigError, DataError, HubError
from testkit.hub_on_loopback import Files, Hub, serving, use, use_for_datasets
from testkit.tokenizers_of_kinds import made

NAME = "acme/rows"
CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.jsonl}
  - {split: test, path: main/test.jsonl}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train.jsonl}
---
"""


def _lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def _gsm8k(*texts: str) -> Files:
    return {
        "README.md": CARD,
        "main/train.jsonl": _lines(*texts),
        "main/test.jsonl": _lines("test"),
        "socratic/train.jsonl": _lines("why"),
    }


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serving() as served:
        use(monkeypatch, served.url, str(tmp_path / "cache"))
        use_for_datasets(monkeypatch, served.url, tmp_path / "datasets")
        yield served


def _texts(where: object) -> list[Any]:
    assert isinstance(where, HubRows)
    return [value["text"] for _, value in where.values()]  # type: ignore[index]


def test_configuration_and_split_are_those_asked_for(hub: Hub) -> None:
    commit = hub.put(NAME, _gsm8k("a", "b"), "datasets")
    train = located(NAME, name="main")
    assert isinstance(train, HubRows)
    assert (str(train), train.commit) == (f"{NAME} main train", commit)
    assert _texts(train) == ["a", "b"]
    assert _texts(located(NAME, name="main", split="test")) == ["test"]
    assert _texts(located(NAME, name="socratic")) == ["why"]
    source = open_source(train)
    assert next(iter(source.values())) == (f"{NAME} main train:1", {"text": "a"})


def test_a_dataset_without_configurations_needs_only_its_id(hub: Hub) -> None:
    hub.put(NAME, {"train.jsonl": _lines("a")}, "datasets")
    assert _texts(open_source(NAME).hub) == ["a"]


def test_a_revision_stays_when_main_moves(hub: Hub) -> None:
    first = hub.put(NAME, _gsm8k("old"), "datasets")
    hub.put(NAME, _gsm8k("new"), "datasets")
    assert _texts(located(NAME, name="main")) == ["new"]
    assert _texts(located(NAME, name="main", revision=first)) == ["old"]


def test_the_card_names_the_commit_and_another_commit_is_prepared_apart(
    hub: Hub, tmp_path: Path
) -> None:
    def card(where: Any) -> tuple[Any, Path]:
        prepared = prepare(
            where,
            made(None, ["<eos>"], eos="<eos>"),
            cache_dir=tmp_path / "prepared",
            max_length=64,
            train_on="all",
        )
        return prepared.card, prepared.folder

    first = hub.put(NAME, _gsm8k("old"), "datasets")
    old, folder = card(located(NAME, name="main"))
    assert (old["commit"], old["source"]) == (first, f"{NAME} main train")
    hub.put(NAME, _gsm8k("new"), "datasets")
    assert card(located(NAME, name="main"))[1] != folder
    assert card(located(NAME, name="main", revision=first))[1] == folder


def test_what_is_missing_is_named(hub: Hub) -> None:
    hub.put(NAME, _gsm8k("a"), "datasets")
    with pytest.raises(DataError, match=r"among .*'main', 'socratic'.* Set it as `name`"):
        open_source(NAME)
    with pytest.raises(DataError, match=r"socratic test: .*test.*train"):
        open_source(located(NAME, name="socratic", split="test"))
    with pytest.raises(HubError, match=r"acme/none: .* the Hub has no dataset with this"):
        open_source("acme/none")


def test_scripts_are_not_run(hub: Hub) -> None:
    hub.put(NAME, {"rows.py": b"raise SystemExit", "README.md": b""}, "datasets")
    with pytest.raises(DataError, match="scripts are no longer supported"):
        open_source(NAME)


def test_without_network_the_cache_serves_what_it_has(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hub.put(NAME, _gsm8k("old"), "datasets")
    assert _texts(located(NAME, name="main")) == ["old"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached = located(NAME, name="main")
    assert isinstance(cached, HubRows)
    assert (cached.commit, cached.answers) == (first, False)
    assert _texts(cached) == ["old"]
    with pytest.raises(DataError, match=r"commit 0000.* is requested, the cache has"):
        open_source(located(NAME, name="main", revision="0" * 40))


def test_without_network_and_cache_one_sentence_says_what_to_do(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, "http://127.0.0.1:9", constants.HF_HUB_CACHE)  # nobody listens there
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("a retry waits"))
    with pytest.raises(DataError) as caught:
        open_source(NAME)
    assert "no such file here" in str(caught.value)
    assert f"`hf download --repo-type dataset {NAME}`" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().out == ""


def test_a_file_has_no_configuration_and_one_split(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(_lines("a"))
    assert located(path) == path
    with pytest.raises(ConfigError, match=r"a.jsonl is a local file, and name main only applies"):
        located(path, name="main")
    with pytest.raises(ConfigError, match=r"has one split, train, not test\. .*train\[:1000\]"):
        open_source(located(path, split="test"))
    with pytest.raises(ConfigError, match=r"split train\[1\]: give a name and perhaps a part"):
        open_source(located(path, split="train[1]"))


PARTS = ("train", "train[:2]", "train[3:]", "train[2:5]", "train[-2:]", "train[:-3]", "train[:25%]",
         "train[10%:60%]", "train[-30%:]", "train[5:99]")  # fmt: skip


@pytest.mark.parametrize("split", PARTS)
def test_a_part_is_that_of_datasets(hub: Hub, tmp_path: Path, split: str) -> None:
    texts = [f"row {number}" for number in range(11)]
    hub.put(NAME, {"train.jsonl": _lines(*texts)}, "datasets")
    expected = _texts(located(NAME, split=split))
    (tmp_path / "a.jsonl").write_bytes(_lines(*texts))
    source = open_source(located(tmp_path / "a.jsonl", split=split))
    assert [row.text for _, row in source.rows(SkippedRows())] == expected


def test_rows_are_the_first_of_a_dataset_too(hub: Hub) -> None:
    hub.put(NAME, {"train.jsonl": _lines("a", "b", "c")}, "datasets")
    source = open_source(located(NAME, split="train[1:]"), max_rows=1)
    assert [row.text for _, row in source.rows(SkippedRows())] == ["b"]
