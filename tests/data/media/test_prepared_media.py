"""Prepared rows with media: items and types come back, and what changed is prepared again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.data.media.decoding import ABSENT, BROKEN, LINK, OUTSIDE
from megatrain.data.media.placed import media_of
from megatrain.data.media.processing import MediaSettings
from megatrain.data.media.store import MediaStore
from megatrain.data.rows.reading import JsonLine
from megatrain.data.tokens import prepare as prepare_module
from megatrain.data.tokens.documents import JoinedDocuments, Subset
from megatrain.data.tokens.encoding import TOO_LONG
from megatrain.data.tokens.mismatched import MismatchedDocuments
from megatrain.data.tokens.prepare import prepare
from megatrain.data.tokens.prepared import PreparedData
from megatrain.errors import DataError
from megatrain.media import digest_of_tensors
from testkit.processors import picture, save_pictures, save_processor


@dataclass(frozen=True)
class Reader:
    """A processor, and how rows are read with it."""

    settings: MediaSettings
    tokenizer: Any

    @property
    def image_token(self) -> int:
        return int(self.tokenizer.convert_tokens_to_ids("<|image_pad|>"))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    folder = tmp_path_factory.mktemp("processor")
    processor = save_processor(folder, "qwen2_5_vl")
    return Reader(settings=MediaSettings(folder=folder), tokenizer=processor.tokenizer)


def _row(*names: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": "what is two", "completion": "four", "images": list(names), **more}


def _prepare(folder: Path, rows: list[Any], reader: Reader, **how: Any) -> PreparedData:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"max_length": 64, "max_bad": 1.0, "cache_dir": folder / "cache", **how}
    return prepare(path, reader.tokenizer, media=reader.settings, **settings)


def test_documents_have_their_media(tmp_path: Path, reader: Reader) -> None:
    names = save_pictures(tmp_path, 3)
    rows = [_row(names[0]), _row(), _row(names[1], names[0]), _row("../x.png"), _row("gone.png"),
            _row("http://127.0.0.1/x.png"), _row("rows.jsonl"), _row(names[2])]  # fmt: skip
    prepared = _prepare(tmp_path, rows, reader)
    assert prepared.card["bad"] == {OUTSIDE: 1, ABSENT: 1, LINK: 1, BROKEN: 1}
    assert (prepared.card["media"], prepared.card["media_items"]) == ({"image": 4}, 3)
    store = MediaStore([prepared], reader.settings, reader.tokenizer)
    first, second, third = (item.digest for item in prepared.media_items)
    found = [prepared.media(number) for number in range(4)]
    assert [one and one.digests for one in found] == [
        (first,), None, (second, first), (third,),
    ]  # fmt: skip
    token = reader.image_token
    for number, one in enumerate(found):
        ids, trained = prepared.tokens(number)
        types = np.zeros(len(ids)) if one is None else one.token_types
        assert np.array_equal(types == 1, ids == token)
        assert not trained[ids == token].any()
        if one is not None:
            assert all(ids[begin] == token for begin in one.begins)
    item = store.read(second)
    assert item.digest == second == digest_of_tensors("image", item.tensors)
    assert set(item.tensors) == {"pixel_values", "image_grid_thw"}


def test_parts_of_the_data_keep_the_media(tmp_path: Path, reader: Reader) -> None:
    names = save_pictures(tmp_path, 3)
    marks = {"label": True}
    prepared = _prepare(tmp_path, [_row(name, **marks) for name in names], reader, wanted="kto")
    digests = [item.digest for item in prepared.media_items]

    def of(documents: Any, number: int) -> tuple[str, ...]:
        found = media_of(documents, number)
        assert found is not None
        assert len(found.token_types) == documents.lengths[number]
        assert np.array_equal(
            found.token_types == 1, documents.tokens(number)[0] == reader.image_token
        )
        return found.digests

    assert of(Subset(prepared, np.array([2, 0])), 0) == (digests[2],)
    assert of(JoinedDocuments([prepared, prepared]), 4) == (digests[1],)
    mismatched = MismatchedDocuments(prepared, 64)
    assert [of(mismatched, number) for number in range(6)] == [
        (one,) for one in digests for _ in "ab"
    ]


def test_bytes_in_rows_are_kept_and_a_changed_file_is_noticed(
    tmp_path: Path, reader: Reader
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.png").write_bytes(picture(1))
    held = [{"bytes": picture(2), "path": None}, {"bytes": None, "path": "a.png"}]
    rows = [_row(one) for one in held] * 2
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    how: dict[str, Any] = {"media": reader.settings, "max_length": 64}
    how["cache_dir"] = tmp_path / "cache"
    prepared = prepare(tmp_path / "rows.parquet", reader.tokenizer, **how)
    assert (prepared.folder / "media.bin").read_bytes() == picture(2)
    digest = prepared.card["digest"]
    again = prepare(tmp_path / "rows.parquet", reader.tokenizer, **how)
    assert (again.folder, again.card["digest"]) == (prepared.folder, digest)
    (tmp_path / "a.png").write_bytes(picture(3))
    store = MediaStore([prepared], reader.settings, reader.tokenizer)
    with pytest.raises(DataError, match=r"a\.png has changed"):
        store.read(prepared.media_items[1].digest)
    changed = prepare(tmp_path / "rows.parquet", reader.tokenizer, **how)
    assert changed.card["digest"] != digest


def test_a_medium_is_never_cut(tmp_path: Path, reader: Reader) -> None:
    names = save_pictures(tmp_path, 1)
    asked = [{"type": "text", "text": "two " * 60}, {"type": "image"}]
    late = [{"role": "user", "content": asked}, {"role": "assistant", "content": "four"}]
    early = {"prompt": "two", "completion": "six " * 60, "images": names}
    rows = [{"messages": late, "images": names}, early]
    how: dict[str, Any] = {"overlong": "truncate", "max_dropped": 1.0, "max_length": 48}
    for row, is_kept in zip(rows, (False, True), strict=True):
        if not is_kept:
            with pytest.raises(DataError, match=TOO_LONG):
                _prepare(tmp_path, [row], reader, **how)
            continue
        prepared = _prepare(tmp_path, [row], reader, **how)
        media = prepared.media(0)
        assert media is not None
        assert (int(prepared.lengths[0]), int((media.token_types == 1).sum())) == (48, 4)


@pytest.mark.parametrize("is_line", [True, False])
def test_a_chunk_has_few_media(is_line: bool) -> None:
    row = _row("a.png", "b.png")
    rows = [("", JsonLine(json.dumps(row)) if is_line else row)] * 100
    sizes = [len(chunk) for chunk in prepare_module._chunks(rows)]
    assert (sum(sizes), max(sizes) <= 16) == (100, True)
    text = [("", JsonLine('{"text": "an image"}'))] * 100
    assert [len(chunk) for chunk in prepare_module._chunks(text)] == [100]


@pytest.mark.merge
def test_any_number_of_processes_gives_the_same(tmp_path: Path, reader: Reader) -> None:
    names = save_pictures(tmp_path, 4)
    rows = [_row(names[n % 4], names[(n + 1) % 4]) for n in range(6)]
    one, two = (
        _prepare(tmp_path, rows, reader, cache_dir=tmp_path / str(count), num_workers=count)
        for count in (1, 2)
    )
    assert one.card["digest"] == two.card["digest"]
