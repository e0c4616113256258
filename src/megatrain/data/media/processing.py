"""Media through the model's own processor: what stands for them in a text, and their tensors.

A template writes one token for each medium; the processor says what takes its place, as many tokens
as the model makes of the medium. Texts are expanded here and then go the way of any text, so that
trained tokens are found as ever. One row of each chunk is compared with the processor's own tokens.

Laws (tests/data/media/test_processing.py)
    1. Tokens of a row with media are those of the processor.
    2. No token of a medium is trained, and all tokens of answers are.
    3. A row whose text has a token that stands for media, or whose template leaves a medium out, is
       a BadRow; so is a medium of which the processor makes numbers that are not finite.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import xxhash

from megatrain.data.chat.render import RenderedText
from megatrain.data.media.decoding import (
    decode_image,
    decode_sound,
    read_medium,
    require_package,
)
from megatrain.data.media.loading import (
    has_processor,
    load_processor,
    processor_files,
    processor_template,
)
from megatrain.data.media.placed import PlacedMedium, TypeRun, UsedMedium
from megatrain.data.rows.cells import MEDIA
from megatrain.data.rows.media import Kind, Medium, words_of
from megatrain.data.rows.rows import Row
from megatrain.data.rows.skipped import BadRow
from megatrain.errors import DataError

if TYPE_CHECKING:
    from megatrain.media import MediaItem

MARKED_TEXT = "text has a token that stands for media"
LEFT_OUT = "chat template leaves out media"
PROCESSOR_REFUSED = "processor refuses the medium"
NOT_FINITE = "processor makes infinite or undefined numbers of the medium"
_TEXT_KEYS = (
    "input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids",
    "text_replacement_offsets",
)  # fmt: skip
_ARGUMENTS: Mapping[Kind, str] = {"image": "images", "audio": "audio"}
_KEPT = 256
"""Media whose replacement is remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSettings:
    """How media of rows are read. It goes to the processes that tokenize."""

    folder: Path
    """The folder of the model, whose processor is loaded for the first row with media."""
    where: str | Path | None = None
    """The folder below which rows may name media."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the processor."""

    def beside(self, folder: Path | None) -> MediaSettings:
        """Return the settings for rows in a folder: it has their media, unless they name another.

        The folder of media is known by its full path.
        """
        where = self.where if self.where is not None else folder
        return replace(self, where=None if where is None else Path(where).resolve())

    def mark(self) -> str:
        """Return everything that decides about tokens and tensors, as text."""
        return f"{processor_files(self.folder)} {self.where} {sorted(self.arguments.items())}"


