"""Preparing: tokenized once, the same with any number of workers, everything left out counted."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain import files
from megatrain.batch import check_batch
from megatrain.data.chat.masks import Encoder
from megatrain.data.rows.rows import Row
from megatrain.data.steps.loader import Loader
from megatrain.data.steps.order import MixedOrder
from megatrain.data.steps.steps import Steps
from megatrain.data.tokens import prepare as prepare_module
from megatrain.data.tokens.documents import JoinedDocuments
from megatrain.data.tokens.encoding import NO_TARGET, TOO_LONG, Settings
from megatrain.data.tokens.prepare import prepare
from megatrain.data.tokens.prepared import PreparedData
from megatrain.errors import ConfigError, DataError, DiskError, DiskFull
from testkit.tokenizers_of_kinds import KINDS, made, tokenizer_of
from testkit.written import write


def _talk(number: int, length: int = 3) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": "word " * length + str(number)},
        ]
    }


ROWS = [_talk(number, 1 + number % 9) for number in range(600)]


def _prepare(path: Path, kind: str = "chatml", **changes: Any) -> PreparedData:
    settings: dict[str, Any] = {"cache_dir": path.parent / "cache", "max_length": 64, **changes}
    tokenizer = settings.pop("tokenizer", None) or tokenizer_of(kind)
    return prepare(path, tokenizer, **settings)


def _all_tokens(prepared: PreparedData) -> list[tuple[list[int], list[bool]]]:
    pairs = (prepared.tokens(number) for number in range(len(prepared.lengths)))
    return [(ids.tolist(), trained.tolist()) for ids, trained in pairs]


def test_documents_are_the_rows_in_order(tmp_path: Path) -> None:
    prepared = _prepare(write(tmp_path / "a.jsonl", ROWS))
    encoder = Encoder(tokenizer_of("chatml"))
    expected = [encoder.encode(Row(messages=tuple(row["messages"])))[0] for row in ROWS]
    assert _all_tokens(prepared) == [(one.input_ids, one.trained) for one in expected]
    assert prepared.lengths.tolist() == [len(one.input_ids) for one in expected]
    assert len(prepared.dataset) == 600
    assert prepared.dataset[5]["input_ids"] == expected[5].input_ids


def test_the_card_counts_what_is_there(tmp_path: Path) -> None:
    prepared = _prepare(write(tmp_path / "a.jsonl", ROWS))
    tokens = _all_tokens(prepared)
    card = prepared.card
    assert card["rows"] == card["documents"] == 600
    assert card["tokens"] == sum(len(ids) for ids, _ in tokens)
    assert card["trained_tokens"] == sum(sum(trained[1:]) for _, trained in tokens)
    assert card["longest"] == max(len(ids) for ids, _ in tokens)
    assert card["percentiles"]["50"] == int(np.median(prepared.lengths))
    assert card["format"] == "detected: messages (role, content)"
    assert card["bad"] == card["dropped"] == {}


@pytest.mark.merge
def test_any_number_of_workers_gives_the_same_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*ROWS[:300], {"messages": []}, *ROWS[300:]])
    one = _prepare(path, cache_dir=tmp_path / "one")
    two = _prepare(path, cache_dir=tmp_path / "two", num_workers=2)
    for name in ("documents.arrow", "card.json"):
        assert (one.folder / name).read_bytes() == (two.folder / name).read_bytes()
    other = _prepare(write(tmp_path / "b.jsonl", ROWS[1:]))
    name = "documents.arrow"
    assert (one.folder / name).read_bytes() != (other.folder / name).read_bytes()


def test_nothing_is_tokenized_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    first = _prepare(path)
    monkeypatch.setattr(prepare_module, "_prepared", None)  # calling it would fail
    assert _prepare(path).folder == first.folder


def _touch(path: Path) -> None:
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def _change_a_letter(path: Path) -> None:
    stat = path.stat()
    path.write_text(path.read_text().replace("question 3", "question 4", 1))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("change", [_touch, _change_a_letter])
def test_changed_files_are_prepared_anew(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    first = _prepare(path)
    change(path)
    assert _prepare(path).folder != first.folder


@pytest.mark.parametrize(
    "other",
    [
        {"max_length": 63},
        {"train_on": "all"},
        {"overlong": "truncate"},
        {"kind": "llama3"},
        {
            "tokenizer": made(
                KINDS["chatml"].template + "{# x #}", KINDS["chatml"].marks, eos="<|im_end|>"
            )
        },
    ],
    ids=["length", "train_on", "overlong", "tokenizer", "template"],
)
def test_other_settings_are_prepared_anew(tmp_path: Path, other: dict[str, Any]) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    assert _prepare(path).folder != _prepare(path, **other).folder


@pytest.mark.merge
def test_the_digest_is_of_every_token_and_what_is_trained_of_it(tmp_path: Path) -> None:
    first = _prepare(write(tmp_path / "a.jsonl", ROWS)).card["digest"]
    assert _prepare(write(tmp_path / "b.jsonl", ROWS), num_workers=2).card["digest"] == first
    found = {first, _prepare(tmp_path / "a.jsonl", train_on="all").card["digest"]}
    for number in (0, 301, 599):
        other = [*ROWS[:number], _talk(number, 2 + number % 9), *ROWS[number + 1 :]]
        found.add(_prepare(write(tmp_path / f"{number}.jsonl", other)).card["digest"])
    found.add(_prepare(write(tmp_path / "swapped.jsonl", ROWS[::-1])).card["digest"])
    assert len(found) == 6


def test_the_told_format_is_prepared(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{**row, "text": "some words"} for row in ROWS])
    as_text, as_talk = _prepare(path, wanted="text"), _prepare(path, wanted="messages")
    assert as_text.card["format"] == "text (text)"
    assert as_text.tokens(0)[1].all()
    assert not as_talk.tokens(0)[1].all()
    assert as_talk.folder == _prepare(path).folder  # what is detected is the same


def test_bad_rows_are_counted_and_limited(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*ROWS[:95], *[{"messages": None}] * 5])
    with pytest.raises(DataError, match=r"(?s)5 of 100 rows cannot be used.*5 x null: a\.jsonl:96"):
        _prepare(path)
    prepared = _prepare(path, max_bad=0.05)
    assert prepared.card["bad"] == {"null": 5}
    assert prepared.card["documents"] == 95


def test_a_template_that_refuses_everything_is_soon_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS * 10)
    tokenizer = made("{{ raise_exception('never') }}", ("<s>",), eos="<s>")
    with pytest.raises(
        DataError, match=r"(?s)none of the first 2,048 rows .* refuses the row: .*never"
    ):
        _prepare(path, tokenizer=tokenizer)
    assert list((tmp_path / "cache").iterdir()) == []


LONG = [_talk(0), _talk(1, 90), _talk(2), _talk(3), _talk(4)]


def test_long_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    card = _prepare(write(tmp_path / "a.jsonl", LONG)).card
    assert card["documents"] == card["kept"] == 4
    assert card["dropped"] == {TOO_LONG: 1}
    assert card["longest_read"] > 90
    assert card["dropped_places"][TOO_LONG][0].startswith("a.jsonl:2 (")


def test_long_rows_are_truncated_and_counted(tmp_path: Path) -> None:
    prepared = _prepare(write(tmp_path / "a.jsonl", LONG), overlong="truncate")
    assert prepared.card["truncated"] == 1
    assert prepared.lengths.tolist()[1] == 64


def test_long_text_is_split_without_loss(tmp_path: Path) -> None:
    text = "word " * 300
    prepared = _prepare(write(tmp_path / "a.txt", [{"text": text}]), overlong="split")
    joined = [token for ids, _ in _all_tokens(prepared) for token in ids]
    assert joined == Encoder(tokenizer_of("chatml")).encode(Row(text=text))[0].input_ids
    assert prepared.card["split"] == 1
    assert max(prepared.lengths) == 64


def test_conversations_are_never_split(tmp_path: Path) -> None:
    card = _prepare(write(tmp_path / "a.jsonl", LONG), overlong="split").card
    assert card["dropped"] == {TOO_LONG: 1}


CUT_AWAY = [
    *[_talk(0)] * 4,
    {"messages": [{"role": "user", "content": "word " * 200}, _talk(1)["messages"][1]]},
]


def test_answers_truncated_away_are_dropped_and_counted(tmp_path: Path) -> None:
    card = _prepare(write(tmp_path / "a.jsonl", CUT_AWAY), overlong="truncate").card
    assert card["dropped"] == {NO_TARGET: 1}
    assert card["documents"] == 4


def test_answers_truncated_away_are_an_error_when_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", CUT_AWAY)
    with pytest.raises(DataError, match=r"a\.jsonl:5: no token of \d+ is left to train"):
        _prepare(path, overlong="truncate", no_target="error")
    assert list((tmp_path / "cache").iterdir()) == []


def test_data_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"(?s)no row is left of 1:.*longer than max_length: a\.jsonl:1"
    ):
        _prepare(write(tmp_path / "a.jsonl", LONG[1:2]), max_dropped=1.0)


def test_a_damaged_cache_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    file = _prepare(path).folder / "documents.arrow"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(DataError, match=r"the prepared data is damaged .*Delete the folder"):
        _prepare(path)


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_a_flipped_bit_in_the_cache_is_found(tmp_path: Path, place: float) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    file = _prepare(path).folder / "documents.arrow"
    data = bytearray(file.read_bytes())
    data[int(place * len(data))] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"damaged \(its hash does not match\)"):
        _prepare(path)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(DiskError, match="cannot create the folder"):
        _prepare(path, cache_dir=path)


def test_a_full_disk_is_said_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also closing the file fails: it still holds bytes that there is no room for."""
    path = write(tmp_path / "a.jsonl", ROWS)
    monkeypatch.setattr(files, "open_new", lambda path: Path("/dev/full").open("wb"))  # noqa: SIM115
    with pytest.raises(DiskFull, match=r"no room for the prepared rows.*Set MEGATRAIN_CACHE"):
        _prepare(path)
    assert list((tmp_path / "cache").iterdir()) == []


