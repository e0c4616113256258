"""A model as the sizes of its tensors. Plain numbers and no torch.

A model is a few structures, each used by many layers: a layer's tensors and its attention decide
its bytes, its FLOPs and its working memory. Built from a decoder (skeleton.py), or read from the
catalog of known models (catalog/known_models.py).

Laws (tests/planning/model/test_shapes.py)
    1. Bytes of a block in each kind are those of the layout.
    2. FLOPs of a dense model are 2 per weight of its matrices and token, and attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from megatrain.models.matrices import is_hidden_matrix
from megatrain.narrow import GRAIN, Form, form_bytes
from megatrain.quantization import Quantization

Dtype = Literal["bf16", "fp32"]
ParamRole = Literal["matrix", "experts", "table", "vector"]
ElementCut = Callable[[int], int]
"""Takes the elements of a segment, returns those that are meant: of one rank, or of all parts."""
PLANNED_PAGE = 4096
PLANNED_ALIGN = 256
"""The same as in memory/layout.py, which needs torch; a test holds them equal."""


SegmentKey = tuple[bool, bool, bool]
"""Whether the tensors of a segment are kept in fp32, trained, and matrices with other states."""
WIDENING_TRAFFIC = {"fp8": 19.0, "fp4": 23.0, "mxfp4": 11.0, "int4": 31.0, "nf4": 34.0}
"""Bytes of device memory that each element reads and writes while it is widened: counted from the
calls in models/widening.py, not measured."""


def whole(num_elements: int) -> int:
    """Return all elements of a segment: nothing is cut."""
    return num_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """One param."""

    name: str
    shape: tuple[int, ...]
    role: ParamRole = "vector"
    """`experts`: a token uses a part of it; `table`: rows are looked up, nothing is multiplied."""
    fp32: bool = False
    """Kept in fp32 whatever the model's dtype."""
    trained: bool = True
    apart: bool = False
    """A trained matrix of a layer that the optimizer keeps other states for than for the rest."""
    adapts: Literal["", "in", "out"] = ""
    """The half of an adapter that it is: rank x in, or out x rank."""
    form: Form = ()
    """Its narrow form, if the store keeps it so."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def padded(self) -> int:
        """Elements that it takes in a segment."""
        return -(-self.num_elements // PLANNED_ALIGN) * PLANNED_ALIGN

    def with_experts(self, count: int) -> TensorShape:
        """Return it with so many experts."""
        of_one = [replace(part, count=part.count // self.shape[0]) for part in self.form]
        form = tuple(replace(part, count=count * part.count) for part in of_one)
        return replace(self, shape=(count, *self.shape[1:]), form=form)

    @property
    def narrow_bytes(self) -> int:
        """Bytes that it takes in a segment of narrow params."""
        return -(-form_bytes(self.form) // PLANNED_ALIGN) * PLANNED_ALIGN


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """How a layer's tokens look at each other."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    """Tokens that one sees at most; None: all before it."""
    score_bytes: int = 0
    """Kept per score where attention is taken apart: soft-caps and sinks have no fused kernel."""

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * (self.head_dim + self.value_dim)

    def flops_per_token(self, sequence: int, *, masked: bool) -> float:
        """Return the FLOPs of forward per token. What a mask hides is computed all the same."""
        masked = masked or (self.window is not None and self.window < sequence)
        seen = sequence if masked else (sequence + 1) / 2
        return 2.0 * self.heads * (self.head_dim + self.value_dim) * seen


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """The embedding, a layer or the head. Its sums are made once: a search asks for them often."""

    tensors: tuple[TensorShape, ...]
    attention: AttentionShape | None = None
    inner: int = 0
    """Width of what a token's feed-forward computes: intermediate size, all its experts added."""
    gated: bool = True
    num_experts: int = 0
    experts_per_token: int = 0
    drops: bool = False
    """Its adapters have dropout: a copy of each input, and its mask."""

    @cached_property
    def params(self) -> int:
        return sum(tensor.num_elements for tensor in self.tensors)

    @cached_property
    def active_params(self) -> float:
        """Params that one token uses."""
        return sum(tensor.num_elements * self._share(tensor) for tensor in self.tensors)

    @cached_property
    def matmul_flops_per_token(self) -> float:
        """FLOPs of the products of forward, without attention; as many give inputs a gradient."""
        return self._product_flops(self.tensors)

    @cached_property
    def gradient_flops_per_token(self) -> float:
        """FLOPs of the products that give trained params their gradients."""
        return self._product_flops([tensor for tensor in self.tensors if tensor.trained])

    def _product_flops(self, tensors: Sequence[TensorShape]) -> float:
        roles = ("matrix", "experts")
        return 2.0 * sum(t.num_elements * self._share(t) for t in tensors if t.role in roles)

    @cached_property
    def is_trained(self) -> bool:
        return any(tensor.trained for tensor in self.tensors)

    @cached_property
    def attention_params(self) -> int:
        """Elements of its matrices before attention and behind it, feed-forward apart."""
        return sum(t.num_elements for t in self.tensors if "attn" in t.name and len(t.shape) > 1)

    def params_around_attention(self, hidden: int) -> tuple[int, int]:
        """Return the params whose results attention gets, and all others."""
        if self.attention is None:
            return 0, self.params
        out = self.attention.heads * self.attention.value_dim * hidden
        before = max(0, self.attention_params - out)
        return before, self.params - before

    @cached_property
    def trained_part(self) -> BlockShape:
        """The same block with nothing in it but what is trained."""
        return replace(self, tensors=tuple(tensor for tensor in self.tensors if tensor.trained))

    @cached_property
    def paged_tensors(self) -> tuple[TensorShape, ...]:
        """The matrices of experts, which can come in pages."""
        return tuple(t for t in self.tensors if t.role == "experts" and len(t.shape) == 3)

    @cached_property
    def without_experts(self) -> BlockShape:
        """The same block without the matrices of its experts."""
        rest = tuple(t for t in self.tensors if t not in self.paged_tensors)
        return replace(self, tensors=rest)

    def page_slot_bytes(self, count: int, element_bytes: int) -> int:
        """Return the room of its largest page: weights, and the bytes that they are made of."""
        sizes = (
            -(-t.num_elements * element_bytes // GRAIN) * GRAIN + form_bytes(t.form)
            for t in self._pages(count)
        )
        return max(sizes, default=0)

    def with_page(self, count: int) -> BlockShape:
        """Return the same block with one page in place of each matrix of experts."""
        found = self._with_pages.get(count)
        if found is None:
            found = replace(self, tensors=(*self.without_experts.tensors, *self._pages(count)))
            self._with_pages[count] = found
        return found

    @cached_property
    def _with_pages(self) -> dict[int, BlockShape]:
        return {}

    def _pages(self, count: int) -> list[TensorShape]:
        """Return the largest page of each matrix of experts."""
        return [
            t.with_experts(-(-t.shape[0] // min(count, t.shape[0]))) for t in self.paged_tensors
        ]

    @cached_property
    def adapted_widths(self) -> tuple[int, int, int]:
        """The inputs, ranks and outputs of its adapters for a token, each added up."""
        inputs = ranks = outputs = 0.0
        for tensor in self.tensors:
            times = self.experts_per_token if tensor.role == "experts" else 1
            if tensor.adapts == "in":
                ranks += tensor.shape[0] * self._share(tensor)
                inputs += tensor.shape[1] * times
            elif tensor.adapts == "out":
                outputs += tensor.shape[0] * times
        return round(inputs), round(ranks), round(outputs)

    def _share(self, tensor: TensorShape) -> float:
        if tensor.role == "experts" and self.num_experts:
            return self.experts_per_token / self.num_experts
        return 1.0

    def elements(
        self,
        dtype: Dtype,
        *,
        fp32: bool,
        trained: bool | None = None,
        apart: bool | None = None,
        cut: ElementCut = whole,
    ) -> int:
        """Return the padded elements of the tensors that compute sees in fp32, or in bf16."""
        asked = dtype, fp32, trained, apart, cut
        if (known := self._counted.get(asked)) is None:
            known = self._counted[asked] = sum(
                cut(padded)
                for (is_fp32, is_trained, is_apart), padded in self.segments(dtype).items()
                if is_fp32 is fp32 and trained in (None, is_trained) and apart in (None, is_apart)
            )
        return known

    @cached_property
    def _counted(self) -> dict[object, int]:
        """What `elements` has counted."""
        return {}

    def segments(self, dtype: Dtype) -> dict[SegmentKey, int]:
        """Return padded elements by whether compute sees them in fp32 and they are trained.

        Narrow params are not among them.
        """
        return self._segments[dtype]

    @cached_property
    def _segments(self) -> dict[Dtype, dict[SegmentKey, int]]:
        found: dict[Dtype, dict[SegmentKey, int]] = {"bf16": self._padded, "fp32": {}}
        for (_, trained, apart), padded in self._padded.items():
            key = True, trained, apart
            found["fp32"][key] = found["fp32"].get(key, 0) + padded
        return found

    @cached_property
    def _padded(self) -> dict[SegmentKey, int]:
        """Padded elements by whether they are kept in fp32, trained, and apart."""
        found: dict[SegmentKey, int] = {}
        for tensor in self.tensors:
            if not tensor.form:
                key = tensor.fp32, tensor.trained, tensor.apart
                found[key] = found.get(key, 0) + tensor.padded
        return found

    @cached_property
    def narrow_bytes(self) -> int:
        """Bytes of its narrow params."""
        return sum(tensor.narrow_bytes for tensor in self.tensors if tensor.form)

    def wide_bytes(self, dtype: Dtype) -> int:
        """Return the bytes of its narrow params when they are widened."""
        narrow = [tensor for tensor in self.tensors if tensor.form]
        return sum(t.padded * (4 if t.fp32 or dtype == "fp32" else 2) for t in narrow)

    @cached_property
    def widening_traffic(self) -> float:
        """Bytes of device memory that widening its params reads and writes."""
        return _widening_traffic(self.tensors)

    @cached_property
    def widening_of_pages(self) -> float:
        """The same of its experts alone."""
        return _widening_traffic(self.paged_tensors)

    @cached_property
    def matrices(self) -> tuple[TensorShape, ...]:
        """Those that are orthogonalized on the device before an update."""
        return tuple(tensor for tensor in self.tensors if tensor.apart)

    def weight_bytes(self, dtype: Dtype, cut: ElementCut = whole) -> int:
        """Return what a fetch of the block moves."""
        low = self.elements(dtype, fp32=False, cut=cut)
        high = self.elements(dtype, fp32=True, cut=cut)
        return 2 * low + 4 * high + cut(self.narrow_bytes)

    def gradient_bytes(self, dtype: Dtype, cut: ElementCut = whole) -> int:
        """Return what a drain of the block moves."""
        low = self.elements(dtype, fp32=False, trained=True, cut=cut)
        return 2 * low + 4 * self.elements(dtype, fp32=True, trained=True, cut=cut)

    def trained_elements(self, cut: ElementCut = whole) -> int:
        """Return what an update of the block walks, padding included."""
        return sum(cut(padded) for (_, trained, _), padded in self._padded.items() if trained)

    def matrix_elements(self, cut: ElementCut = whole) -> int:
        """Return those of them that are matrices with states of their own, padding included."""
        return sum(cut(padded) for (_, _, apart), padded in self._padded.items() if apart)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaShape:
    """Media of rows, and what the first block makes of them."""

    densest: tuple[tuple[int, int], ...]
    """Tokens of the rows with most media, added up, and how many of these stand for media."""
    sent_bytes: float
    """What a step reads for each token of an item: pixels and the like."""
    item_tokens: int
    """Tokens of one of the largest items, which the next fields describe."""
    held_bytes: tuple[int, int, int]
    """The most that the first block holds of one, two and three such items, beside text."""
    forward_flops: float
    backward_flops: float
    num_levels: int = 0
    """Layers that get features of media, besides the first."""
    masked: bool = False
    """Masks depend on the places of media, so that rows are attended to as a whole."""

    def most_tokens(self, tokens: int) -> float:
        """Return how many of so many tokens stand for media, in the rows with most of them."""
        before = (0, 0)
        for point in self.densest:
            if tokens <= point[0]:
                share = (tokens - before[0]) / (point[0] - before[0])
                return before[1] + share * (point[1] - before[1])
            before = point
        return before[1] * tokens / before[0]

    def usual_items(self, tokens: int) -> float:
        """Return how many such items so many tokens of any rows have."""
        whole, of_media = self.densest[-1]
        return tokens * of_media / whole / self.item_tokens

    def most_held(self, tokens: int) -> float:
        """Return what the first block holds of the media of so many tokens."""
        one, two, three = self.held_bytes
        count = max(1.0, self.most_tokens(tokens) / self.item_tokens)
        return one + (count - 1) * (two - one) if count < 2 else two + (count - 2) * (three - two)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model as sizes."""

    name: str
    family: str
    vocab: int
    hidden: int
    embedding: BlockShape
    structures: tuple[BlockShape, ...]
    """The layers that differ."""
    layer_kinds: tuple[int, ...]
    """For each layer, which structure it has."""
    head: BlockShape
    tied: bool
    """The output projection is the embedding's table."""
    weights: str = ""
    """A note on its published weights, where they are not plain bf16."""
    published: Quantization | None = None
    """How its published weights are quantized, if they are."""
    by_document: bool = True
    """Packed rows are attended to document by document, without masks (models/documents.py)."""
    packs: bool = True
    """Documents of a packed row are kept apart (models/isolation.py)."""
    packs_by_lengths: bool = True
    """Documents are kept apart with flash attention too, which takes their lengths."""
    tiled: bool = True
    """Its layers can be cut into tiles of tokens (models/tiled_layer.py)."""
    pages: bool = True
    """Its experts, if it has any, can come in pages (models/experts.py)."""
    positions: int | None = None
    """The most positions of a row, if the model declares them."""
    logit_copies: int = 0
    """Copies of a part of the logits that its soft cap or scale holds while they go back."""
    carried_params: int = 0
    """Parameters outside the text model: copied to exports, never loaded."""
    teacher: ModelShape | None = None
    """The model that it learns from, which is in memory before it."""
    media: MediaShape | None = None
    """The media of rows, and the towers that take them; None: there are none."""
    passed_width: int = 0
    """Numbers per token that layers get besides hidden states, in all (models/passed.py)."""

    def packs_with(self, attn: str) -> bool:
        """Return whether documents of a packed row are kept apart, with this `model.attn`."""
        return self.packs and (self.packs_by_lengths or not attn.startswith("flash"))

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def num_blocks(self) -> int:
        return self.num_layers + 2

    @property
    def layers(self) -> tuple[BlockShape, ...]:
        return tuple(self.structures[kind] for kind in self.layer_kinds)

    @property
    def blocks(self) -> tuple[BlockShape, ...]:
        return (self.embedding, *self.layers, self.head)

    @property
    def params(self) -> int:
        return sum(block.params for block in self.blocks)

    @property
    def trained_params(self) -> int:
        return sum(block.trained_part.params for block in self.blocks)

    @property
    def narrow_params(self) -> int:
        """Params that the store keeps in a narrow form."""
        return sum(t.num_elements for block in self.blocks for t in block.tensors if t.form)

    @property
    def is_adapted(self) -> bool:
        """Whether adapters are trained in place of the model's own params."""
        return any(tensor.adapts for layer in self.structures for tensor in layer.tensors)

    @property
    def trains_projection(self) -> bool:
        """Whether the output projection gets a gradient."""
        if self.tied:
            return self.embedding.is_trained
        return self.head.gradient_flops_per_token > 0

    @property
    def active_params(self) -> int:
        """Params that one token uses; a table counts fully, as is common."""
        return round(sum(block.active_params for block in self.blocks))

    @property
    def head_flops_per_token(self) -> float:
        """FLOPs of the output projection's forward."""
        return 2.0 * self.vocab * self.hidden

    def flops_per_token(self, sequence: int, *, masked: bool = False) -> float:
        """Return the FLOPs of one forward per token."""
        total = self.head_flops_per_token
        for layer in self.layers:
            total += layer.matmul_flops_per_token
            if layer.attention is not None:
                total += layer.attention.flops_per_token(sequence, masked=masked)
        return total

    @property
    def trained_part(self) -> ModelShape:
        """The same model with nothing in it but what is trained."""
        return replace(
            self,
            embedding=self.embedding.trained_part,
            structures=tuple(layer.trained_part for layer in self.structures),
            head=self.head.trained_part,
        )

    def with_matrices_apart(self) -> ModelShape:
        """Return the model for an optimizer that keeps other states for matrices of layers."""

        def apart(tensor: TensorShape) -> TensorShape:
            return replace(
                tensor, apart=tensor.trained and is_hidden_matrix(tensor.name, tensor.shape)
            )

        structures = tuple(
            replace(layer, tensors=tuple(map(apart, layer.tensors))) for layer in self.structures
        )
        return replace(self, structures=structures)

    def with_media(self, media: MediaShape) -> ModelShape:
        """Return the model for rows with media, whose towers are among its params already."""
        passed = self.passed_width + media.num_levels * self.hidden
        return replace(self, media=media, passed_width=passed)

    def renamed(self, name: str) -> ModelShape:
        return replace(self, name=name)


def _widening_traffic(tensors: Iterable[TensorShape]) -> float:
    parts = [matrices for tensor in tensors for matrices in tensor.form]
    return sum(WIDENING_TRAFFIC[part.method] * part.num_elements for part in parts)
