"""The documents of a packed row, each attended to alone.

A packed micro-batch is one row: documents one after the other, each with positions from 0. Their
tokens meet in attention only. While a `PackedDocuments` is attended to, attention runs once for
each document, on its own slice of the row, with the mask that transformers would make for the
document alone: none for plain causal attention, else one as large as the document. Masks for the
whole row are not made. What a layer adds to attention (soft-cap, sinks, a window) is its own code
and stays. On a device one kernel of torch 2.12 or newer takes all documents, if it can do what the
layer asks for: a call with two tokens finds out, once for each form of attention.

Layers that do something else with masks, or do not ask transformers for attention, are not
in BY_DOCUMENT. Those in models/isolation.py keep documents apart by masks. Some families forget to
tell transformers where documents begin, but take masks that were made before.

In a compiled layer attention is one operation of ours, which a graph does not look into: it finds
the documents when it runs, so one graph serves every list of lengths. It attends as above, and
once more in backward. It knows plain attention with windows, and no dropout.

Laws (tests/models/test_documents.py)
    1. In BY_DOCUMENT hidden states, logits and their gradients are those of the plain model on each
       document alone, bit for bit; in every other family something fails, or they are not.
    2. No tensor of tokens x tokens is made, but of a document.
    3. The kernel is asked for the attention that the mask describes, and only if it has that form.
    4. After the block, failed or not, transformers has its own functions again.
    5. Compiled layers have the bits of others, by a graph for all lists of lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import register_constant
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    PreTrainedConfig,
    masking_utils,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_masks_for_generate

from megatrain import compat
from megatrain.models.attention import (
    Answer,
    AttentionOutput,
    attention_is,
    attention_replaced,
)
from megatrain.models.multimodal import TEXT_PART, text_part

BY_DOCUMENT = frozenset(
    """
    afmoe apertus arcee aria_text axk1 beam bitnet cohere cohere2 cohere2_moe cwm deepseek_v2
    deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma
    gemma2 gemma3_text gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox gpt_oss
    granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe kolibri1 laguna llama mellum mimo_v2_flash
    minicpm3 minimax_m2 ministral ministral3 mistral mixtral modernbert-decoder nanochat nemotron
    olmo olmo2 olmo3 olmoe persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss
    smollm3 solar_open stablelm starcoder2 vaultgemma youtu
    """.split()  # noqa: SIM905
)
JOINT_BY_DOCUMENT = frozenset(
    """
    aria aya_vision cohere2_vision cohere_compass cosmos3_edge cosmos3_omni deepseek_vl
    deepseek_vl_hybrid exaone4_5 fuyu gemma3 glmasr got_ocr2 granite_speech granite_speech_plus
    hyperclovax_vision_v2 idefics2 idefics3 internvl janus kimi_k25 lighton_ocr llava llava_next
    llava_next_video llava_onevision mistral3 moss_transcribe_diarize ovis2 phi4_multimodal
    pp_chart2table qianfan_ocr qwen2_audio qwen3_asr qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe
    smolvlm vibevoice_asr video_llama_3 video_llava vipllava voxtral
    """.split()  # noqa: SIM905
)
"""Joint families of which the same is true for text. Where the text part may be of any family, it
must be one of BY_DOCUMENT too."""
TAKES_MASKS = frozenset({"afmoe", "gpt_oss"})
"""Families (as of transformers 5.22) that forget, and take a mask for each kind of layer."""
_NO_WINDOW = 0
_WIDTHS = 8
"""The kernel takes heads of widths that are a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedDocuments:
    """Lengths and bounds of the documents of one row."""

    lengths: tuple[int, ...]
    bounds: Tensor
    """0 and the end of each document, on the device of the row. int32, (documents + 1,)"""

    @property
    def longest(self) -> int:
        return max(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOffMask:
    """A layer's argument in place of a mask: it makes the mask of a document of any length."""

    own: Callable[..., Tensor | None]
    """Transformers' function."""
    asked: Mapping[str, Any]
    """Its arguments, for the whole row."""
    window: int | None
    """The number of tokens seen, 0: all; None: the mask has another form."""

    def of(self, length: int) -> Tensor | None:
        """Return the mask of a document alone; None: attention is plainly causal."""
        return self.own(**{**self.asked, "q_length": length, "kv_length": length})

    def __getitem__(self, part: tuple[slice, ...]) -> PutOffMask:
        """Return the mask for all tokens: Gemma 4 takes those whose logits it is asked for."""
        if all(one in (slice(None), slice(0, None)) for one in part):
            return self
        raise TypeError("a mask that is put off has all tokens")


def attends_by_document(config: PreTrainedConfig, *, compiles: bool) -> bool:
    """Return whether a packed row of this model can be attended to by document."""
    text = text_part(config)
    takes = ("sdpa",) if compiles else ("sdpa", "eager")
    drops = compiles and bool(getattr(text, "attention_dropout", 0.0))
    return text._attn_implementation in takes and not drops and by_document(config)


def by_document(config: PreTrainedConfig) -> bool:
    """Return whether the layers of a model can attend to each document alone."""
    text = text_part(config)
    if config.sub_configs.get(TEXT_PART) is AutoConfig and text.model_type not in BY_DOCUMENT:
        return False
    return config.model_type in BY_DOCUMENT | JOINT_BY_DOCUMENT


@contextmanager
def attending(documents: PackedDocuments | None) -> Iterator[None]:
    """Let every layer called meanwhile attend to each document alone; None: as it always does."""
    if documents is None:
        yield
        return

    def receive(own: Answer, module: nn.Module, *given: Any, **options: Any) -> AttentionOutput:
        return _attend(documents, own, module, *given, **options)

    own = _Functions.now()
    with masks_put_off(), attention_replaced(receive):
        _attended.append(documents)
        _own.append(own)
        try:
            yield
        finally:
            _own.pop()
            _attended.pop()


@contextmanager
def attending_as_ever() -> Iterator[None]:
    """Let what is called meanwhile, also inside `attending`, attend as it always does: towers."""
    if not _own:
        yield
        return
    now = _Functions.now()
    _own[-1].put()
    try:
        yield
    finally:
        now.put()


class _Functions(NamedTuple):
    """The functions of transformers that make masks and attend."""

    attention: dict[str, Any]
    masks: dict[str, Any]
    find: Any
    slide: Any

    @classmethod
    def now(cls) -> _Functions:
        return cls(
            dict(AttentionInterface._global_mapping),
            dict(AttentionMaskInterface._global_mapping),
            masking_utils.find_packed_sequence_indices,
            masking_utils.sliding_window_causal_mask_function,
        )

    def put(self) -> None:
        for names, found in (
            (AttentionInterface._global_mapping, self.attention),
            (AttentionMaskInterface._global_mapping, self.masks),
        ):
            names.clear()
            names.update(found)
        masking_utils.find_packed_sequence_indices = self.find
        masking_utils.sliding_window_causal_mask_function = self.slide


_own: list[_Functions] = []
"""What was there before documents were attended to; the last counts."""


_attended: list[PackedDocuments] = []
"""Documents that layers attend to now; the last counts."""


@dataclass(frozen=True, slots=True)
class WindowMask:
    """A PutOffMask as a graph has it: a constant."""

    window: int


register_constant(WindowMask)


@contextmanager
def attending_in_graph() -> Iterator[Callable[[Any], Any]]:
    """Let a compiled layer that is called meanwhile attend to documents, if there are any.

    Yields what to do with each of its arguments.
    """
    if not _attended:
        yield lambda argument: argument
        return
    with attention_is(_attend_in_graph):
        yield _for_graph


def _for_graph(argument: Any) -> Any:
    if not isinstance(argument, PutOffMask):
        return argument
    assert argument.window is not None, "a mask of another form in a compiled layer"
    return WindowMask(argument.window)


def _attend_in_graph(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    **options: Any,
) -> AttentionOutput:
    assert isinstance(attention_mask, WindowMask), "a layer made its own mask"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend_operation(query, key, value, attention_mask.window, scale), None


@torch.library.custom_op("megatrain::attend_to_documents", mutates_args=())
def attend_operation(
    query: Tensor, key: Tensor, value: Tensor, window: int, scale: float
) -> Tensor:
    """Return the attention of each document that is attended to now. (1, tokens, heads, width)"""
    # Also here: whether there is a kernel is found out by a call that goes back through it.
    with compat.autograd_in_operation(), torch.no_grad():
        return _attend_plainly(query, key, value, window, scale).contiguous()


@attend_operation.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, window: int, scale: float) -> Tensor:
    _, heads, tokens, _ = query.shape
    return query.new_empty((1, tokens, heads, value.shape[-1]))


