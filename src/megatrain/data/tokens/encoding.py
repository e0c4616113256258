"""A chunk of raw rows to documents: the work of one `prepare` worker, without shared state.

Nothing here needs torch: a worker is ready in a second and holds the tokenizer, little more.

Laws (tests/data/tokens/test_prepare.py)
    1. No document is longer than `max_length` or without a target.
    2. Every row is bad, or all of its documents are kept, or it is counted once as dropped.
    3. Of a row of pairs both documents are kept, chosen and rejected, or none
       (tests/data/tokens/test_preferences.py).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from megatrain.data.chat.masks import Encoder, Tokens
from megatrain.data.chat.notes import Notes
from megatrain.data.chat.render import TrainOn
from megatrain.data.chat.spans import clipped, merged_runs
from megatrain.data.media.placed import PlacedMedium, TypeRun
from megatrain.data.rows.formats import Format
from megatrain.data.rows.reading import parsed
from megatrain.data.rows.rows import Row, canonical
from megatrain.data.rows.skipped import BadRow, SkippedRows
from megatrain.errors import DataError

if TYPE_CHECKING:
    from megatrain.data.media.processing import MediaSettings

Overlong = Literal["drop", "truncate", "split"]
NoTarget = Literal["drop", "error"]
Chunk = list[tuple[str, object]]
"""Raw rows with their places."""


class Settings(TypedDict):
    """The options that decide how rows become documents."""

    max_length: int
    train_on: TrainOn
    template_kwargs: dict[str, Any]
    overlong: Overlong
    no_target: NoTarget


TOO_LONG = "longer than max_length"
NO_TARGET = "no trained token"
SEVERAL_TEXTS = "chat template rewrites earlier turns of the answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extreme:
    """The largest number of its kind, and the place of the row that has it."""

    value: int = -1
    place: str = ""

    def or_later(self, later: Extreme) -> Extreme:
        return later if later.value > self.value else self


@dataclass(slots=True, kw_only=True)
class EncodedChunk:
    """The documents of a chunk, end to end, and counts of its other rows."""

    num_rows: int = 0
    num_kept: int = 0
    """Rows of which at least one document is left."""
    num_truncated: int = 0
    """Rows, as everywhere here."""
    num_split: int = 0
    rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """The row of each document, counted from the first of the chunk."""
    lengths: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    edges: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """Begin and end of each run of trained tokens, counted from its document's first token."""
    num_edges: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """How many of them each document has."""
    num_valid_tokens: int = 0
    num_open: int = 0
    """Trained turns that no control token ends."""
    longest_read: int = 0
    """Tokens of the longest document before it was cut, split or dropped."""
    longest: Extreme = field(default_factory=Extreme)
    largest_id: Extreme = field(default_factory=Extreme)
    bad: SkippedRows = field(default_factory=SkippedRows)
    dropped: SkippedRows = field(default_factory=SkippedRows)
    """Rows that lost a document, or all of them, by the first reason."""
    notes: Notes = field(default_factory=Notes)
    desirable: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    """The mark of each document; of rows without one, none."""
    media: list[tuple[int, tuple[PlacedMedium, ...], tuple[TypeRun, ...]]] = field(
        default_factory=list
    )
    """Documents with media, counted in the chunk, their media, and tokens that stand for these."""


