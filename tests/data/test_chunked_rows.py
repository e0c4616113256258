"""Token files in a config: held out, mixed by tokens, and trained on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.cli.demo import byte_tokenizer
from megatrain.config import Config
from megatrain.data.chunked_rows import ChunkedRows, gather_chunks
from megatrain.data.chunks import token_files
from megatrain.data.chunks.choice import is_chunked
from megatrain.data.training_rows import gather
from megatrain.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})  # no other processes
    monkeypatch.setattr(token_files, "_CHUNK_TOKENS", 128)


def _tokens(path: Path, count: int, token: int) -> dict[str, Any]:
    """A file of one token, with an end after each 32."""
    ids = np.full(count, token, dtype=np.uint16)
    ids[31::32] = 1
    ids.tofile(path)
    return {"path": str(path), "dtype": "uint16"}


def _config(train: Any, **data: Any) -> Config:
    values = {"model": {"name_or_path": "none"}, "data": {"train": train, "max_length": 64, **data},
              "train": {"steps": 4, "batch_tokens": 256}}  # fmt: skip
    return Config.model_validate(values)


def _rows(config: Config) -> ChunkedRows:
    return gather_chunks(config, byte_tokenizer(), {})


def _epoch_tokens(rows: ChunkedRows) -> dict[int, int]:
    """Tokens of an epoch by the first token of their document."""
    found: dict[int, int] = {}
    for chunk in rows.order.rows(0, 0, rows.order.size):
        for number in rows.train.numbers(int(chunk)):
            ids, _ = rows.train.tokens(int(number))
            found[int(ids[0])] = found.get(int(ids[0]), 0) + len(ids)
    rows.close()
    return found


def test_a_fraction_is_held_out_of_each_source(tmp_path: Path) -> None:
    train = [_tokens(tmp_path / f"{token}.bin", 12800, token) for token in (40, 50)]
    rows = _rows(_config(train, eval=0.05))
    assert rows.held_names == ("40", "50")
    held = [sum(part.lengths) for part in rows.held]
    assert held == [5 * 128, 5 * 128]
    assert _epoch_tokens(rows) == {40: 95 * 128, 50: 95 * 128}
    whole = _rows(_config(train, eval=0.001))
    assert whole.held == ()
    assert _epoch_tokens(whole) == {40: 12800, 50: 12800}
    assert whole.held_names == ()
    few = _rows(_config([_tokens(tmp_path / "c.bin", 256, 60), *train], eval=0.05))
    assert few.held_names == ("40", "50")  # none of the first one's two chunks
    with pytest.raises(DataError, match="2 chunks are too few to hold out 2 of them"):
        _rows(_config(_tokens(tmp_path / "few.bin", 256, 40), eval=0.9))


@pytest.mark.parametrize("kind", ["chunks", "rows"])
def test_shares_divide_the_tokens_of_an_epoch(tmp_path: Path, kind: str) -> None:
    """Rows of one source are ten times as long as those of the other."""
    shares = {"share": 3}, {"share": 1}
    if kind == "chunks":
        train = [_tokens(tmp_path / "a.bin", 25600, 40), _tokens(tmp_path / "b.bin", 12800, 50)]
        rows = _rows(_config([{**one, **share} for one, share in zip(train, shares, strict=True)]))
        found = _epoch_tokens(rows)
        first, second = found[40], found[50]
    else:
        for name, count in (("a", 4), ("b", 40)):
            lines = [json.dumps({"input_ids": [40] * count}) + "\n" for _ in range(400)]
            (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        sources = [{"path": str(tmp_path / f"{name}.jsonl"), **share}
                   for name, share in zip("ab", shares, strict=True)]  # fmt: skip
        prepared = gather(_config(sources), byte_tokenizer())
        lengths = prepared.train.lengths[prepared.order.rows(0, 0, prepared.order.size)]
        first, second = int(lengths[lengths == 4].sum()), int(lengths[lengths == 40].sum())
    assert first / second == pytest.approx(3, rel=0.02)
    total = {"chunks": 38400, "rows": 17600}[kind]
    assert first + second == pytest.approx(total, rel=0.02)  # as many as there are


def test_prepared_rows_may_be_mixed_in(tmp_path: Path) -> None:
    rows = [{"input_ids": [60, 61, 62], "labels": [-100, 61, 62]} for _ in range(300)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = [_tokens(tmp_path / "a.bin", 1280, 40), str(tmp_path / "rows.jsonl")]
    mixed = _rows(_config(train, eval=str(tmp_path / "rows.jsonl")))
    last = int(mixed.train.numbers(mixed.order.size - 1)[0])
    ids, trained = mixed.train.tokens(last)
    assert (ids.tolist(), trained.tolist()) == ([60, 61, 62], [False, True, True])
    assert len(mixed.held[0].lengths) == 300
    assert _epoch_tokens(mixed) == {40: 1280, 60: 900}


def test_what_needs_all_rows_is_refused(tmp_path: Path) -> None:
    train = _tokens(tmp_path / "a.bin", 1280, 40)
    assert is_chunked(_config(train))
    with pytest.raises(ConfigError, match="split of this source mean nothing"):
        _rows(_config({**train, "split": "train[:10]"}))
    by_rows = _config(train).model_dump() | {"train": {"steps": 4, "batch_rows": 8}}
    with pytest.raises(ConfigError, match=r"train.batch_rows is 8, and .* is read in chunks"):
        _rows(Config.model_validate(by_rows))
    compared = _config(train).model_dump() | {"loss": {"name": "dpo"}}
    with pytest.raises(ConfigError, match=r"loss.name is dpo, which needs all rows before"):
        _rows(Config.model_validate(compared))
    with pytest.raises(ConfigError, match="has no share, and other sources have one"):
        _config([{**train, "share": 1}, train])
    with pytest.raises(ConfigError, match="has share 1 and weight 2"):
        _config([{**train, "share": 1, "weight": 2}])
