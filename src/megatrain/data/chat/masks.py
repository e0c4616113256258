"""Rendered text as tokens, and which tokens are trained.

A token is trained if it holds a trained character. White space that a template writes after an
end-of-turn token belongs to no turn: the model never has to generate it, so it is not trained.

Laws (tests/data/chat/test_render.py)
    1. Tags and prefixes agree on every token, or a DataError shows the first token they differ in.
    2. The end-of-turn token of each trained turn is trained.
    3. Rows give the same tokens together as one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatrain.data.chat.render import RenderedText, TrainOn, render_row
from megatrain.data.chat.spans import Runs, mask_of, merged_runs, moved, tokens_in, without
from megatrain.data.chat.template import CharSpan, ChatTemplate
from megatrain.data.media.placed import PlacedMedium, TypeRun
from megatrain.data.rows.cells import MEDIA
from megatrain.data.rows.media import words_of
from megatrain.data.rows.rows import Row
from megatrain.data.rows.skipped import BadRow
from megatrain.errors import DataError, ModelFolderError

if TYPE_CHECKING:
    from megatrain.data.media.processing import MediaProcessor, MediaSettings

TOKENIZER_REFUSED = "tokenizer refuses the row"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A document, ready to train on."""

    input_ids: list[int]
    runs: Runs
    """Trained tokens."""
    num_open: int = 0
    """Trained turns that no control token ends: a model of them may never stop."""
    notes: tuple[str, ...] = ()
    """Remarks about its turns, one per turn."""
    media: tuple[PlacedMedium, ...] = ()
    """Media, and the tokens that stand for them; none of these is trained."""
    types: tuple[TypeRun, ...] = ()
    """Tokens that stand for media, with their types."""

    @property
    def trained(self) -> list[bool]:
        flat = [edge for run in self.runs for edge in run]
        return list(map(bool, mask_of(flat, len(self.input_ids))))

    @property
    def num_valid_tokens(self) -> int:
        """Targets: the first token has nothing before it that could predict it."""
        is_first = bool(self.runs) and self.runs[0][0] == 0
        return sum(end - begin for begin, end in self.runs) - is_first


@dataclass(frozen=True, slots=True, kw_only=True)
class _EncodedText:
    """A text with its tokens, and the tokenizer's offsets."""

    text: str
    ids: list[int]
    encoding: Any

    def tokens_in(self, span: CharSpan) -> CharSpan:
        return tokens_in(span, self.encoding, len(self.text))


