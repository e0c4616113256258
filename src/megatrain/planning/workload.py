"""What a step works on: a model as the sizes of its tensors, and so many tokens.

Plain numbers and no torch. A model is a few structures, each used by many layers: a layer's tensors
and its attention decide its bytes, its FLOPs and its working memory. Built from the dimensions of a
`config.json` (families.py), or exactly from a decoder (`shape_of`).

Laws (tests/planning/test_workload.py, tests/planning/catalog/test_families.py)
    1. Tensors from dimensions are those of the real skeleton, size for size.
    2. Bytes of a block in each kind are those of the layout.
    3. FLOPs of a dense model are 2 per weight of its matrices and token, and attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from megatrain.optim.states import STATES, StatesByName

if TYPE_CHECKING:
    from megatrain.models.decoder import Decoder

Dtype = Literal["bf16", "fp32"]
ParamRole = Literal["matrix", "experts", "table", "vector"]
PLANNED_PAGE = 4096
PLANNED_ALIGN = 256
"""As in memory/layout.py, which needs torch; a test holds them equal."""


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

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def padded(self) -> int:
        """Elements that it takes in a segment."""
        return -(-self.num_elements // PLANNED_ALIGN) * PLANNED_ALIGN


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

    @cached_property
    def params(self) -> int:
        return sum(tensor.num_elements for tensor in self.tensors)

    @cached_property
    def active_params(self) -> float:
        """Params that one token uses."""
        return sum(tensor.num_elements * self._share(tensor) for tensor in self.tensors)

    @cached_property
    def matmul_flops_per_token(self) -> float:
        """FLOPs of the products of forward, without attention."""
        roles = ("matrix", "experts")
        used = (t.num_elements * self._share(t) for t in self.tensors if t.role in roles)
        return 2.0 * sum(used)

    @cached_property
    def is_trained(self) -> bool:
        return any(tensor.trained for tensor in self.tensors)

    def _share(self, tensor: TensorShape) -> float:
        if tensor.role == "experts" and self.num_experts:
            return self.experts_per_token / self.num_experts
        return 1.0

    def elements(self, dtype: Dtype, *, fp32: bool, trained: bool | None = None) -> int:
        """Return the padded elements of the tensors that compute sees in fp32, or in bf16."""
        return sum(
            padded
            for (kept_fp32, is_trained), padded in self._padded.items()
            if (kept_fp32 or dtype == "fp32") is fp32 and trained in (None, is_trained)
        )

    @cached_property
    def _padded(self) -> dict[tuple[bool, bool], int]:
        """Padded elements by whether they are kept in fp32 and whether they are trained."""
        found: dict[tuple[bool, bool], int] = {}
        for tensor in self.tensors:
            key = tensor.fp32, tensor.trained
            found[key] = found.get(key, 0) + tensor.padded
        return found

    def weight_bytes(self, dtype: Dtype) -> int:
        """Return what a fetch of the block moves."""
        return 2 * self.elements(dtype, fp32=False) + 4 * self.elements(dtype, fp32=True)

    def gradient_bytes(self, dtype: Dtype) -> int:
        """Return what a drain of the block moves."""
        low = self.elements(dtype, fp32=False, trained=True)
        return 2 * low + 4 * self.elements(dtype, fp32=True, trained=True)

    def trained_elements(self) -> int:
        """Return what an update of the block walks, padding included."""
        return sum(padded for (_, trained), padded in self._padded.items() if trained)


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
    """What must be done to its published weights before they can be trained."""

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

    def renamed(self, name: str) -> ModelShape:
        return replace(self, name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and the tokens of one step."""

    model: ModelShape
    step_tokens: int
    """Tokens of one optimizer step."""
    batch_rows: int | None = None
    """Rows of a step that is counted in rows; its tokens are then the most it has."""
    sequence: int = 2048
    """Length of a row."""
    dtype: Dtype = "bf16"
    attn: str = "auto"
    """Attention implementation, as `model.attn`."""
    packed: bool = False
    """Rows hold several documents, which must not see each other."""
    max_grad_norm: float | None = 1.0
    """None: no clipping, so that updates may run in backward."""
    states: StatesByName = field(default_factory=lambda: STATES["adamw"], hash=False)
    """What the optimizer keeps beside the fp32 master, by StepSettings.state."""

    def with_step(self, tokens: int) -> Workload:
        """Return the workload with steps of so many tokens, and rows in proportion."""
        rows = self.batch_rows and max(1, round(self.batch_rows * tokens / self.step_tokens))
        return replace(self, step_tokens=tokens, batch_rows=rows)

    @property
    def step_setting(self) -> tuple[str, int]:
        """The setting that makes the step as long as it is, and its value."""
        if self.batch_rows is not None:
            return "train.batch_rows", self.batch_rows
        return "train.batch_tokens", self.step_tokens

    @property
    def masked(self) -> bool:
        """Whether attention is given a mask, and computes what the mask hides."""
        return self.packed and self.attn != "flash_attention_2"

    def num_micro(self, micro_batch_tokens: int) -> int:
        """Return the micro-batches of a step; the last may be smaller."""
        return -(-self.step_tokens // micro_batch_tokens)

    def micro_sizes(self, micro_batch_tokens: int) -> list[int]:
        """Return the tokens of each micro-batch of a step."""
        full, rest = divmod(self.step_tokens, micro_batch_tokens)
        return [micro_batch_tokens] * full + ([rest] if rest else [])


def shape_of(decoder: Decoder, name: str = "") -> ModelShape:
    """Return the shape of a decoder, tensor by tensor."""
    config = decoder.config
    facts = dict(config.to_dict())
    first, *layers, last = decoder.blocks
    structures, kinds = list[BlockShape](), list[int]()
    windows = layer_windows(facts, len(layers))
    table = decoder.model.get_input_embeddings().weight
    hidden = int(facts.get("hidden_size") or table.shape[1])
    for window, block in zip(windows, layers, strict=True):
        prefix = f"{decoder.layers_path}.{block.index - 1}."
        structure = _structure(block.params, prefix, facts, window, hidden)
        if structure not in structures:
            structures.append(structure)
        kinds.append(structures.index(structure))
    return ModelShape(
        name=name or str(config.model_type),
        family=str(config.model_type),
        vocab=int(table.shape[0]),
        hidden=hidden,
        embedding=BlockShape(tensors=tuple(_tensor(p, "", "table") for p in first.params)),
        structures=tuple(structures),
        layer_kinds=tuple(kinds),
        head=BlockShape(tensors=tuple(_tensor(param, "", None) for param in last.params)),
        tied=decoder.tied,
    )


def _structure(
    params: Iterable[Any], prefix: str, facts: dict[str, Any], window: int | None, hidden: int
) -> BlockShape:
    tensors = tuple(_tensor(param, prefix, None) for param in params)
    has_experts = any(tensor.role == "experts" for tensor in tensors)
    experts = expert_counts(facts) if has_experts else (0, 0)
    return BlockShape(
        tensors=tensors,
        attention=attention_of(facts, window),
        inner=_inner_width(tensors, experts, hidden),
        gated=_is_gated(tensors),
        num_experts=experts[0],
        experts_per_token=experts[1],
    )


def _tensor(param: Any, prefix: str, role: ParamRole | None) -> TensorShape:
    name = param.name.removeprefix(prefix)
    return TensorShape(
        name=name,
        shape=tuple(param.shape),
        role=role if role and len(param.shape) > 1 else role_of(name, param.shape),
        fp32=str(param.dtype) == "torch.float32",
        trained=param.trained,
    )


def role_of(name: str, shape: tuple[int, ...]) -> ParamRole:
    """Return the use of a layer's param; biases of experts only look like matrices."""
    if "experts" in name and "shared" not in name and len(shape) > 1:
        return "experts"
    return "matrix" if len(shape) == 2 else "vector"


_OUTWARD = ("down_proj", "mlp.c_proj", "fc2", "dense_4h_to_h", "fc_out")
"""How families call the matrix that leads out of the feed-forward."""


def _leads_out(tensor: TensorShape) -> bool:
    return any(name in tensor.name for name in _OUTWARD) and "bias" not in tensor.name


def _inner_width(tensors: Iterable[TensorShape], experts: tuple[int, int], hidden: int) -> int:
    width = 0
    for tensor in filter(_leads_out, tensors):
        among, used = experts if tensor.role == "experts" else (1, 1)
        width += tensor.num_elements * used // (among * hidden)
    return width


def _is_gated(tensors: Iterable[TensorShape]) -> bool:
    """Return whether two matrices, or one of twice the size, lead into the feed-forward."""
    inside = [tensor for tensor in tensors if "att" not in tensor.name]
    outward = sum(tensor.num_elements for tensor in inside if _leads_out(tensor))
    return sum(tensor.num_elements for tensor in inside) > 2.5 * outward


def expert_counts(facts: dict[str, Any]) -> tuple[int, int]:
    """Return how many experts a layer has and how many of them a token uses."""
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    count = next((int(facts[name]) for name in names if facts.get(name)), 0)
    used = ("num_experts_per_tok", "moe_k", "num_experts_per_token", "moe_top_k", "top_k_experts")
    return count, next((int(facts[name]) for name in used if facts.get(name)), 1)


def attention_of(facts: dict[str, Any], window: int | None) -> AttentionShape:
    """Return the attention that a config's dimensions describe."""
    heads = int(facts.get("num_attention_heads") or facts.get("n_head") or 1)
    hidden = int(facts.get("hidden_size") or facts.get("n_embd") or heads)
    kv_heads = int(facts.get("num_key_value_heads") or heads)
    if facts.get("kv_lora_rank"):
        head_dim = int(facts["qk_nope_head_dim"]) + int(facts["qk_rope_head_dim"])
        return AttentionShape(
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            value_dim=int(facts["v_head_dim"]),
            window=window,
        )
    head_dim = int(facts.get("head_dim") or hidden // heads)
    return AttentionShape(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        window=window,
        score_bytes=_SCORE_BYTES.get(str(facts.get("model_type")), 0),
    )


_SCORE_BYTES = {"gemma2": 13, "gpt_oss": 8}
_PERIODS = {
    "gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4, "olmo3": 4, "exaone4": 4,
    "llama4_text": 4,
}  # fmt: skip
"""Every so-many-th layer sees all tokens, where a config does not list its layers."""


def layer_windows(facts: dict[str, Any], num_layers: int) -> list[int | None]:
    """Return the window of each layer."""
    window = facts.get("sliding_window") or facts.get("attention_chunk_size")
    if not window or facts.get("use_sliding_window") is False:
        return [None] * num_layers
    types = facts.get("layer_types")
    if isinstance(types, list | tuple) and len(types) == num_layers:
        full = [kind == "full_attention" for kind in types]
    elif default := _PERIODS.get(str(facts.get("model_type"))):
        period = int(facts.get("sliding_window_pattern") or default)
        full = [(layer + 1) % period == 0 for layer in range(num_layers)]
    else:
        full = [False] * num_layers
    return [None if is_full else int(window) for is_full in full]
