"""Token files: every id is in a document, and nothing is read as what it is not."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.data.chunks import token_files
from megatrain.data.chunks.choice import is_token_path
from megatrain.data.chunks.token_files import TokenFiles, open_token_files
from megatrain.errors import ConfigError, DataError

END = 1


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "_CHUNK_TOKENS", 100)


def _ids(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    drawn = np.random.default_rng(seed)
    ids = drawn.integers(2, 200, count)
    ids[drawn.random(count) < 0.1] = END
    return ids


def _open(path: Path, dtype: str | None = None, end: int | None = END) -> TokenFiles:
    return open_token_files(str(path), max_length=16, dtype=dtype, end=end)


def _documents(source: TokenFiles) -> list[list[int]]:
    found = []
    for number in range(source.num_chunks):
        chunk = source.read(number)
        found += [chunk.tokens(document)[0].tolist() for document in range(len(chunk.lengths))]
    return found


def _expected(ids: list[int], end: int | None = END, span: int = 96) -> list[list[int]]:
    """The documents, put together token by token."""
    found: list[list[int]] = [[]]
    for number, token in enumerate(ids):
        if number % span == 0 or len(found[-1]) == 16 or found[-1][-1:] == [end]:
            found.append([])
        found[-1].append(token)
    return [document for document in found if len(document) > 1]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32"])
def test_every_token_is_in_a_document(tmp_path: Path, dtype: str) -> None:
    ids = _ids(1000)
    ids.astype(dtype).tofile(tmp_path / "a.bin")
    source = _open(tmp_path / "a.bin", dtype)
    assert source.num_tokens == 1000
    assert _documents(source) == _expected(ids.tolist())
    assert _documents(_open(tmp_path / "a.bin", dtype, end=None)) == _expected(ids.tolist(), None)
    tokens, trained = source.read(0).tokens(0)
    assert tokens.dtype == np.int32
    assert trained.all()


def test_arrays_of_numpy_say_their_own_dtype(tmp_path: Path) -> None:
    ids = _ids(960)
    np.save(tmp_path / "a.npy", ids.astype(np.uint16))
    assert _documents(_open(tmp_path / "a.npy")) == _expected(ids.tolist())
    np.save(tmp_path / "b.npy", ids.reshape(-1, 12))  # a row is a document, or several
    documents = _documents(_open(tmp_path / "b.npy", end=None))
    assert documents == ids.reshape(-1, 12).tolist()
    with pytest.raises(ConfigError, match=r"a\.npy has ids of uint16, and dtype of this source"):
        _open(tmp_path / "a.npy", "uint32")
    np.save(tmp_path / "c.npy", np.zeros(4))
    with pytest.raises(DataError, match=r"c\.npy has an array of float64"):
        _open(tmp_path / "c.npy")
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-2])
    with pytest.raises(DataError, match="its header says 960 ids of uint16: it was cut"):
        _open(tmp_path / "a.npy")


def test_a_header_of_llm_c_says_the_dtype(tmp_path: Path) -> None:
    ids = _ids(800).astype(np.uint16)
    head = np.zeros(256, dtype="<i4")
    head[:3] = 20240520, 1, 800
    (tmp_path / "a.bin").write_bytes(head.tobytes() + ids.tobytes())
    assert _documents(_open(tmp_path / "a.bin")) == _expected(ids.tolist())


def _megatron(path: Path, documents: list[list[int]]) -> None:
    ids = np.concatenate([np.array(one, dtype=np.uint16) for one in documents])
    ids.tofile(path.with_suffix(".bin"))
    lengths = np.array([len(one) for one in documents], dtype="<i4")
    begins = 2 * (np.cumsum(lengths) - lengths).astype("<i8")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(documents), len(documents) + 1)
    numbers = np.arange(len(documents) + 1, dtype="<i8")
    path.with_suffix(".idx").write_bytes(
        head + lengths.tobytes() + begins.tobytes() + numbers.tobytes()
    )


def test_documents_of_megatron_are_those_of_its_index(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0)
    documents = [drawn.integers(0, 99, size).tolist() for size in drawn.integers(2, 14, 60)]
    _megatron(tmp_path / "a", documents)
    found = _documents(_open(tmp_path / "a.bin"))  # END is a token as any other
    ends = np.cumsum([len(one) for one in documents])
    inside = [one for one, end in zip(documents, ends, strict=True)
              if (end - len(one)) // 96 == (end - 1) // 96]  # fmt: skip
    assert [one for one in found if one in documents] == inside
    assert len(inside) > 50
    cut = sum(len(one) for one in documents) - sum(map(len, found))
    assert 0 <= cut < len(documents) - len(inside)  # single tokens, at the borders of chunks
    (tmp_path / "a.bin").write_bytes(bytes(10))
    with pytest.raises(DataError, match=r"a\.idx does not belong to .*a\.bin"):
        _open(tmp_path / "a.bin")


@pytest.mark.parametrize(
    ("begins", "count", "said"),
    [
        ([0, 10**12, 20, 40], None, "does not say where documents begin"),
        ([0, 60, 20, 40], None, "does not say where documents begin"),
        ([0, 11, 20], None, "does not say where documents begin"),
        ([0, 10], 1 << 62, "cannot read it: it was cut"),
    ],
)
def test_an_index_that_lies_is_refused(
    tmp_path: Path, begins: list[int], count: int | None, said: str
) -> None:
    _ids(200).astype("<u2").tofile(tmp_path / "a.bin")
    count = count or len(begins)
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, count, count + 1)
    places = bytes(4 * len(begins)) + np.array(begins, "<i8").tobytes()
    (tmp_path / "a.idx").write_bytes(head + places)
    with pytest.raises(DataError, match=said):
        _open(tmp_path / "a.bin").read(0)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ("(-2, -50)", r"with shape \(-2, -50\)"),
        ("(4611686018427387904, 4)", "its header says 18,446,744,073,709,551,616 ids"),
        ("(1L, '''", "is not an array of numpy"),
    ],
)
def test_an_array_that_lies_is_refused(tmp_path: Path, shape: str, said: str) -> None:
    head = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    data = _ids(100).astype("<u2").tobytes() if "-" in shape else b""
    begin = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head))
    (tmp_path / "a.npy").write_bytes(begin + head + data)
    with pytest.raises(DataError, match=said):
        _open(tmp_path / "a.npy")


def test_ids_beyond_the_vocabulary_are_refused_with_their_place(tmp_path: Path) -> None:
    ids = _ids(1000).astype(np.uint16)
    ids[777] = 5000
    ids.tofile(tmp_path / "a.bin")
    source = _open(tmp_path / "a.bin", "uint16")
    source.require_below(256)  # the first chunk has none
    with pytest.raises(DataError, match=r"a\.bin: token 777 \(byte 1,554\) is 5,000, and the mod"):
        source.read(777 // 96)
    ids[3] = 256
    ids.tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match="token 3 "):
        _open(tmp_path / "a.bin", "uint16").require_below(256)
    (-ids.astype(np.int32)).tofile(tmp_path / "b.bin")
    with pytest.raises(DataError, match="token 0 "):
        _open(tmp_path / "b.bin", "int32")


def test_a_dtype_is_never_guessed(tmp_path: Path) -> None:
    _ids(1000).astype(np.uint32).tofile(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=r"no header that says how its ids are written. Set dtyp"):
        _open(tmp_path / "a.bin")
    with pytest.raises(DataError, match="every other id of the first 100 is 0, so they were writt"):
        _open(tmp_path / "a.bin", "uint16")
    (tmp_path / "a.bin").write_bytes(bytes(10))
    with pytest.raises(DataError, match="has 10 bytes, which is no number of uint32"):
        _open(tmp_path / "a.bin", "uint32")
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(DataError, match="has no tokens"):
        _open(tmp_path / "a.bin", "uint16")


def test_a_folder_is_its_files_by_name(tmp_path: Path) -> None:
    parts = [_ids(100 + 50 * number, number) for number in range(3)]
    for number, ids in enumerate(parts):
        ids.astype(np.uint16).tofile(tmp_path / f"part-{number}.bin")
    assert is_token_path(str(tmp_path))
    source = _open(tmp_path, "uint16")
    assert _documents(source) == [one for ids in parts for one in _expected(ids.tolist())]
    (tmp_path / "rows.jsonl").write_text("{}")
    assert not is_token_path(str(tmp_path))
    assert not is_token_path("owner/name")
    assert is_token_path("s3://bucket/tokens.bin")
    assert not is_token_path("s3://bucket/rows.jsonl")


def test_data_without_the_end_token_is_remarked_on(tmp_path: Path) -> None:
    ids = np.full(200, 7, dtype=np.uint16)
    ids.tofile(tmp_path / "a.bin")
    assert "have no 1, so no document ends" in _open(tmp_path / "a.bin", "uint16").card["remark"]
    ids[50] = END
    ids.tofile(tmp_path / "a.bin")
    assert "remark" not in _open(tmp_path / "a.bin", "uint16").card
