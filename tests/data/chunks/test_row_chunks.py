"""Rows in chunks are the rows that are prepared before a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli.demo import byte_tokenizer
from megatrain.config import Config
from megatrain.data import chunked_rows
from megatrain.data.chunked_rows import gather_chunks
from megatrain.data.chunks import choice, row_chunks
from megatrain.data.chunks.choice import is_chunked
from megatrain.data.chunks.chunks import ChunkSource
from megatrain.data.steps.steps import Position, Steps
from megatrain.data.tokens import prepare as prepare_module
from megatrain.data.training_rows import gather
from megatrain.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})  # no other processes
    monkeypatch.setattr(prepare_module, "probe_template", lambda *arguments: None)
    monkeypatch.setattr(row_chunks, "_CHUNK_BYTES", 300)


def _rows(count: int = 90) -> list[dict[str, Any]]:
    return [{"text": f"row {number} " + "word " * (number * 7 % 40)} for number in range(count)]


def _config(path: Path, *, prepare: str = "during", **data: Any) -> Config:
    values = {"model": {"name_or_path": "none"}, "train": {"steps": 4, "batch_tokens": 512},
              "data": {"train": str(path), "max_length": 128, "overlong": "split",
                       "prepare": prepare, **data}}  # fmt: skip
    return Config.model_validate(values)


def _documents(source: ChunkSource) -> list[tuple[list[int], list[bool]]]:
    found = []
    for number in range(source.num_chunks):
        chunk = source.read(number)
        for document in range(len(chunk.lengths)):
            ids, trained = chunk.tokens(document)
            found.append((ids.tolist(), trained.tolist()))
    source.close()
    return found


def _prepared(path: Path) -> list[tuple[list[int], list[bool]]]:
    (source,) = gather(_config(path, prepare="first"), byte_tokenizer()).sources
    found = [source.tokens(number) for number in range(len(source.lengths))]
    return [(ids.tolist(), trained.tolist()) for ids, trained in found]


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        import pyarrow as pa
        from pyarrow.parquet import write_table

        write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    elif path.suffix == ".txt":
        path.write_text("\n\n".join(row["text"] for row in rows))  # the last line has no end
    else:
        path.write_text("".join(json.dumps(row) + "\r\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".txt", ".parquet"])
def test_chunks_have_the_documents_of_prepared_rows(tmp_path: Path, suffix: str) -> None:
    path = _write(tmp_path / f"rows{suffix}", _rows())
    (source,) = gather_chunks(_config(path), byte_tokenizer(), {}).sources
    assert source.num_chunks > 10
    assert _documents(source) == _prepared(path)
    counted = sum(len(ids) for ids, _ in _prepared(path))
    assert source.num_tokens == pytest.approx(counted, rel=0.6)


@pytest.mark.parametrize("begin", range(295, 306))
def test_a_line_belongs_to_the_chunk_that_it_begins_in(tmp_path: Path, begin: int) -> None:
    """Lines of every length end before, at and after the border; some are longer than a chunk."""
    texts = ["a" * (begin - 1), "b" * 5, "c" * 700, "d", "e" * 299]
    (tmp_path / "rows.txt").write_text("\n".join(texts) + "\n")
    part = row_chunks._part_of(tmp_path / "rows.txt")
    found: list[Any] = [value for n in range(part.num_chunks) for _, value in part.rows(n)]
    assert [value["text"] for value in found] == texts


def test_conversations_keep_their_masks(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{n}?"},
                          {"role": "assistant", "content": "yes" * (n % 5 + 1)}]}
            for n in range(40)]  # fmt: skip
    path = _write(tmp_path / "rows.jsonl", rows)
    (source,) = gather_chunks(_config(path), byte_tokenizer(), {}).sources
    documents = _documents(source)
    assert documents == _prepared(path)
    assert any(not all(trained) for _, trained in documents)


def test_too_many_bad_rows_end_the_run(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [*_rows(200), *({"text": None} for _ in range(20))]
    path = _write(tmp_path / "rows.jsonl", rows)
    (source,) = gather_chunks(_config(path, max_bad=0.2), byte_tokenizer(), {}).sources
    assert _documents(source) == _prepared_without(path, tmp_path)
    (source,) = gather_chunks(_config(path), byte_tokenizer(), {}).sources
    with pytest.raises(DataError, match=r"rows cannot be used(.|\n)*null: rows.jsonl:byte \d+"):
        _documents(source)
    source.require_below(300)
    with pytest.raises(DataError, match=r"rows.jsonl:byte \d+ has token id"):
        source.require_below(50)


def test_bad_rows_at_the_beginning_are_a_share_of_the_whole_file(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [*({"text": None} for _ in range(20)), *_rows(200)]
    path = _write(tmp_path / "rows.jsonl", rows)
    (source,) = gather_chunks(_config(path, max_bad=0.2), byte_tokenizer(), {}).sources
    assert _documents(source) == _prepared_without(path, tmp_path)


def _prepared_without(path: Path, folder: Path) -> list[tuple[list[int], list[bool]]]:
    good = [line for line in path.read_text().splitlines() if "null" not in line]
    (folder / "good.jsonl").write_text("\n".join(good))
    return _prepared(folder / "good.jsonl")


def test_a_resumed_run_tokenizes_its_window_alone(tmp_path: Path) -> None:
    path = _write(tmp_path / "rows.jsonl", _rows(600))

    def opened() -> tuple[Any, Steps]:
        rows = gather_chunks(_config(path), byte_tokenizer(), {})
        return rows, Steps(rows.train, rows.order, batch_tokens=512, micro_batch_tokens=512,
                           max_length=128, seed=1)  # fmt: skip

    rows, steps = opened()
    position = Position()
    while position.window < 2:
        _, position = steps.batch(position)
    expected = [micro.input_ids.tolist() for micro in steps.batch(position)[0]]
    rows.close()
    again, fresh = opened()
    found = fresh.batch(fresh.position(steps.state(position)))[0]
    assert [micro.input_ids.tolist() for micro in found] == expected
    again.close()
    path.write_text(path.read_text().replace("row 5 ", "row 6 "))
    other, changed = opened()
    with pytest.raises(DataError, match="the saved position belongs to other data"):
        changed.position(steps.state(position))
    other.close()


def test_large_files_of_a_run_of_steps_are_tokenized_during_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _write(tmp_path / "rows.jsonl", _rows())
    assert not is_chunked(_config(path, prepare="auto"))
    monkeypatch.setattr(choice, "LARGE_BYTES", 1000)
    assert is_chunked(_config(path, prepare="auto"))
    assert not is_chunked(_config(path, prepare="first"))
    by_epochs = _config(path, prepare="auto").model_dump() | {"train": {"epochs": 1}}
    assert not is_chunked(Config.model_validate(by_epochs))
    by_epochs["data"]["prepare"] = "during"
    with pytest.raises(ConfigError, match=r"rows.jsonl cannot be tokenized while the run goes on"):
        is_chunked(Config.model_validate(by_epochs))


@pytest.mark.merge
def test_other_processes_give_the_same_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_rows, "num_cores", lambda: 2)
    path = _write(tmp_path / "rows.jsonl", _rows())
    (source,) = gather_chunks(_config(path), byte_tokenizer(), {}).sources
    assert _documents(source) == _prepared(path)