def test_another_run_that_was_faster_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    whole = prepare_module._prepared

    def twice(*arguments: Any) -> PreparedData:
        whole(*arguments)
        return whole(*arguments)

    monkeypatch.setattr(prepare_module, "_prepared", twice)
    prepared = _prepare(path)
    assert len(prepared.lengths) == 600
    assert [one.name for one in (tmp_path / "cache").iterdir()] == [prepared.folder.name]


def test_containers_that_share_a_cache_and_a_process_number_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is the first process of its container; here the second one begins inside the first."""
    path = write(tmp_path / "a.jsonl", ROWS)
    whole, encoded = prepare_module._prepared, prepare_module._encoded
    found: list[PreparedData] = []

    def both(*arguments: Any) -> PreparedData:
        def late(*given: Any) -> Iterator[Any]:
            monkeypatch.setattr(prepare_module, "_encoded", encoded)
            first, *rest = encoded(*given)
            yield first
            found.append(whole(*arguments))
            yield from rest

        monkeypatch.setattr(prepare_module, "_encoded", late)
        return whole(*arguments)

    monkeypatch.setattr(prepare_module, "_prepared", both)
    tokens = _all_tokens(_prepare(path))
    monkeypatch.undo()
    assert len(tokens) == 600
    assert tokens == _all_tokens(found[0])
    assert [one.name for one in (tmp_path / "cache").iterdir()] == [found[0].folder.name]


def test_a_worker_that_is_killed_is_a_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Killer(dict[str, Any]):
        def __reduce__(self) -> Any:
            return os._exit, (9,)

    fields = {"format": None, "given": None, "values": lambda self, advance: iter(())}
    source: Any = type("S", (), fields)()
    monkeypatch.setattr(prepare_module, "_chunks", lambda values: iter([[("a:1", Killer())]]))
    settings: Settings = {"max_length": 64, "train_on": "assistant", "template_kwargs": {},
                "overlong": "drop", "no_target": "drop"}  # fmt: skip
    with pytest.raises(DataError, match="tokenizing process was killed"):
        list(
            prepare_module._encoded(
                source, tokenizer_of("chatml"), settings, 2, lambda n: None, media=None
            )
        )


def test_only_a_few_chunks_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the data, no more than `most` chunks are read ahead of what is written."""
    monkeypatch.setattr(prepare_module, "encode_chunk", lambda chunk: chunk)
    num_read = 0

    def chunks() -> Iterator[Any]:
        nonlocal num_read
        for number in range(100):
            num_read += 1
            yield number

    with ThreadPoolExecutor(2) as pool:
        threads: Any = pool
        encoded: Iterator[Any] = prepare_module._in_order(threads, chunks(), most=4)
        for num_written, chunk in enumerate(encoded):
            assert chunk == num_written
            assert num_read - num_written <= 4
    assert num_read == 100


def test_max_length_must_hold_a_target(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_length 1"):
        _prepare(write(tmp_path / "a.jsonl", ROWS), max_length=1)


def test_from_files_to_steps(tmp_path: Path) -> None:
    """Two files, mixed by weight, packed, loaded: what the engine takes."""
    parts = [
        _prepare(write(tmp_path / "a.jsonl", ROWS)),
        _prepare(write(tmp_path / "b.txt", [{"text": f"text number {n}"} for n in range(200)])),
    ]
    joined = JoinedDocuments(parts)
    sizes = [len(part.lengths) for part in parts]
    assert joined.tokens(600)[0].tolist() == parts[1].tokens(0)[0].tolist()
    steps = Steps(
        joined,
        MixedOrder(sizes, [0.8, 0.2], 1),
        batch_tokens=512,
        micro_batch_tokens=128,
        max_length=64,
    )
    with Loader(steps) as loader:
        batches = list(itertools.islice(loader, steps.count()))
        state = loader.state()
    assert len(batches) > 5
    for batch in batches:
        check_batch(batch, 400)
    assert json.loads(json.dumps(state)) == state
    assert state["epoch"] == 1