class Encoder:
    """Rows to tokens, by one tokenizer and its chat template."""

    def __init__(
        self,
        tokenizer: Any,
        train_on: TrainOn = "assistant",
        template_kwargs: Mapping[str, Any] | None = None,
        media: MediaSettings | None = None,
    ) -> None:
        """Raise DataError for a tokenizer without character offsets.

        `media`: how media of rows are read; None: a row with media is a BadRow.
        """
        if not tokenizer.is_fast:
            raise DataError(
                f"{type(tokenizer).__name__} has no character offsets to derive a mask from; "
                "load the fast tokenizer of this model"
            )
        self.tokenizer = tokenizer
        self.train_on = train_on
        self._media_settings = media
        self._media: MediaProcessor | None = None
        has_template = bool(tokenizer.chat_template)
        self.template = ChatTemplate(tokenizer, template_kwargs) if has_template else None
        added = tokenizer.added_tokens_decoder.items()
        self.marks = {token for token, mark in added if str(mark).strip()}
        self.marks |= set(tokenizer.all_special_ids)
        """Control tokens: what a template writes beside words and white space."""
        first = tokenizer.bos_token_id
        # Only some tokenizers that know a first token also use it.
        self._before = [first] if tokenizer("")["input_ids"][:1] == [first] else []

    def encode(self, row: Row, place: str = "the row") -> list[Tokens]:
        """Return the documents of one row. Raises BadRow, and what `encode_rows` raises."""
        (documents,) = self.encode_rows([(place, row)])
        if isinstance(documents, BadRow):
            raise documents
        return documents

    def encode_rows(self, rows: Sequence[tuple[str, Row]]) -> list[list[Tokens] | BadRow]:
        """Return each row's documents: one, or several where turns need separate contexts.

        A row that the template or the tokenizer refuses is a BadRow. Raises DataError where tags
        and prefixes differ or a conversation meets a tokenizer without template.
        """
        texts = [self._texts(place, row) for place, row in rows]
        self._check_template(rows, texts)
        self._check_processor(rows, texts)
        as_text = iter(self._tokenized(_all_texts(rows, texts, are_text=True), True))
        as_talk = iter(self._tokenized(_all_texts(rows, texts, are_text=False), False))
        found: list[list[Tokens] | BadRow] = []
        for (place, row), parts in zip(rows, texts, strict=True):
            if isinstance(parts, BadRow):
                found.append(parts)
                continue
            source = as_text if row.text else as_talk
            encoded = [next(source) for _ in parts]
            bad = next((one for one in encoded if isinstance(one, BadRow)), None)
            found.append(bad or self._documents(place, row, parts, encoded))
        return found

    def _texts(self, place: str, row: Row) -> list[RenderedText] | BadRow:
        if row.token_ids:
            return []
        if row.text:
            return [RenderedText(text=row.text, spans=())]
        try:
            if row.media:
                return self._with_media(row)
            if self.template is None or row.joined:
                return [self._joined(place, row)]
            if row.plain:
                self.template.check_unformatted(words_of(row.messages[0]["content"]))
            return render_row(self.template, row, self.train_on)
        except BadRow as bad:
            return bad

    def _with_media(self, row: Row) -> list[RenderedText]:
        """Return the texts of a row with media, in which tokens stand for them. Raises BadRow."""
        if self.template is None or row.joined:
            raise BadRow(MEDIA, "their places in a text are written by a chat template")
        media = self._opened_media()
        texts = render_row(self.template, row, self.train_on)
        return media.expanded(row, texts, self.template.render(row))

    def _opened_media(self) -> MediaProcessor:
        """Return what reads media, loaded for the first row that has some. Raises BadRow."""
        if self._media_settings is None:
            raise BadRow(MEDIA, "the folder of the model has no processor for media")
        if self._media is None:
            from megatrain.data.media.processing import MediaProcessor

            try:
                self._media = MediaProcessor(self._media_settings, self.tokenizer)
            except ModelFolderError as error:
                raise BadRow(MEDIA, str(error)) from error
        return self._media

    def _check_template(
        self, rows: Sequence[tuple[str, Row]], texts: Sequence[list[RenderedText] | BadRow]
    ) -> None:
        """Compare one conversation of many with the output of the library."""
        for (_, row), parts in zip(rows, texts, strict=True):
            if self.template is None or not row.messages or row.joined or isinstance(parts, BadRow):
                continue
            with suppress(BadRow):  # the template may refuse turns after the last answer
                self.template.check(row)
                return

    def _check_processor(
        self, rows: Sequence[tuple[str, Row]], texts: Sequence[list[RenderedText] | BadRow]
    ) -> None:
        """Compare one row with media of many with the tokens of its processor."""
        media = self._media
        for (place, row), parts in zip(rows, texts, strict=True):
            if media is None or not row.media or isinstance(parts, BadRow):
                continue
            assert self.template is not None
            with suppress(BadRow):  # a file that could be read a moment ago may be gone
                text = self.template.render(row)
                (whole,) = media.expanded(row, [RenderedText(text=text, spans=())], text)
                (ours,) = self._tokenized([whole.text], False)
                if isinstance(ours, BadRow):
                    continue
                theirs = media.tokens_of(row, text)
                if ours.ids != theirs:
                    raise DataError(
                        f"{place}: {len(ours.ids)} tokens here and {len(theirs)} by the model's "
                        "processor, which differ: the processor changes more of a text than the "
                        "places of media, so rows with media cannot be trained with this model"
                    )
                return

    def _joined(self, place: str, row: Row) -> RenderedText:
        """Join a prompt and its answer directly, as without a template."""
        if not row.plain:
            raise DataError(
                f"{place} is a conversation, but there is no chat template. Use the tokenizer of "
                "the chat model, set data.chat_template, or use prompt / completion or "
                "text."
            )
        prompt, answer = (message["content"] for message in row.messages)
        return RenderedText(text=prompt + answer, spans=((len(prompt), len(prompt + answer)),))

    def _tokenized(self, texts: list[str], with_first: bool) -> list[_EncodedText | BadRow]:
        """Return the tokens of many texts by one call; one by one only if that fails."""
        if not texts:
            return []
        # This call leaves the backend without padding and truncation, which files may ask for; its
        # own method for many texts costs a twentieth more than reading the backend's result.
        self.tokenizer("", verbose=False)
        try:
            encodings = self.tokenizer.backend_tokenizer.encode_batch(
                texts, add_special_tokens=with_first
            )
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # tokenizers raise some that are not an Exception
            if len(texts) > 1:
                return [one for text in texts for one in self._tokenized([text], with_first)]
            return [BadRow(TOKENIZER_REFUSED, f"{type(error).__name__}: {error}"[:120])]
        return [
            _EncodedText(text=text, ids=encoding.ids, encoding=encoding)
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def _documents(
        self, place: str, row: Row, parts: Sequence[RenderedText], encoded: Sequence[Any]
    ) -> list[Tokens]:
        if row.token_ids:
            return [Tokens(input_ids=list(row.token_ids), runs=row.trained_runs)]
        if row.text:
            return [self._whole(encoded[0].ids)]
        documents = [self._masked(*pair) for pair in zip(parts, encoded, strict=True)]
        if self.template is None or row.joined:
            return [self._framed(documents[0])]
        for rendered, one in zip(parts, encoded, strict=True):
            if rendered.tags is not None:
                self._check_tags(place, rendered, one)
        return documents

    def _whole(self, ids: list[int]) -> Tokens:
        """Tokens as the tokenizer begins them, and an end of sequence; all are trained."""
        end = self.tokenizer.eos_token_id
        if end is not None and ids[-1:] != [end]:
            ids = [*ids, end]
        return Tokens(input_ids=ids, runs=merged_runs([(0, len(ids))]), num_open=int(end is None))

    def _framed(self, document: Tokens) -> Tokens:
        """A prompt and its answer between the tokens that begin and end a text.

        A row may already contain them: no token is written twice.
        """
        ids, last = document.input_ids, self.tokenizer.eos_token_id
        before = [] if ids[:1] == self._before else self._before
        after = [] if last is None or ids[-1:] == [last] else [last]
        ids = [*before, *ids, *after]
        end = [(len(ids) - len(after), len(ids))]
        runs = merged_runs([*moved(document.runs, len(before)), *end])
        if self.train_on == "all":
            runs = merged_runs([(0, len(ids))])
        return Tokens(input_ids=ids, runs=runs, num_open=int(last is None))

    def _masked(self, rendered: RenderedText, encoded: _EncodedText) -> Tokens:
        ids = encoded.ids
        spans = [encoded.tokens_in(span) for span in rendered.spans]
        turns = [self._without_tail(span, encoded) for span in spans]
        num_open = sum(begin == end or ids[end - 1] not in self.marks for begin, end in turns)
        runs = merged_runs(spans if self.train_on == "all" else turns)
        if not rendered.media:
            return Tokens(input_ids=ids, runs=runs, num_open=num_open, notes=rendered.notes)
        assert self._media is not None
        placed = []
        for one in rendered.media:
            begin, end = encoded.tokens_in((one.begin, one.end))
            placed.append(replace(one, begin=begin, end=end))
        return Tokens(
            input_ids=ids,
            runs=without(runs, [(one.begin, one.end) for one in placed]),
            num_open=num_open,
            notes=rendered.notes,
            media=tuple(placed),
            types=self._media.types(ids),
        )

    def _without_tail(self, run: CharSpan, encoded: _EncodedText) -> CharSpan:
        """Leave out white space after the last control token of a turn."""
        begin, end = run
        for number in range(end - 1, begin - 1, -1):
            if encoded.ids[number] in self.marks:
                return begin, number + 1
            if encoded.text[slice(*encoded.encoding.token_to_chars(number))].strip():
                return run
        return run

    def _check_tags(self, place: str, rendered: RenderedText, encoded: _EncodedText) -> None:
        """Raise DataError if the template's own tags name other tokens than the prefixes do."""
        assert rendered.tags is not None
        inside = [
            encoded.tokens_in((max(begin, rendered.begins_at), end)) for begin, end in rendered.tags
        ]
        by_tags = merged_runs(self._without_tail(run, encoded) for run in merged_runs(inside))
        by_prefixes = merged_runs(
            self._without_tail(encoded.tokens_in(span), encoded) for span in rendered.shown
        )
        if by_tags != by_prefixes:
            tagged, other = (Tokens(input_ids=encoded.ids, runs=r) for r in (by_tags, by_prefixes))
            raise DataError(_disagreement(place, tagged, other, self.tokenizer))


def answer_ends(tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
    """Return the tokens that training on the chat template ends an answer with.

    There may be a second one, which ends a call (`ChatTemplate.end_of`). Empty: there is no
    template, or it writes none.
    """
    if not tokenizer.chat_template:
        return []
    talk = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "y"})
    try:
        encoder = Encoder(tokenizer, template_kwargs=template_kwargs)
        (document,) = encoder.encode(Row(messages=talk))
    except (BadRow, DataError):
        return []
    trained = [token for begin, end in document.runs for token in document.input_ids[begin:end]]
    written = (token for token in reversed(trained) if str(tokenizer.decode([token])).strip())
    last = next(written, None)
    if last not in encoder.marks or encoder.template is None:
        return []
    _, call = encoder.template.next_marks
    return list(
        dict.fromkeys([last, *tokenizer(call.strip(), add_special_tokens=False)["input_ids"]])
    )


