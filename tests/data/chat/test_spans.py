"""Spans: asking for the two ends of a run gives what looking at every token gives."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers, processors

from megatrain.data.chat.spans import clipped, mask_of, merged_runs, tokens_in, tokens_in_by_all
from testkit.tokenizers_of_kinds import made, tokenizer_of


def _trimming(trim: bool) -> Any:
    tokenizer = made(None, ("<s>", "</s>"), eos="</s>")
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    return tokenizer


def _composing() -> Any:
    """A tokenizer that changes the text first, so that characters come and go."""
    tokenizer = made(None, ("<s>", "</s>"), eos="</s>")
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Replace("x", "")]
    )
    return tokenizer


TOKENIZERS = {
    "trims": _trimming(True),
    "does not": _trimming(False),
    "changes": _composing(),
    "chat": tokenizer_of("zephyr"),
}
_TEXT = st.text(st.sampled_from("aeo x \n\u00e9\U0001f600\ufb01"), min_size=1, max_size=40)
_WORDS = st.lists(st.sampled_from(["hello", " ", "</s>", "two", "\n", "\U0001f600"]), min_size=1)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=_TEXT | _WORDS.map("".join), data=st.data())
def test_both_ways_give_the_same_tokens(kind: str, text: str, data: Any) -> None:
    encoding = TOKENIZERS[kind].backend_tokenizer.encode(text, add_special_tokens=False)
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(begin, len(text)))
    if begin == end:
        assert tokens_in((begin, end), encoding, len(text)) == (0, 0)
        return
    assert tokens_in((begin, end), encoding, len(text)) == tokens_in_by_all((begin, end), encoding)


_SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


@given(spans=_SPANS, start=st.integers(0, 30), stop=st.integers(0, 30))
def test_runs_are_sets_of_tokens(spans: list[tuple[int, int]], start: int, stop: int) -> None:
    spans = [(min(span), max(span)) for span in spans]
    held = {token for begin, end in spans for token in range(begin, end)}
    runs = merged_runs(spans)
    assert sum(end - begin for begin, end in runs) == len(held)
    assert {token for begin, end in runs for token in range(begin, end)} == held
    cut = clipped(runs, start, stop)
    assert {t + start for begin, end in cut for t in range(begin, end)} == {
        token for token in held if start <= token < stop
    }


@given(mask=st.lists(st.booleans(), max_size=50))
def test_runs_are_the_mask(mask: list[bool]) -> None:
    groups = groupby(range(len(mask)), key=lambda number: mask[number])
    found = [list(group) for value, group in groups if value]
    edges = [edge for run in found for edge in (run[0], run[-1] + 1)]
    assert mask_of(edges, len(mask)).tolist() == mask