@torch.library.custom_op("megatrain::attend_to_documents_backward", mutates_args=())
def _attend_back(
    d_output: Tensor, query: Tensor, key: Tensor, value: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values: attention is computed once more."""
    with compat.autograd_in_operation(), torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        output = _attend_plainly(leaves[0], leaves[1], leaves[2], window, scale)
        found = torch.autograd.grad(output, leaves, d_output)
    d_query, d_key, d_value = (gradient.contiguous() for gradient in found)
    return d_query, d_key, d_value


@_attend_back.register_fake
def _(
    d_output: Tensor, query: Tensor, key: Tensor, value: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    made = (query.new_empty(tensor.shape) for tensor in (query, key, value))
    d_query, d_key, d_value = made
    return d_query, d_key, d_value


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(query, key, value)


def _back(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
    return *_attend_back(d_output, *ctx.saved_tensors, ctx.window, ctx.scale), None, None


attend_operation.register_autograd(_back, setup_context=_keep)


def _attend_plainly(query: Tensor, key: Tensor, value: Tensor, window: int, scale: float) -> Tensor:
    """Return causal attention within each document that is attended to now."""
    documents = _attended[-1]
    options = {"scaling": scale}
    mask = PutOffMask(own=partial(_window_mask, window, query.device), asked={}, window=window)
    layer: Any = _PlainLayer(query.shape[1] // key.shape[1])
    output, _ = _attend(
        documents, sdpa_attention_forward, layer, query, key, value, mask, **options
    )
    return output


class _PlainLayer(nn.Module):
    """What transformers' sdpa asks the module of a layer for."""

    is_causal = True

    def __init__(self, num_groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = num_groups


def _window_mask(
    window: int, device: torch.device, *, q_length: int, kv_length: int
) -> Tensor | None:
    """Return the mask of a document; None: attention is plainly causal."""
    if not window or window >= q_length:
        return None
    places = torch.arange(q_length, device=device)
    behind = places[:, None] - places[None, :]
    return ((behind >= 0) & (behind < window))[None, None]


@contextmanager
def masks_put_off() -> Iterator[None]:
    """Let models get a PutOffMask wherever transformers would make a mask.

    Where documents begin is not looked for, so no model asks the device about it.
    """
    names: dict[str, Any] = AttentionMaskInterface._global_mapping
    before = dict(names)
    find, slide = (
        masking_utils.find_packed_sequence_indices,
        masking_utils.sliding_window_causal_mask_function,
    )
    windows: dict[Any, int] = {masking_utils.causal_mask_function: _NO_WINDOW}

    def sliding(window: int) -> Any:
        made = slide(window)
        windows[made] = window
        return made

    def put_off(own: Callable[..., Tensor | None]) -> Callable[..., PutOffMask]:
        return lambda **asked: PutOffMask(
            own=own, asked=asked, window=windows.get(asked["mask_function"])
        )

    masking_utils.find_packed_sequence_indices = lambda _positions: None
    masking_utils.sliding_window_causal_mask_function = sliding
    names.update({name: put_off(before[name]) for name in ("sdpa", "eager")})
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find
        masking_utils.sliding_window_causal_mask_function = slide
        names.clear()
        names.update(before)


def _attend(
    documents: PackedDocuments,
    own: Answer,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    **options: Any,
) -> AttentionOutput:
    """Return the attention of each document, one after the other.

    Queries, keys and values are (1, heads, tokens, width).
    """
    assert isinstance(mask, PutOffMask), f"{type(module).__name__} made its own mask"
    if own is sdpa_attention_forward and _kernel_takes(query, key, value, mask, options):
        assert mask.window is not None
        output = _by_kernel(
            documents, query, key, value, window=mask.window, scaling=options.get("scaling")
        )
        return output, None
    # Not slices: the gradient of each would be a tensor of the whole row.
    lengths = documents.lengths
    cut = [tensor.split_with_sizes(lengths, dim=2) for tensor in (query, key, value)]
    parts = zip(*cut, strict=True)
    outputs = [own(module, *part, mask.of(part[0].shape[2]), **options)[0] for part in parts]
    return torch.cat(outputs, dim=1), None


def _kernel_takes(
    query: Tensor, key: Tensor, value: Tensor, mask: PutOffMask, options: Mapping[str, Any]
) -> bool:
    """Return whether the kernel can do this attention, on the device of its tensors."""
    if compat.document_kernel() is None or query.device.type in ("cpu", "meta"):
        return False
    if mask.window is None or query.shape[-1] != value.shape[-1]:
        return False
    if options.get("dropout") or options.get("is_causal") is False:
        return False
    return kernel_runs(
        KernelForm(
            device=query.device,
            dtype=query.dtype,
            heads=query.shape[1],
            key_heads=key.shape[1],
            width=query.shape[-1],
            has_window=mask.window != _NO_WINDOW,
        )
    )


class KernelForm(NamedTuple):
    """A form of attention that a kernel has or has not."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    key_heads: int
    width: int
    has_window: bool


@cache
def kernel_runs(form: KernelForm) -> bool:
    """Return whether the kernel takes two tokens of this form, forward and backward.

    Cards, dtypes and libraries differ in what they take; whoever cannot do it refuses before it
    starts.
    """
    if form.dtype not in (torch.bfloat16, torch.float16):
        return False
    heads = (form.heads, form.key_heads, form.key_heads)
    with torch.enable_grad():
        query, key, value = (
            torch.zeros(
                1, count, 2, form.width, dtype=form.dtype, device=form.device, requires_grad=True
            )
            for count in heads
        )
        bounds = torch.arange(0, 3, 2, dtype=torch.int32, device=form.device)
        try:
            output = _by_kernel(
                PackedDocuments(lengths=(2,), bounds=bounds), query, key, value,
                window=1 if form.has_window else _NO_WINDOW, scaling=1.0,
            )  # fmt: skip
            torch.autograd.grad(output, (query, key, value), torch.zeros_like(output))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError):  # NotImplementedError is one too
            return False
    return True


def _by_kernel(
    documents: PackedDocuments,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int,
    scaling: float | None,
) -> Tensor:
    kernel = compat.document_kernel()
    assert kernel is not None
    bounds, longest, width = documents.bounds, documents.longest, query.shape[-1]
    output = kernel(
        *(_for_kernel(tensor) for tensor in (query, key, value)),
        bounds,
        bounds,
        longest,
        longest,
        scale=width**-0.5 if scaling is None else scaling,
        # Tokens before and after each; a window counts the token itself.
        window_size=(window - 1 if window else -1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[None, ..., :width]


def _for_kernel(tensor: Tensor) -> Tensor:
    """Return (1, heads, tokens, width) as (tokens, heads, width), of a width that kernels take."""
    flat = tensor[0].transpose(0, 1)
    missing = -tensor.shape[-1] % _WIDTHS
    if missing:
        return pad(flat, (0, missing))
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def with_packed_masks(
    config: PreTrainedConfig, dtype: torch.dtype, inputs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the inputs with ready masks if the rows are packed and the model needs them."""
    is_packed = "position_ids" in inputs and not {"attention_mask", "past_key_values"} & set(inputs)
    if config.model_type not in TAKES_MASKS or not is_packed:
        return inputs
    places = inputs["position_ids"]
    like_hidden = torch.empty((*places.shape, 1), dtype=dtype, device=places.device)
    masks = create_masks_for_generate(config, like_hidden, None, None, position_ids=places)
    return {**inputs, "attention_mask": masks}
