"""Attention by document on testkit/host_gpu, where torch's own `varlen_attn` runs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("testkit.host_gpu", exc_type=ImportError)

from megatrain import compat
from megatrain.models import documents
from megatrain.models.documents import (
    KernelForm,
    PackedDocuments,
    _by_kernel,
    attend_operation,
    attending,
    kernel_runs,
)

pytestmark = pytest.mark.hostgpu
AT = "hostgpu:0"
LENGTHS = (19, 5, 1, 24, 9)
BOUNDS = (0, 19, 24, 25, 49, 58)


def _inputs(heads: int, key_heads: int, width: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, count, sum(LENGTHS), width, generator=source, dtype=torch.bfloat16)
        for count in (heads, key_heads, key_heads, heads)
    ]


def _outcome(
    attend: Callable[..., Tensor], tensors: list[Tensor], device: str
) -> tuple[Tensor, ...]:
    """Return the output, (1, tokens, heads, width), and the gradients of its three arguments."""
    placed = [tensor.to(device) for tensor in tensors]
    leaves = [tensor.requires_grad_() for tensor in placed[:3]]
    output = attend(*leaves)
    gradients = torch.autograd.grad(output, leaves, placed[3].transpose(1, 2))
    return tuple(tensor.detach().cpu() for tensor in (output, *gradients))


def _by_one_kernel(window: int, bounds: tuple[int, ...] = BOUNDS) -> Callable[..., Tensor]:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        lengths = tuple(end - begin for begin, end in pairwise(bounds))
        documents = PackedDocuments(
            lengths=lengths, bounds=torch.tensor(bounds, dtype=torch.int32, device=query.device)
        )
        return _by_kernel(documents, query, key, value, window=window, scaling=0.3)

    return attend


def _alone(window: int) -> Callable[..., Tensor]:
    """Each document in torch's own attention for the CPU."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group = query.shape[1] // key.shape[1]
        cut = [
            tensor.repeat_interleave(tensor_group, 1).split_with_sizes(LENGTHS, dim=2)
            for tensor, tensor_group in ((query, 1), (key, group), (value, group))
        ]
        outputs = [_document(*qkv, window=window) for qkv in zip(*cut, strict=True)]
        return torch.cat(outputs, dim=2).transpose(1, 2)

    return attend


def _document(query: Tensor, key: Tensor, value: Tensor, *, window: int) -> Tensor:
    places = torch.arange(query.shape[2])
    back = places[:, None] - places
    mask = (back >= 0) & (back < window) if window else None
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=0.3
    )


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(4, 4, 16), (6, 2, 16), (4, 1, 12)])
def test_a_row_of_documents_has_the_bits_of_each_alone(
    heads: int, key_heads: int, width: int, window: int
) -> None:
    tensors = _inputs(heads, key_heads, width)
    found = _outcome(_by_one_kernel(window), tensors, AT)
    expected = _outcome(_alone(window), tensors, "cpu")
    for name, ours, theirs in zip(
        ("output", "query", "key", "value"), found, expected, strict=True
    ):
        if width % 8 == 0 and (heads == key_heads or name in ("output", "query")):
            assert torch.equal(ours, theirs), name
        else:  # zeros beside a head, and sums over a group in another order
            assert torch.allclose(ours.float(), theirs.float(), rtol=2e-2, atol=2e-2), name


@pytest.mark.parametrize("window", [0, 7])
def test_the_operation_of_compiled_layers_takes_the_kernel_and_its_bits(window: int) -> None:
    tensors = _inputs(4, 2, 16)
    bounds = torch.tensor(BOUNDS, dtype=torch.int32, device=AT)
    kernel_runs.cache_clear()
    with attending(PackedDocuments(lengths=LENGTHS, bounds=bounds)):
        found = _outcome(lambda *qkv: attend_operation(*qkv, window, 0.3), tensors, AT)
    assert kernel_runs(_form(has_window=bool(window)))
    assert kernel_runs.cache_info().hits > 0, "the operation has asked"
    expected = _outcome(_by_one_kernel(window), tensors, AT)
    assert all(map(torch.equal, found, expected))


def _form(**changes: Any) -> KernelForm:
    usual = KernelForm(
        device=torch.device(AT), dtype=torch.bfloat16, heads=4, key_heads=2, width=16,
        has_window=True,
    )  # fmt: skip
    return usual._replace(**changes)


def test_a_device_is_asked_once_whether_it_has_a_form_of_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel_runs.cache_clear()
    calls: list[None] = []
    kernel: Any = compat.document_kernel()

    def counted(*given: Any, **options: Any) -> Any:
        calls.append(None)
        return kernel(*given, **options)

    monkeypatch.setattr(compat, "document_kernel", lambda: counted)
    for _ in range(3):
        assert kernel_runs(_form())
    assert kernel_runs(_form(width=12))
    assert len(calls) == 2
    assert not kernel_runs(_form(dtype=torch.float32))
    assert not kernel_runs(_form(width=512))
    assert not kernel_runs(_form(device=torch.device("cpu")))


def test_a_full_device_is_not_taken_for_one_without_a_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel_runs.cache_clear()

    def full(*given: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(compat, "document_kernel", lambda: full)
        with pytest.raises(torch.OutOfMemoryError):
            kernel_runs(_form())
    assert kernel_runs(_form())


def test_the_kernel_is_not_asked_for_what_it_has_no_form_for() -> None:
    query = torch.zeros(1, 4, 8, 16, dtype=torch.bfloat16, device="hostgpu:1")

    def takes(window: int | None = 0, width: int = 16, **options: Any) -> bool:
        mask = documents.PutOffMask(own=lambda **asked: None, asked={}, window=window)
        return documents._kernel_takes(query, query, query[..., :width], mask, options)

    assert takes()
    assert takes(window=3)
    assert not takes(window=None)
    assert not takes(width=8)
    assert not takes(dropout=0.1)
    assert not takes(is_causal=False)
