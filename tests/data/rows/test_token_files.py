"""Token files: every id is in a row, and nothing is read as what it is not."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.cli.demo import byte_tokenizer
from megatrain.config import Config
from megatrain.data.rows import token_files
from megatrain.data.rows.token_files import TokenFiles
from megatrain.data.training_rows import TrainingRows, gather
from megatrain.errors import ConfigError, DataError

END = 1


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})  # no other processes
    monkeypatch.setattr(token_files, "_SPAN_TOKENS", 100)


def _ids(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    drawn = np.random.default_rng(seed)
    ids = drawn.integers(2, 200, count)
    ids[drawn.random(count) < 0.1] = END
    return ids


def _rows(path: Path, dtype: str | None = None, end: int | None = END) -> list[list[int]]:
    found = TokenFiles(path=str(path), dtype=dtype, end=end, max_length=16)
    values: list[Any] = [value for _, value in found.values(lambda num_bytes: None)]
    return [value["input_ids"].tolist() for value in values]


def _expected(ids: list[int], end: int | None = END, width: int = 10**9) -> list[list[int]]:
    """The rows, put together token by token."""
    found: list[list[int]] = [[]]
    for number, token in enumerate(ids):
        if number % width == 0 or len(found[-1]) == 16 or found[-1][-1:] == [end]:
            found.append([])
        found[-1].append(token)
    return [document for document in found if len(document) > 1]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32"])
def test_every_token_is_in_a_row(tmp_path: Path, dtype: str) -> None:
    ids = _ids(1000)
    ids.astype(dtype).tofile(tmp_path / "a.bin")
    assert _rows(tmp_path / "a.bin", dtype) == _expected(ids.tolist())
    assert _rows(tmp_path / "a.bin", dtype, end=None) == _expected(ids.tolist(), None)


def test_arrays_of_numpy_say_their_own_dtype(tmp_path: Path) -> None:
    ids = _ids(960)
    np.save(tmp_path / "a.npy", ids.astype(np.uint16))
    assert _rows(tmp_path / "a.npy") == _expected(ids.tolist())
    np.save(tmp_path / "b.npy", ids.reshape(-1, 20))  # a row is a document, or several
    assert _rows(tmp_path / "b.npy", end=None) == _expected(ids.tolist(), None, width=20)
    assert _rows(tmp_path / "b.npy") == _expected(ids.tolist(), width=20)
    with pytest.raises(ConfigError, match=r"has ids of uint16, and dtype of this source is uint32"):
        _rows(tmp_path / "a.npy", "uint32")
    np.save(tmp_path / "c.npy", np.zeros(4))
    with pytest.raises(DataError, match=r"c\.npy: cannot read its token ids: an array of float64"):
        _rows(tmp_path / "c.npy")
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-2])
    with pytest.raises(DataError, match=r"a\.npy: cannot read its token ids"):
        _rows(tmp_path / "a.npy")


@pytest.mark.parametrize("shape", ["(-2, -50)", "(4611686018427387904, 4)", "(1L, '''"])
def test_an_array_that_lies_is_refused(tmp_path: Path, shape: str) -> None:
    head = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    data = _ids(100).astype("<u2").tobytes() if "-" in shape else b""
    begin = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head))
    (tmp_path / "a.npy").write_bytes(begin + head + data)
    with pytest.raises(DataError, match=r"a\.npy: cannot read its token ids"):
        _rows(tmp_path / "a.npy")


def test_a_header_of_llm_c_says_the_dtype(tmp_path: Path) -> None:
    ids = _ids(800).astype(np.uint16)
    head = np.zeros(256, dtype="<i4")
    head[:3] = 20240520, 1, 800
    (tmp_path / "a.bin").write_bytes(head.tobytes() + ids.tobytes())
    assert _rows(tmp_path / "a.bin") == _expected(ids.tolist())


def _megatron(path: Path, lengths: list[int], count: int | None = None) -> None:
    count = len(lengths) if count is None else count
    sizes = np.array(lengths, dtype="<i4")
    begins = 2 * (np.cumsum(sizes) - sizes).astype("<i8")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, count, count + 1)
    numbers = np.arange(len(lengths) + 1, dtype="<i8")
    path.with_suffix(".idx").write_bytes(
        head + sizes.tobytes() + begins.tobytes() + numbers.tobytes()
    )


def test_documents_of_megatron_are_those_of_its_index(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0)
    documents = [drawn.integers(0, 99, size).tolist() for size in drawn.integers(2, 14, 60)]
    np.concatenate(documents).astype(np.uint16).tofile(tmp_path / "a.bin")
    _megatron(tmp_path / "a.bin", [len(one) for one in documents])
    assert _rows(tmp_path / "a.bin") == documents  # END is a token as any other
    (tmp_path / "a.bin").write_bytes(bytes(10))
    with pytest.raises(DataError, match=r"a\.idx does not belong to .*a\.bin"):
        _rows(tmp_path / "a.bin")


@pytest.mark.parametrize(
    ("lengths", "count", "said"),
    [
        ([150, -50, 100], None, "does not belong to"),
        ([200, 1], None, "does not belong to"),
        ([200], 1 << 62, "cannot read its token ids"),
    ],
)
def test_an_index_that_lies_is_refused(
    tmp_path: Path, lengths: list[int], count: int | None, said: str
) -> None:
    _ids(200).astype("<u2").tofile(tmp_path / "a.bin")
    _megatron(tmp_path / "a.bin", lengths, count)
    with pytest.raises(DataError, match=said):
        _rows(tmp_path / "a.bin")


def test_a_dtype_is_never_guessed(tmp_path: Path) -> None:
    _ids(1000).astype(np.uint32).tofile(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=r"no header that says how its ids are written. Set dtyp"):
        _rows(tmp_path / "a.bin")
    with pytest.raises(DataError, match="every other id of the first 100 is 0, so they were writt"):
        _rows(tmp_path / "a.bin", "uint16")
    (tmp_path / "a.bin").write_bytes(bytes(10))
    with pytest.raises(DataError, match="has 10 bytes, which is no number of uint32"):
        _rows(tmp_path / "a.bin", "uint32")
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(DataError, match="cannot read its token ids"):
        _rows(tmp_path / "a.bin", "uint16")


def test_a_folder_is_its_files_by_name(tmp_path: Path) -> None:
    (folder := tmp_path / "tokens").mkdir()
    parts = [_ids(100 + 50 * number, number) for number in range(3)]
    for number, ids in enumerate(parts):
        ids.astype(np.uint16).tofile(folder / f"part-{number}.bin")
    assert _rows(folder, "uint16") == [one for ids in parts for one in _expected(ids.tolist())]
    (folder / "rows.jsonl").write_text("{}")
    assert token_files.token_files(folder) == ()
    assert token_files.token_files("owner/name") == ()


# --- in a config ---------------------------------------------------------------------------------


def _gathered(train: Any, **data: Any) -> TrainingRows:
    values = {"model": {"name_or_path": "none"}, "data": {"train": train, "max_length": 16, **data},
              "train": {"steps": 4, "batch_tokens": 256}}  # fmt: skip
    return gather(Config.model_validate(values), byte_tokenizer())


def _source(path: Path, ids: np.ndarray[Any, Any], **keys: Any) -> dict[str, Any]:
    ids.astype(np.uint16).tofile(path)
    return {"path": str(path), "dtype": "uint16", "eos": END, **keys}


def test_rows_of_a_file_are_prepared_as_others_are(tmp_path: Path) -> None:
    ids = _ids(1000)
    source = _source(tmp_path / "a.bin", ids)
    expected = _expected(ids.tolist())
    rows = _gathered(source)
    assert [rows.train.tokens(n)[0].tolist() for n in range(len(expected))] == expected
    assert all(rows.train.tokens(n)[1].all() for n in range(len(expected)))
    assert rows.card()["format"].endswith("tokens (input_ids)")
    assert len(_gathered({**source, "rows": 7}).train.lengths) == 7
    held = _gathered(source, eval=0.1)
    assert sum(held.held[0].lengths) + sum(held.train.lengths) == sum(map(len, expected))
    mixed = _gathered([source, _source(tmp_path / "b.bin", ids[:500])])
    assert [share.name for share in mixed.shares] == [source["path"], str(tmp_path / "b.bin")]


def test_another_end_or_dtype_is_not_answered_from_the_cache(tmp_path: Path) -> None:
    ids = _ids(1000)
    source = _source(tmp_path / "a.bin", ids)
    first = _gathered(source)
    assert _gathered({**source, "eos": 7}).digest != first.digest
    assert _gathered(source).digest == first.digest
    with pytest.raises(ConfigError, match="Set dtype of this source"):
        _gathered({**source, "dtype": None})


def test_ids_beyond_the_vocabulary_are_on_the_card_with_their_place(tmp_path: Path) -> None:
    ids = _ids(1000)
    ids[777] = 5000
    card = _gathered(_source(tmp_path / "a.bin", ids)).card()
    place = 1 + next(n for n, row in enumerate(_expected(ids.tolist())) if 5000 in row)
    assert (card["largest_id"], card["largest_id_place"]) == (5000, f"a.bin:{place}")