def media_settings(
    tokenizer: Any,
    *,
    where: str | Path | None = None,
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> MediaSettings | None:
    """Return how rows of the model that a tokenizer is of may have media; None: it takes none.

    An older folder may have a chat template for its processor alone: the tokenizer gets it.
    """
    folder = Path(str(tokenizer.name_or_path))
    if not tokenizer.name_or_path or not has_processor(folder):
        return None
    if tokenizer.chat_template is None:
        tokenizer.chat_template = processor_template(folder)
    return MediaSettings(folder=folder, where=where, arguments=dict(arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPrompt:
    """A prompt in tokens, of which some stand for media."""

    tokens: tuple[int, ...]
    token_types: tuple[int, ...]
    """0 for text, 1 for images, 3 for sounds, of each token."""
    used: tuple[UsedMedium, ...]
    """The media, in the order of their tokens."""


class MediaProcessor:
    """A model's processor, for the media of a folder."""

    def __init__(self, settings: MediaSettings, tokenizer: Any) -> None:
        """Raise ModelFolderError, and MissingPackage without Pillow."""
        require_package("image")
        self._settings = settings
        self._processor = load_processor(settings.folder, tokenizer)
        self._folder = None if settings.where is None else Path(settings.where)
        found = {kind: getattr(self._processor, f"{kind}_token", None) for kind in _ARGUMENTS}
        self._tokens: dict[Kind, str] = {kind: str(one) for kind, one in found.items() if one}
        self._mark = re.compile(
            "|".join(f"(?P<{kind}>{re.escape(token)})" for kind, token in self._tokens.items())
            or r"(?!)"
        )
        named = [getattr(self._processor, f"{kind}_token", None) for kind in (*_ARGUMENTS, "video")]
        self._reserved = re.compile("|".join(re.escape(one) for one in named if one) or r"(?!)")
        self._seen: OrderedDict[tuple[Kind, str], tuple[str, str]] = OrderedDict()
        """By kind and bytes, the digest of an item and the text that stands for it."""

    def expanded(self, row: Row, texts: Sequence[RenderedText], whole: str) -> list[RenderedText]:
        """Return the texts of a row with each medium as the tokens that stand for it.

        `whole` is the text of all its turns. Raises BadRow.
        """
        self._check(row, whole)
        used = self._used(row.media)
        return [self._expanded(text, used) for text in texts]

    def prompt(self, row: Row, text: str) -> MediaPrompt:
        """Return the prompt of a row, whose turns a template has written as `text`. Raises BadRow.

        The tokenizer is that of the processor.
        """
        (whole,) = self.expanded(row, [RenderedText(text=text, spans=())], text)
        encoded = self._processor.tokenizer(whole.text, add_special_tokens=False)
        tokens = tuple(map(int, encoded["input_ids"]))
        (types,) = self._processor.create_mm_token_type_ids([list(tokens)])
        return MediaPrompt(
            tokens=tokens,
            token_types=tuple(map(int, types)),
            used=tuple(one.medium for one in whole.media),
        )

    def check_words(self, words: str, place: str) -> None:
        """Raise BadRow for words that have a token that stands for media."""
        if found := self._reserved.search(words):
            raise BadRow(MARKED_TEXT, f"{place} has {found[0]}")

    def types(self, ids: Sequence[int]) -> tuple[TypeRun, ...]:
        """Return the runs of tokens that stand for media, by the processor's own code."""
        (types,) = self._processor.create_mm_token_type_ids([list(ids)])
        runs: list[TypeRun] = []
        at = 0
        for kind, run in groupby(types):
            length = len(list(run))
            if kind:
                runs.append((at, at + length, int(kind)))
            at += length
        return tuple(runs)

    def tokens_of(self, row: Row, text: str) -> list[int]:
        """Return the processor's own tokens of a text and as many of a row's media as it has.

        Raises BadRow.
        """
        given: dict[str, Any] = {}
        for kind, count in self._counts(text).items():
            media = [one for one in row.media if one.kind == kind][:count]
            if media:
                loaded = [self._loaded(kind, read_medium(one, self._folder).data) for one in media]
                given[_ARGUMENTS[kind]] = [loaded] if kind == "image" else loaded
        found = self._call([text], given, add_special_tokens=False)
        return [int(token) for token in found["input_ids"][0]]

    def item(self, kind: Kind, data: bytes) -> MediaItem:
        """Return what the processor makes of a medium. Raises BadRow."""
        return self._processed(kind, data)[0]

    def _counts(self, text: str) -> dict[Kind, int]:
        found = [str(mark.lastgroup) for mark in self._mark.finditer(text)]
        return {kind: found.count(kind) for kind in self._tokens}

    def _check(self, row: Row, whole: str) -> None:
        for kind in {medium.kind for medium in row.media}:
            if kind not in self._tokens:
                raise BadRow(MEDIA, f"{kind}: {type(self._processor).__name__} is not given any")
        for number, message in enumerate(row.messages):
            self.check_words(words_of(message["content"]), f"turn {number}")
        counts = self._counts(whole)
        for kind, count in counts.items():
            there = sum(medium.kind == kind for medium in row.media)
            if count != there:
                raise BadRow(LEFT_OUT, f"it writes {count} of {there} places for {kind}")

    def _used(self, media: Sequence[Medium]) -> list[tuple[UsedMedium, str]]:
        """Return each medium, read and processed, and the text that stands for it."""
        found = []
        for medium in media:
            read = read_medium(medium, self._folder)
            digest, replacement = self._known(medium.kind, read.data)
            used = UsedMedium(
                kind=medium.kind,
                digest=digest,
                num_bytes=len(read.data),
                path=read.path,
                mtime_ns=read.mtime_ns,
                data=b"" if read.path else read.data,
            )
            found.append((used, replacement))
        return found

    def _known(self, kind: Kind, data: bytes) -> tuple[str, str]:
        key = (kind, xxhash.xxh3_128_hexdigest(data))
        if key not in self._seen:
            item, replacement = self._processed(kind, data)
            self._seen[key] = item.digest, replacement
            if len(self._seen) > _KEPT:
                self._seen.popitem(last=False)
        self._seen.move_to_end(key)
        return self._seen[key]

    def _processed(self, kind: Kind, data: bytes) -> tuple[MediaItem, str]:
        from megatrain.media import MediaItem

        loaded = self._loaded(kind, data)
        given = {_ARGUMENTS[kind]: [[loaded]] if kind == "image" else [loaded]}
        found = self._call(
            [self._tokens[kind]],
            given,
            add_special_tokens=False,
            return_tensors="pt",
            return_text_replacement_offsets=True,
        )
        offsets = found.get("text_replacement_offsets")
        if not offsets or len(offsets[0]) != 1:
            raise DataError(
                f"{type(self._processor).__name__} of transformers does not say what stands for a "
                "medium in a text, so rows with media cannot be trained with this model."
            )
        tensors = {name: one for name, one in found.items() if name not in _TEXT_KEYS}
        for name, one in tensors.items():
            if one.is_floating_point() and not one.isfinite().all():
                raise BadRow(NOT_FINITE, f"{name}: look at mean, std and factors of the processor")
        return MediaItem.of(kind, tensors), str(offsets[0][0]["replacement"])

    def _loaded(self, kind: Kind, data: bytes) -> Any:
        """Return a decoded medium as processors take it. Raises BadRow."""
        return decode_image(data) if kind == "image" else decode_sound(data, self._rate)

    @property
    def _rate(self) -> int:
        own = getattr(self._processor, "audio_processor", None) or self._processor.feature_extractor
        return int(own.sampling_rate)

    def _call(self, text: list[str], given: Mapping[str, Any], **how: Any) -> dict[str, Any]:
        if "audio" in given:
            how["sampling_rate"] = self._rate
        try:
            found = self._processor(text=text, **given, **how, **self._settings.arguments)
        except MemoryError:
            raise
        except Exception as error:  # processors raise any
            raise BadRow(PROCESSOR_REFUSED, f"{type(error).__name__}: {error}"[:120]) from error
        return dict(found)

    def _expanded(
        self, rendered: RenderedText, used: Sequence[tuple[UsedMedium, str]]
    ) -> RenderedText:
        waiting = {kind: [one for one in used if one[0].kind == kind] for kind in self._tokens}
        pieces, placed = [], []
        edges, moves = [0], [0]
        at = length = 0
        for mark in self._mark.finditer(rendered.text):
            kind: Kind = mark.lastgroup  # type: ignore[assignment]
            medium, text = waiting[kind].pop(0)
            pieces += [rendered.text[at : mark.start()], text]
            begin = length + mark.start() - at
            length = begin + len(text)
            placed.append(PlacedMedium(begin=begin, end=length, medium=medium))
            at = mark.end()
            edges.append(at)
            moves.append(length - at)
        pieces.append(rendered.text[at:])
        return _moved(replace(rendered, text="".join(pieces), media=tuple(placed)), edges, moves)


def _moved(rendered: RenderedText, edges: Sequence[int], moves: Sequence[int]) -> RenderedText:
    """Return a text whose characters from each edge on are so many places further."""

    def char(place: int) -> int:
        return place + moves[bisect_right(edges, place) - 1]

    def spans(found: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple((char(begin), char(end)) for begin, end in found)

    return replace(
        rendered,
        spans=spans(rendered.spans),
        tags=None if rendered.tags is None else spans(rendered.tags),
        shown=spans(rendered.shown),
        begins_at=char(rendered.begins_at),
    )
