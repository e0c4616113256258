"""Micro-batches: every token once, labels where trained, documents isolated, sizes kept."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain.batch import MicroBatch, check_batch
from megatrain.data.media.placed import DocumentMedia
from megatrain.data.steps.micro_batches import micro_batches
from megatrain.data.steps.packing import pack
from megatrain.media import MediaItem
from megatrain.models.documents import attending
from testkit.made_documents import SPAN, MadeDocuments, real_tokens

_LENGTHS = st.lists(st.integers(2, 32), min_size=1, max_size=40)


def _made(
    lengths: list[int], packing: bool, most: int = 64, *, flat: bool = False
) -> tuple[MadeDocuments, list[MicroBatch]]:
    documents = MadeDocuments(lengths)
    rows = pack(lengths, 32) if packing else [[number] for number in range(len(lengths))]
    arrays = [np.array(row, dtype=np.int64) for row in rows]
    made = micro_batches(
        arrays, documents, micro_batch_tokens=most, packing=packing, flat=flat, pad_id=7
    )
    return documents, made


@given(lengths=_LENGTHS, packing=st.booleans(), flat=st.booleans())
def test_every_token_is_there_once(lengths: list[int], packing: bool, flat: bool) -> None:
    documents, made = _made(lengths, packing, flat=flat)
    expected = [int(t) for number in range(len(lengths)) for t in documents.tokens(number)[0]]
    assert sorted(real_tokens(made)) == sorted(expected)
    assert sum(micro.num_tokens for micro in made) == sum(lengths)
    check_batch(made, SPAN * 50)


class _Pictured(MadeDocuments):
    """Every other document has a picture, its tokens from the second to the last but one."""

    def media(self, document: int) -> DocumentMedia | None:
        if document % 2:
            return None
        types = np.ones(self.lengths[document], dtype=np.uint8)
        types[[0, -1]] = 0
        return DocumentMedia(digests=(str(document),), begins=(1,), token_types=types)


@pytest.mark.parametrize(("packing", "flat"), [(False, False), (True, False), (False, True)])
def test_each_document_has_its_own_media(packing: bool, flat: bool) -> None:
    lengths = [5, 9, 4, 4, 7, 5, 30]
    documents = _Pictured(lengths)
    rows = pack(lengths, 32) if packing else [[number] for number in range(len(lengths))]
    made = micro_batches(
        [np.array(row) for row in rows],
        documents,
        micro_batch_tokens=64,
        packing=packing,
        flat=flat,
        pad_id=7,
        items=lambda digest: MediaItem(kind="image", tensors={}, digest=digest),
    )
    check_batch(made, SPAN * 50)
    seen = []
    for micro in made:
        for one in micro.documents():
            number = int(one.input_ids[0, 0]) // SPAN
            seen.append(number)
            if micro.mm_token_type_ids is None:
                assert number % 2
                continue
            assert one.mm_token_type_ids is not None
            length, wanted = lengths[number], documents.media(number)
            types = [0] * length if wanted is None else wanted.token_types.tolist()
            assert one.mm_token_type_ids[0, :length].tolist() == types
            assert not one.mm_token_type_ids[0, length:].any()
            found = [item.digest for items in one.media for item in items]
            assert found == ([] if number % 2 else [str(number)])
    assert sorted(seen) == list(range(len(lengths)))


@given(lengths=_LENGTHS, packing=st.booleans(), flat=st.booleans())
def test_labels_are_the_trained_tokens_but_the_first(
    lengths: list[int], packing: bool, flat: bool
) -> None:
    documents, made = _made(lengths, packing, flat=flat)
    labels = [int(one) for micro in made for one in micro.labels[micro.labels != -100]]
    expected = []
    for number in range(len(lengths)):
        ids, trained = documents.tokens(number)
        expected += [int(one) for one in ids[1:][trained[1:]]]
    assert sorted(labels) == sorted(expected)
    for micro in made:
        kept = micro.labels != -100
        assert torch.equal(micro.labels[kept], micro.input_ids[kept])


@given(lengths=_LENGTHS, packing=st.booleans(), flat=st.booleans(), most=st.integers(32, 200))
def test_no_micro_batch_is_too_large(
    lengths: list[int], packing: bool, flat: bool, most: int
) -> None:
    _, made = _made(lengths, packing, most, flat=flat)
    assert max(micro.input_ids.numel() for micro in made) <= most


@given(lengths=_LENGTHS, layout=st.sampled_from([(True, True), (True, False), (False, True)]))
def test_positions_start_anew_at_each_document(
    lengths: list[int], layout: tuple[bool, bool]
) -> None:
    packing, flat = layout
    _, made = _made(lengths, packing, flat=flat)
    for micro in made:
        assert micro.attention_mask is None
        assert micro.position_ids is not None
        assert torch.equal(micro.position_ids, micro.input_ids % SPAN)
        assert (micro.labels[micro.position_ids == 0] == -100).all()


@given(lengths=_LENGTHS, packing=st.booleans(), most=st.integers(32, 200))
def test_flat_micro_batches_are_one_row_and_no_two_could_be_one(
    lengths: list[int], packing: bool, most: int
) -> None:
    _, made = _made(lengths, packing, most=most, flat=True)
    assert all(len(micro.input_ids) == 1 for micro in made)
    assert sum(micro.input_ids.numel() for micro in made) == sum(lengths), "no padding"
    sizes = sorted(micro.num_tokens for micro in made)
    assert len(sizes) == 1 or sizes[0] + sizes[1] > most


def _model(attention: str) -> Any:
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation=attention,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_do_not_see_each_other(attention: str) -> None:
    """The same logits as each document alone; without position ids they are others."""
    model = _model(attention)
    lengths = [9, 7, 16, 11]
    _, made = _made(lengths, packing=True)
    for micro in made:
        assert micro.position_ids is not None
        ids = micro.input_ids % 127
        packed = model(ids, position_ids=micro.position_ids, use_cache=False).logits
        mixed = model(ids, use_cache=False).logits
        for row, positions in enumerate(micro.position_ids):
            begins = [*torch.nonzero(positions == 0).flatten().tolist(), len(positions)]
            for begin, end in pairwise(begins):
                alone = model(ids[row : row + 1, begin:end], use_cache=False).logits[0]
                assert torch.allclose(packed[row, begin:end], alone, atol=1e-5)
                if begin > 0:
                    assert not torch.allclose(mixed[row, begin:end], alone, atol=1e-3)


@torch.no_grad()
def test_rows_that_are_laid_flat_have_the_bits_of_each_row_alone() -> None:
    model = _model("sdpa")
    _, (micro,) = _made([9, 7, 16, 11], packing=False, flat=True)
    documents, ids = micro.packed_documents(), micro.input_ids % 127
    assert documents is not None
    assert documents.lengths == (16, 11, 9, 7)
    with attending(documents):
        flat = model(ids, position_ids=micro.position_ids, use_cache=False).logits[0]
    mixed = model(ids, use_cache=False).logits[0]
    for begin, end in pairwise(documents.bounds.tolist()):
        alone = model(ids[:, begin:end], use_cache=False).logits[0]
        assert torch.equal(flat[begin:end], alone)
        assert torch.equal(mixed[begin:end], alone) is (begin == 0)


def test_padding_is_masked_and_not_counted() -> None:
    _, (micro,) = _made([4, 2], packing=False)
    assert micro.input_ids.tolist() == [[0, 1, 2, 3], [SPAN, SPAN + 1, 7, 7]]
    assert micro.labels.tolist() == [[-100, -100, 2, 3], [-100, SPAN + 1, -100, -100]]
    assert micro.attention_mask is not None
    assert micro.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert micro.num_tokens == 6


def test_rows_of_like_length_go_together() -> None:
    _, made = _made([2, 30, 3, 31, 2, 32], packing=False, most=96)
    assert [micro.input_ids.shape for micro in made] == [(3, 32), (3, 3)]
