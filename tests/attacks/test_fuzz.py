"""The short form of `python -m proofs.fuzz`: a few thousand inputs a target, and its power."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from megatrain.config.yaml_reader import Document
from megatrain.disk.checkpoint.manifest import FileRecord, Manifest
from proofs import fuzz as fuzzing
from proofs.fuzz import MAX_BYTES, MAX_SECONDS, TARGETS, fuzz

COUNTS = {
    "config": 1500, "index": 4000, "header": 6000, "yaml": 1500, "jsonl": 1000, "parquet": 1000,
    "manifest": 3000,
}  # fmt: skip


@pytest.mark.merge
@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.night)])
@pytest.mark.parametrize("target", COUNTS)
def test_whatever_the_input_only_errors_of_ours(target: str, share: int) -> None:
    count = COUNTS[target] // share
    result = fuzz(target, count)
    assert result.failures == []
    assert result.max_seconds < MAX_SECONDS
    assert result.extra_bytes < MAX_BYTES
    assert sum(result.outcomes.values()) == count
    # Neither all refused nor all accepted: the inputs reach beyond the first check.
    assert count / 50 < result.outcomes["accepted"] < count / 2
    assert set(COUNTS) == set(TARGETS)


def _trusting_index(data: bytes) -> Any:
    return json.loads(data)["weight_map"]


def _trusting_header(path: Path) -> Any:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def _trusting_yaml(data: bytes, name: str) -> Any:
    return Document(name=name, value=yaml.load(data, yaml.FullLoader))


class _TrustingSource:
    """Reads rows as a script would."""

    format = None

    def __init__(self, path: Path) -> None:
        self.path = path

    def values(self) -> Any:
        if self.path.suffix == ".parquet":
            return [("a:1", row) for row in pq.read_table(self.path).to_pylist()]
        return [("a:1", json.loads(line)) for line in self.path.read_text().splitlines()]

    def rows(self, skipped: Any) -> Any:
        return [(f"a:{n}", dict(row)) for n, (_, row) in enumerate(self.values())]


def _trusting_manifest(data: bytes, where: str) -> Any:
    fields = json.loads(data)
    return Manifest(
        step=fields["step"],
        model=fields["model"],
        training=fields["training"],
        files={name: FileRecord(**record) for name, record in fields["files"].items()},
    )


def _config_without_guard(data: bytes) -> Any:
    from transformers import CONFIG_MAPPING

    fields = json.loads(data)
    return CONFIG_MAPPING[fields["model_type"]].from_dict(fields)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("target", "reader", "trusting"),
    [
        ("index", "parse_index", _trusting_index),
        ("header", "read_entries", _trusting_header),
        ("config", "parse_config", _config_without_guard),
        ("yaml", "parse_document", _trusting_yaml),
        ("jsonl", "open_source", _TrustingSource),
        ("parquet", "open_source", _TrustingSource),
        ("manifest", "parse_manifest", _trusting_manifest),
    ],
)
def test_a_reader_that_trusts_would_be_noticed(
    target: str, reader: str, trusting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzzing, reader, trusting)
    assert len(fuzz(target, 60).failures) > 10