class ChunkEncoder:
    """Chunks of raw rows to documents, under fixed settings."""

    def __init__(
        self,
        tokenizer: Any,
        shape: Format,
        settings: Settings,
        media: MediaSettings | None = None,
    ) -> None:
        """`media`: how media of rows are read; None: a row with media is bad."""
        self._encoder = Encoder(tokenizer, settings["train_on"], settings["template_kwargs"], media)
        self._shape = shape
        self._max_length = settings["max_length"]
        self._overlong = settings["overlong"]
        self._no_target = settings["no_target"]

    def encode(self, chunk: Chunk) -> EncodedChunk:
        """Return the chunk's documents in the order of its rows."""
        encoded = EncodedChunk(num_rows=len(chunk))
        rows: list[tuple[str, Row]] = []
        # Bad rows are noted in the order of the file, by any of the two checks.
        found: list[tuple[str, BadRow] | None] = []
        for place, value in chunk:
            try:
                rows.append((place, canonical(parsed(value), self._shape)))
                found.append(None)
            except BadRow as bad:
                found.append((place, bad))
        documents = iter(zip(rows, self._documents(rows), strict=True))
        kept: list[Tokens] = []
        numbers: list[int] = []
        places: list[str] = []
        marks: list[bool] = []
        for number, bad_row in enumerate(found):
            if bad_row is not None:
                encoded.bad.add(*bad_row)
                continue
            (place, row), made = next(documents)
            if isinstance(made, BadRow):
                encoded.bad.add(place, made)
                continue
            encoded.notes.add(row, made, self._encoder.template)
            left = self._kept(encoded, place, row, made)
            kept += left
            numbers += [number] * len(left)
            places += [place] * len(left)
            marks += [] if row.desirable is None else [row.desirable] * len(left)
        encoded.num_kept = len(set(numbers))
        encoded.rows = np.array(numbers, dtype=np.int64)
        encoded.desirable = np.array(marks, dtype=np.bool_)
        _put_together(encoded, kept)
        _find_extremes(encoded, places)
        return encoded

    def _documents(self, rows: Sequence[tuple[str, Row]]) -> list[list[Tokens] | BadRow]:
        """Return each row's documents; of preferences, one for each answer."""
        if self._shape.preferences is None:
            return self._encoder.encode_rows(rows)
        talks = [(place, one) for place, row in rows for one in (row, row.rejected) if one]
        made = iter(self._encoder.encode_rows(talks))
        return [
            self._answers([(one, next(made)) for one in (row, row.rejected) if one])
            for _, row in rows
        ]

    def _answers(self, parts: Sequence[tuple[Row, list[Tokens] | BadRow]]) -> list[Tokens] | BadRow:
        """Return the one document of each answer, or why there is none."""
        found: list[Tokens] = []
        for _, made in parts:
            if isinstance(made, BadRow):
                return made
            if len(made) > 1:
                return BadRow(
                    SEVERAL_TEXTS, "data.train_on: last trains the last turn of the answer"
                )
            found += made
        follow = all(_trains_after_prompt(row, self._encoder.train_on) for row, _ in parts)
        return with_one_prompt(found) if follow else found

    def _kept(
        self, encoded: EncodedChunk, place: str, row: Row, documents: Sequence[Tokens]
    ) -> list[Tokens]:
        """Return the documents of a row; count the row if a document is lost, cut or split."""
        kept: list[Tokens] = []
        lost: list[BadRow] = []
        for document in documents:
            encoded.longest_read = max(encoded.longest_read, len(document.input_ids))
            encoded.num_open += document.num_open
            if document.num_valid_tokens == 0 and self._no_target == "error":
                raise DataError(_no_target_text(place, document, "is trained"))
            for piece in self._pieces(row, document):
                if isinstance(piece, BadRow):
                    lost.append(piece)
                elif piece.num_valid_tokens > 0:
                    kept.append(piece)
                elif self._no_target == "error" and self._overlong == "truncate":
                    raise DataError(_no_target_text(place, document, "is left to train"))
                else:
                    lost.append(BadRow(NO_TARGET, f"{len(piece.input_ids)} tokens"))
        if lost:
            encoded.dropped.add(place, lost[0])
        self._count_long(encoded, row, documents)
        # One answer alone cannot be compared.
        return [] if lost and self._shape.preferences else kept

    def _pieces(self, row: Row, document: Tokens) -> Iterator[Tokens | BadRow]:
        length, most = len(document.input_ids), self._max_length
        if length <= most:
            yield document
        elif self._overlong == "truncate" and not _cuts_media(document, most):
            yield _cut(document, 0, most)
        elif self._overlong == "split" and row.may_split:
            # A single token left over has no successor to predict.
            for start in range(0, length - 1, most):
                yield _cut(document, start, start + most)
        else:
            yield BadRow(TOO_LONG, f"{length} tokens")

    def _count_long(self, encoded: EncodedChunk, row: Row, documents: Sequence[Tokens]) -> None:
        if all(len(document.input_ids) <= self._max_length for document in documents):
            return
        encoded.num_truncated += self._overlong == "truncate"
        encoded.num_split += self._overlong == "split" and row.may_split


