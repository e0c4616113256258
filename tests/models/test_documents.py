"""Documents of a packed row are attended to alone: the oracle is the plain model on each alone.

Compared are the logits and the gradient of the embeddings, in bits. Gradients of weights are sums
over all tokens of a row, in the order of one product: they are compared in test_isolation.py.

Two things beside attention make bits depend on what else is in a row. The last few numbers of a
tensor are not computed in vectors: so lengths are multiples of 32. And experts get as many tokens
as chose them, and the sums of a product depend on its number of rows: so products of models with
experts are summed in double precision, on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    masking_utils,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from megatrain import compat
from megatrain.models import documents as by_document
from megatrain.models.attention import attention_replaced
from megatrain.models.documents import (
    BY_DOCUMENT,
    PackedDocuments,
    PutOffMask,
    attending,
    attends_by_document,
    masks_put_off,
)
from megatrain.models.isolation import BY_MASKS
from testkit.cases import in_dtypes
from testkit.families import FAMILIES, tiny_config

LENGTHS = (32, 96, 64)
DOCUMENTS = PackedDocuments(
    lengths=LENGTHS, bounds=torch.tensor([0, 32, 128, 192], dtype=torch.int32)
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
)


class _Doubled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Products in double precision: rounded, their bits do not depend on the order of sums."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _PRODUCTS:
            return func(*args, **(kwargs or {}))
        return func(*(one.double() for one in args), **(kwargs or {})).to(args[0].dtype)


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the largest square, as masks are."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() > 1 and len({*result.shape[-2:]}) == 1:
            self.largest = max(self.largest, result.shape[-1])
        return result


def _model(family: str, dtype: torch.dtype, attention: str | None = None) -> Any:
    torch.manual_seed(0)
    config = tiny_config(family)
    config.max_position_embeddings = sum(LENGTHS)  # of some families' masks
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.config._experts_implementation = "eager"
    return model.eval()


def _has_experts(model: Any) -> bool:
    return any("expert" in name or "router" in name for name, _ in model.named_modules())


def _row(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return embeddings, positions, and a gradient of the logits."""
    generator = torch.Generator().manual_seed(0)
    size = sum(LENGTHS)
    with torch.no_grad():
        ids = torch.randint(3, 300, (1, size), generator=generator)
        embeddings = model.get_input_embeddings()(ids)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    d_logits = torch.randn(1, size, 320, generator=generator).to(embeddings.dtype)
    return embeddings, positions, d_logits


def _through(model: Any, embeddings: Tensor, positions: Tensor, d_logits: Tensor) -> list[Tensor]:
    """Return logits, and the gradient of the embeddings."""
    given = embeddings.clone().requires_grad_()
    logits = model(inputs_embeds=given, position_ids=positions, use_cache=False).logits
    logits.backward(d_logits)
    assert given.grad is not None
    return [logits.detach(), given.grad]


def _alone(model: Any) -> list[Tensor]:
    parts = zip(*(tensor.split_with_sizes(LENGTHS, dim=1) for tensor in _row(model)), strict=True)
    found = [_through(model, *part) for part in parts]
    return [torch.cat(tensors, dim=1) for tensors in zip(*found, strict=True)]


def _together(model: Any, documents: PackedDocuments | None = DOCUMENTS) -> list[Tensor]:
    with attending(documents):
        return _through(model, *_row(model))


def _bits_equal(model: Any) -> bool:
    with _Doubled() if _has_experts(model) else nullcontext():  # type: ignore[no-untyped-call]
        return all(map(torch.equal, _together(model), _alone(model)))


# Law 1: each document alone, bit for bit.


@pytest.mark.few(7)
@pytest.mark.parametrize(("family", "dtype"), in_dtypes(sorted(BY_DOCUMENT)))
def test_a_packed_row_is_its_documents_alone_in_every_bit(family: str, dtype: str) -> None:
    assert _bits_equal(_model(family, DTYPES[dtype]))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "afmoe"])
def test_so_it_is_with_eager_attention(family: str) -> None:
    assert _bits_equal(_model(family, torch.float32, "eager"))


@pytest.mark.parametrize("family", sorted(set(FAMILIES) & BY_MASKS))
def test_families_that_keep_to_masks_cannot_do_without(family: str) -> None:
    with pytest.raises((TypeError, AttributeError)):
        _together(_model(family, torch.float32))


def test_documents_that_are_not_attended_to_alone_would_be_noticed() -> None:
    model = _model("llama", torch.float32)
    expected = _alone(model)
    for wrong in ((33, 95, 64), (192,), (96, 32, 64)):
        bounds = torch.tensor([0, *wrong], dtype=torch.int32).cumsum(0)
        found = _together(model, PackedDocuments(lengths=wrong, bounds=bounds))
        worst = max(
            float((one - two).abs().max()) for one, two in zip(found, expected, strict=True)
        )
        assert worst > 1e-3


def test_only_these_models_attend_by_document() -> None:
    llama, gptj = _model("llama", torch.float32).config, _model("gptj", torch.float32).config
    assert attends_by_document(llama, compiles=False)
    assert attends_by_document(llama, compiles=True)
    assert not attends_by_document(gptj, compiles=False)
    for attention, attends in {"eager": True, "flash_attention_2": False}.items():
        llama._attn_implementation = attention
        assert attends_by_document(llama, compiles=False) is attends