def _all_texts(
    rows: Sequence[tuple[str, Row]], texts: Sequence[list[RenderedText] | BadRow], *, are_text: bool
) -> list[str]:
    """Return the texts of all rows that are plain text, or of all that are not."""

    def chosen() -> Iterator[str]:
        for (_, row), parts in zip(rows, texts, strict=True):
            if bool(row.text) is are_text and not isinstance(parts, BadRow):
                yield from (part.text for part in parts)

    return list(chosen())


def _disagreement(place: str, tagged: Tokens, document: Tokens, tokenizer: Any) -> str:
    by_tags, by_prefixes = tagged.trained, document.trained
    at = next(i for i, (a, b) in enumerate(zip(by_tags, by_prefixes, strict=True)) if a != b)
    token = tokenizer.convert_ids_to_tokens(document.input_ids[at])
    who, other = ("tags", "prefixes") if by_tags[at] else ("prefixes", "tags")
    return (
        f"{place}: the chat template contradicts itself: its generation {who} train token {at} "
        f"({token!r}), its {other} do not. Tags train {sum(by_tags)} tokens, prefixes "
        f"{sum(by_prefixes)}. Put the answer and its end-of-turn token, and "
        "nothing else, between {% generation %} and {% endgeneration %}, or set "
        "data.chat_template to a template without these tags."
    )