def _trains_after_prompt(row: Row, train_on: TrainOn) -> bool:
    """Return whether the first turn that follows the prompt is trained."""
    first = row.num_prompt
    answers = [n for n in range(first, len(row.messages)) if row.messages[n]["role"] == "assistant"]
    is_last = train_on != "last" or len(answers) == 1
    return answers[0] == first and first not in row.untrained and is_last


def with_one_prompt(answers: Sequence[Tokens]) -> list[Tokens]:
    """Return the answers with as many tokens of a prompt each.

    Both are trained from their first turn on. An answer may share a token with the prompt, which is
    then trained; of the other answer the tokens of the same place are trained too. So both are
    compared after the same tokens.
    """
    begin = min((answer.runs[0][0] for answer in answers if answer.runs), default=0)
    return [
        replace(answer, runs=merged_runs([(begin, answer.runs[0][1]), *answer.runs[1:]]))
        if answer.runs
        else answer
        for answer in answers
    ]


def _no_target_text(place: str, document: Tokens, what: str) -> str:
    return (
        f"{place}: no token of {len(document.input_ids)} {what}; were the answers truncated? "
        "Raise data.max_length, or allow such rows to be dropped."
    )


def _cuts_media(document: Tokens, stop: int) -> bool:
    """Return whether a medium of a document is not whole before `stop`."""
    return any(medium.end > stop for medium in document.media)


def _cut(document: Tokens, start: int, stop: int) -> Tokens:
    return replace(
        document,
        input_ids=document.input_ids[start:stop],
        runs=clipped(document.runs, start, stop),
        num_open=0,
        notes=(),
    )


def _put_together(encoded: EncodedChunk, documents: Sequence[Tokens]) -> None:
    """Few large arrays: they cross from process to process at no cost per document."""
    encoded.num_valid_tokens = sum(document.num_valid_tokens for document in documents)
    encoded.lengths = _array([len(document.input_ids) for document in documents])
    encoded.ids = _array([token for document in documents for token in document.input_ids])
    encoded.num_edges = _array([2 * len(document.runs) for document in documents])
    encoded.edges = _array(
        [edge for document in documents for run in document.runs for edge in run]
    )
    encoded.media = [
        (number, document.media, document.types)
        for number, document in enumerate(documents)
        if document.media
    ]


def _find_extremes(encoded: EncodedChunk, places: Sequence[str]) -> None:
    if not places:
        return
    longest, largest = int(encoded.lengths.argmax()), int(encoded.ids.argmax())
    owner = int(np.searchsorted(np.cumsum(encoded.lengths), largest, side="right"))
    encoded.longest = Extreme(value=int(encoded.lengths[longest]), place=places[longest])
    encoded.largest_id = Extreme(value=int(encoded.ids[largest]), place=places[owner])


def _array(numbers: list[int]) -> NDArray[np.int32]:
    return np.array(numbers, dtype=np.int32)


# --- in a worker process -------------------------------------------------------------------------

_worker: ChunkEncoder | None = None


def begin_worker(
    tokenizer: Any, shape: Format, settings: Settings, media: MediaSettings | None = None
) -> None:
    """Make this process ready for `encode_chunk`."""
    global _worker
    # Each worker has one core: the tokenizer's own threads would compete for it.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = ChunkEncoder(tokenizer, shape, settings, media)
    gc.freeze()  # existing objects stay: skip them in every collection


def encode_chunk(chunk: Chunk) -> EncodedChunk:
    """Return the documents of a chunk, made by the worker's encoder."""
    assert _worker is not None
    return _worker.encode(chunk)