# Law 2: no mask but a document's.


@pytest.mark.parametrize(("family", "expected"), [("llama", True), ("bloom", False)])
def test_a_text_part_of_any_family_must_be_one_of_them(family: str, expected: bool) -> None:
    config = AutoConfig.for_model("llava", text_config={"model_type": family})
    assert by_document.by_document(config) is expected


@pytest.mark.parametrize(("family", "attention"), [("mistral", "sdpa"), ("gemma2", "eager")])
def test_no_tensor_of_tokens_by_tokens_is_made(family: str, attention: str) -> None:
    model = _model(family, torch.float32, attention)
    with _Largest() as by_masks:  # type: ignore[no-untyped-call]
        _together(model, documents=None)
    assert by_masks.largest == sum(LENGTHS)
    with _Largest() as alone:  # type: ignore[no-untyped-call]
        _together(model)
    assert alone.largest == max(LENGTHS)


# Law 3: the kernel gets the attention that the mask describes.


def _reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    _: Tensor,
    *longest: int,
    **options: Any,
) -> Tensor:
    """Return what torch's documentation says of varlen_attn, token by token."""
    before, after = options["window_size"]
    assert after == 0
    assert longest == (max(LENGTHS),) * 2
    group = query.shape[1] // key.shape[1]
    assert options["enable_gqa"] == (group > 1)
    output = torch.empty_like(query)
    for begin, end in pairwise(bounds.tolist()):
        for token in range(begin, end):
            first = begin if before < 0 else max(begin, token - before)
            keys = key[first : token + 1].repeat_interleave(group, dim=1)
            values = value[first : token + 1].repeat_interleave(group, dim=1)
            scores = torch.einsum("hw,khw->hk", query[token], keys) * options["scale"]
            output[token] = torch.einsum("hk,khw->hw", scores.softmax(-1), values)
    return output


@contextmanager
def _kernel_here(patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let the kernel be the reference, on this device; yield the windows it was asked for."""
    asked: list[int] = []

    def kernel(*args: Any, **options: Any) -> Tensor:
        asked.append(options["window_size"][0])
        return _reference(*args, **options)

    def takes(query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Any) -> bool:
        return mask.window is not None

    with patch.context() as changed:
        changed.setattr(compat, "document_kernel", lambda: kernel)
        changed.setattr(by_document, "_kernel_takes", takes)
        yield asked


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "windows"),
    [("llama", {-1}), ("mistral", {15}), ("gemma3_text", {15}), ("cohere2", {-1, 15})],
)
def test_the_kernel_is_asked_for_the_attention_that_masks_describe(
    family: str, windows: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(family, torch.float32)
    embeddings, positions, _ = _row(model)
    expected = model(inputs_embeds=embeddings, position_ids=positions, use_cache=False).logits
    with _kernel_here(monkeypatch) as asked, attending(DOCUMENTS):
        found = model(inputs_embeds=embeddings, position_ids=positions, use_cache=False).logits
    assert set(asked) == windows
    assert torch.allclose(found, expected, atol=1e-5)


def test_the_kernel_is_not_asked_for_what_it_cannot_do() -> None:
    config = _model("llama", torch.float32).config
    query = torch.zeros(1, 4, 8, 16, dtype=torch.bfloat16)
    make = masking_utils.create_causal_mask
    with masks_put_off():
        plain: Any = make(config, query[0], None, None)
        other: Any = make(config, query[0], None, None, or_mask_function=lambda *_: True)
    assert (plain.window, other.window) == (0, None)
    assert not by_document._kernel_takes(query, query, query, plain, {})  # it is on the host


# Law 4: transformers is as it was.


def test_a_model_may_take_all_tokens_of_a_mask_and_no_others() -> None:
    """Gemma 4 takes the last `logits_to_keep` tokens, which are all if it is 0."""
    mask = PutOffMask(own=lambda **_: None, asked={}, window=0)
    assert mask[:, :, slice(-0, None), :] is mask
    with pytest.raises(TypeError, match="has all tokens"):
        mask[:, :, slice(-1, None), :]


def test_transformers_has_its_own_functions_after_a_failure() -> None:
    before = _functions()

    def fail() -> None:
        with attending(DOCUMENTS):
            assert _functions() != before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert _functions() == before


def _functions() -> list[Any]:
    return [
        dict(AttentionInterface._global_mapping),
        dict(AttentionMaskInterface._global_mapping),
        masking_utils.find_packed_sequence_indices,
        masking_utils.sliding_window_causal_mask_function,
    ]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_heard_inside_is_still_by_document(attention: str) -> None:
    model = _model("llama", torch.float32, attention)
    calls: list[Any] = []

    def hear(own: Any, *args: Any, **options: Any) -> Any:
        calls.append(own)
        assert own is not sdpa_attention_forward
        return own(*args, **options)

    with attending(DOCUMENTS), attention_replaced(hear):
        found = _through(model, *_row(model))
    assert len(calls) == model.config.num_hidden_layers
    assert all(map(torch.equal, found, _alone(model)))
