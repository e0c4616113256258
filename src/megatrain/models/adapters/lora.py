"""LoRA: a low-rank product, the only trained part, beside each linear module of the layers.

    output = W x + bias + (alpha / rank) B A dropout(x)        W, bias frozen; A, B trained

A target module of the skeleton changes its class and gets two params. It keeps its name and its own
params, so folders and blocks know those by the names that they always had:

    model.layers.0.self_attn.q_proj.weight    (out, in)     of the folder
    model.layers.0.self_attn.q_proj.lora_A    (rank, in)    drawn from the seed and this name
    model.layers.0.self_attn.q_proj.lora_B    (out, rank)   zero, so that training starts from W

DoRA puts a magnitude, as long as the output, in front of the sum of both:

    output = bias + m / |W + s B A| (W x + s B A x)            m trained too; | | of each row

The norms are made of products with W, A and B: PEFT makes the whole sum in each forward. They have
no gradient, there and here.

Params that are not the weight of a linear module, those of experts above all, are in params.py.
Operations and their order are those of PEFT. A param's first values depend on nothing but its
name, its shape and the seed: they are the same on any number of ranks.

Laws (tests/models/adapters/test_lora.py; against PEFT: proofs/adapters)
    1. Before the first update the model has the bits of its base.
    2. A target that matches no linear module of a layer is refused, with what would match, and so
       is a name that matches none of its other matrices.
    3. DoRA computes what its formula says, within rounding (tests/models/adapters/test_dora.py).
    4. Each linear module of the layers is a target, unless targets are named. Experts are none
       unless they are asked for; what is left out then is in `Adapters.left_out`.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from megatrain.choices import ALL_EXPERTS, ALL_LINEAR
from megatrain.errors import ConfigError, listing
from megatrain.models.adapters.params import adapt_param, adapted_class, is_experts
from megatrain.models.patterns import ends_like

MAGNITUDE = "lora_magnitude_vector"
_PARAM_NAMES = ("lora_A", "lora_B", MAGNITUDE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """The settings of low-rank adapters."""

    rank: int
    alpha: float
    dropout: float = 0.0
    """Probability with which an element of an adapter's input is dropped in training."""
    target_modules: tuple[str, ...] = ()
    """Patterns of module names, or of how they end; none: every linear module of the layers."""
    target_parameters: tuple[str, ...] = ()
    """Names of other matrices of the layers, or their ends: PEFT's `target_parameters`."""
    ranks: tuple[tuple[str, int], ...] = ()
    """Names, or their ends, with a star for any characters, and another rank; the first that
    matches counts."""
    alphas: tuple[tuple[str, float], ...] = ()
    """The same with another alpha."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank)."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained whole, by their names or how these end: PEFT's modules_to_save."""
    dora: bool = False
    """Train the magnitude of each row of a weight besides: linear modules alone."""
    fp32: bool = False
    """Compute adapters in fp32, whatever the model is computed in."""
    seed: int = 0
    """Seed of the first values."""

    def rank_of(self, name: str) -> int:
        """Return the rank of a module's adapter, or a param's."""
        return next((rank for pattern, rank in self.ranks if ends_like(name, [pattern])), self.rank)

    def scaling_of(self, name: str) -> float:
        """Return the factor of the product of a module's adapter, or a param's."""
        found = (alpha for pattern, alpha in self.alphas if ends_like(name, [pattern]))
        rank = self.rank_of(name)
        return next(found, self.alpha) / (math.sqrt(rank) if self.rslora else rank)

    def matches(self, module: str) -> bool:
        """Return whether a module's name, or its end after a dot, matches a target."""
        if not self.target_modules or ALL_LINEAR in self.target_modules:
            return True
        return ends_like(module, self.target_modules)

    def matches_param(self, name: str, module: nn.Module, param: Tensor) -> bool:
        """Return whether a param of a module that is not linear is to have an adapter."""
        if ALL_EXPERTS in self.target_parameters and is_experts(module, param):
            return True
        return ends_like(name, self.target_parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The adapters of a decoder."""

    lora: LoraConfig
    modules: tuple[str, ...]
    """The adapted linear modules, by their names in the model."""
    params: tuple[str, ...]
    """The adapted params of other modules, in the order of the model."""
    saved: tuple[str, ...]
    """The params of the model itself that are trained whole, beside adapters."""
    left_out: tuple[str, ...]
    """Matrices of the layers that have no adapter (routers, experts in one tensor); a name stands
    for all layers. Only where targets are not named."""


class AdaptedLinear(nn.Module):
    """A linear module with a low-rank product beside it: the first base of a module's new class."""

    lora_A: nn.Parameter  # noqa: N815  (PEFT's name)
    lora_B: nn.Parameter  # noqa: N815
    lora_magnitude_vector: nn.Parameter | None
    weight: Tensor
    bias: Tensor | None
    lora_scaling: float
    lora_dropout: float

    def forward(self, given: Tensor) -> Tensor:
        """Return the module's own output plus the product, or what DoRA makes of them."""
        output: Tensor = super().forward(given)
        inner = given.to(self.lora_A.dtype)
        drops = self.lora_dropout and self.training
        if drops:
            inner = F.dropout(inner, self.lora_dropout, self.training)
        product = F.linear(F.linear(inner, self.lora_A), self.lora_B)
        if self.lora_magnitude_vector is None:
            return (output + product * self.lora_scaling).to(output.dtype)
        # What is dropped for the product is dropped for the own weight, too, as PEFT has it.
        own = super().forward(inner.to(given.dtype)) if drops else output
        if self.bias is not None:
            own = own - self.bias
        factor = self.lora_magnitude_vector / self._row_norms()
        return (output + ((factor - 1) * own + factor * product * self.lora_scaling)).to(
            output.dtype
        )

    @torch.no_grad()
    def _row_norms(self) -> Tensor:
        """Return the norm of each row of W + s B A, (out,)."""
        weight = self.weight.T if isinstance(self, Conv1D) else self.weight
        a, b, scaling = self.lora_A.float(), self.lora_B.float(), self.lora_scaling
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
        mixed = ((weight @ a.T.to(weight.dtype)).float() * b).sum(1)
        change = (b @ (a @ a.T) * b).sum(1)
        # At first both are 0, and the root of a square is the number itself: m / norm is 1.
        norms: Tensor = (squares + 2 * scaling * mixed + scaling**2 * change).clamp_min(0).sqrt()
        return norms


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let a model compute as without its adapters until the block ends: products count 0 times.

    Not for DoRA, whose magnitudes stay.
    """
    modules: list[Any] = [m for m in model.modules() if hasattr(m, "lora_scaling")]
    shared: list[Any] = [m for m in model.modules() if hasattr(m, "lora_scalings")]
    before = [module.lora_scaling for module in modules]
    kept = [module.lora_scalings for module in shared]
    for module in modules:
        assert module.lora_magnitude_vector is None, "DoRA"
        module.lora_scaling = 0.0
    for module in shared:
        module.lora_scalings = dict.fromkeys(module.lora_scalings, 0.0)
    try:
        yield
    finally:
        for module, scaling in zip(modules, before, strict=True):
            module.lora_scaling = scaling
        for module, scalings in zip(shared, kept, strict=True):
            module.lora_scalings = scalings


def adapt_layers(model: nn.Module, layers_path: str, lora: LoraConfig) -> Adapters:
    """Give the target modules of a skeleton's layers their adapters. Raises ConfigError."""
    linear = {
        name: module
        for name, module in model.named_modules()
        if name.startswith(f"{layers_path}.")
        and _is_linear(module)
        and not _reads_weight(model.get_submodule(name.rpartition(".")[0]), name)
    }
    before = _matrices(model, layers_path)
    own = {f"{name}.weight": name for name in linear}
    params = [
        name
        for name, param in before.items()
        if name not in own and lora.matches_param(name, _holder(model, name), param)
    ]
    if lora.dora and params:
        raise ConfigError(
            "lora.dora is true and experts are to be adapted: DoRA is for linear modules, here and "
            "in PEFT. Remove lora.dora or lora.experts."
        )
    _refuse_unmatched_params(lora, before, params, layers_path)
    _refuse_unmatched(lora, list(linear), params, layers_path)
    modules = [name for name in linear if lora.matches(name)]
    for name in modules:
        _adapt(linear[name], name, lora)
    for name in params:
        own_name = name.rpartition(".")[2]
        adapt_param(
            _holder(model, name),
            own_name,
            lora.rank_of(name),
            lora.scaling_of(name),
            torch.float32 if lora.fp32 else None,
        )
    _refuse_unmatched_patterns(lora, [*modules, *params])
    adapted = {f"{name}.weight" for name in modules} | set(params)
    saved = _saved(model, lora, adapted)
    left_out = (
        [] if lora.target_modules else [_kind(name) for name in before if name not in adapted]
    )
    return Adapters(
        lora=lora,
        modules=tuple(modules),
        params=tuple(params),
        saved=saved,
        left_out=tuple(dict.fromkeys(left_out)),
    )


def _saved(model: nn.Module, lora: LoraConfig, adapted: set[str]) -> tuple[str, ...]:
    """Return the params of modules that are trained whole, by the first of their names."""
    first = {id(param): name for name, param in model.named_parameters()}
    found = dict[str, None]()
    for target in lora.modules_to_save:
        params = [
            first[id(param)]
            for name, module in model.named_modules()
            if ends_like(name, [target])
            for param in module.parameters()
        ]
        if not params:
            tables = [n for n, m in model.named_modules() if isinstance(m, nn.Embedding)]
            raise ConfigError(
                f"lora.modules_to_save: {target[:100]} matches no module with params. Embeddings "
                f"and the like are: {listing([*tables, 'lm_head'])}."
            )
        if twice := [name for name in params if name in adapted or is_adapter(name)]:
            raise ConfigError(
                f"lora.modules_to_save: {target[:100]} has {twice[0]}, which has an adapter. Leave "
                "it out of one of the two; lora.targets chooses what is adapted."
            )
        found.update(dict.fromkeys(params))
    return tuple(found)


def has_shared_experts(model: nn.Module, layers_path: str) -> bool:
    """Return whether layers have experts that share one tensor."""
    matrices = _matrices(model, layers_path)
    return any(is_experts(_holder(model, name), param) for name, param in matrices.items())


def is_adapter(name: str) -> bool:
    """Return whether a param of this name is part of an adapter."""
    return name.endswith(_PARAM_NAMES)


def first_values(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Return what an adapter's param starts with, in fp32."""
    values = torch.zeros(tuple(shape))
    if name.endswith("lora_A"):
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    return values


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module turns (..., in) into (..., out), as its weight says."""
    if type(module) in (nn.Linear, Conv1D):
        return True
    if not isinstance(module, nn.Linear):
        return False
    # A class of a family: routers are among them, which return more than a tensor.
    try:
        given = torch.empty((1, 1, module.in_features), dtype=module.weight.dtype, device="meta")
        output = functional_call(module, dict(module.named_parameters()), (given,))
    except Exception:  # what is not linear can fail in any way
        return False
    return isinstance(output, Tensor) and output.shape == (1, 1, module.out_features)


def _reads_weight(parent: nn.Module, name: str) -> bool:
    """Return whether the code around a module multiplies by its weight without calling it.

    An adapter would have no effect there, or on some devices only (kernels of state spaces).
    """
    name = name.rpartition(".")[2]
    read = re.compile(rf"self\.{re.escape(name)}\.weight\b(?!\[|\.(?:dtype|device|shape))")
    return any(map(read.search, _sources(type(parent))))  # type: ignore[arg-type]  # hashable


@cache
def _sources(kind: type) -> tuple[str, ...]:
    """Return the code of a class, as far as it is there: of what runs when it is called."""
    methods = [
        method
        for base in kind.__mro__
        if base not in nn.Module.__mro__
        for name, method in vars(base).items()
        if inspect.isfunction(method) and not name.startswith(("__init__", "_init"))
    ]
    with suppress(OSError, TypeError):
        return tuple(inspect.getsource(inspect.unwrap(method)) for method in methods)
    return ()


def _adapt(module: Any, name: str, lora: LoraConfig) -> None:
    weight, rank = module.weight, lora.rank_of(name)
    wide, narrow = weight.shape if type(module) is not Conv1D else reversed(weight.shape)
    module.__class__ = adapted_class(AdaptedLinear, type(module))  # type: ignore[arg-type]
    kind = torch.float32 if lora.fp32 else weight.dtype
    module.lora_A = nn.Parameter(weight.new_empty((rank, narrow), dtype=kind))
    module.lora_B = nn.Parameter(weight.new_empty((wide, rank), dtype=kind))
    magnitude = None
    if lora.dora:  # in fp32: what it is less 1 counts
        magnitude = nn.Parameter(weight.new_empty(wide, dtype=torch.float32))
    module.register_parameter(MAGNITUDE, magnitude)
    module.lora_scaling, module.lora_dropout = lora.scaling_of(name), lora.dropout


def _refuse_unmatched(
    lora: LoraConfig, linear: list[str], params: list[str], layers_path: str
) -> None:
    if not linear and not params:
        raise ConfigError(
            f"lora: the layers in {layers_path} have no linear module, so nothing can be adapted"
        )
    # The module of an adapted param is a target that adds nothing: folders name it, and it leaves
    # linear modules out where experts alone are wanted.
    known = [*linear, *{name.rpartition(".")[0] for name in params}]
    for target in lora.target_modules:
        alone = LoraConfig(rank=1, alpha=1, target_modules=(target,))
        if not any(map(alone.matches, known)):
            ends = dict.fromkeys(name.rpartition(".")[2] for name in linear)
            raise ConfigError(
                f"lora.targets: {target} matches no linear module of the layers in {layers_path}, "
                "and only those can be targets (no embedding, no output projection; lora.experts "
                f"adapts experts that share one tensor). They are: {listing(ends)}."
            )


def _refuse_unmatched_params(
    lora: LoraConfig, matrices: dict[str, nn.Parameter], adapted: list[str], layers_path: str
) -> None:
    for name in lora.target_parameters:
        if name == ALL_EXPERTS and not adapted:
            raise ConfigError(
                f"lora.experts: the layers in {layers_path} have no experts that share one tensor. "
                "Remove it; experts that are linear modules are adapted without it."
            )
        if name != ALL_EXPERTS and not any(ends_like(matrix, [name]) for matrix in matrices):
            kinds = dict.fromkeys(map(_kind, matrices))
            raise ConfigError(
                f"lora.experts: {name[:100]} matches no matrix of the layers in {layers_path}. "
                f"They are: {listing(kinds)}."
            )


def _refuse_unmatched_patterns(lora: LoraConfig, adapted: list[str]) -> None:
    patterns = {"rank_pattern": lora.ranks, "alpha_pattern": lora.alphas}
    for key, pattern in ((key, pattern) for key, of in patterns.items() for pattern, _ in of):
        if not any(ends_like(name, [pattern]) for name in adapted):
            kinds = dict.fromkeys(map(_kind, adapted))
            raise ConfigError(
                f"lora.{key}: {pattern[:100]} matches nothing that is adapted: {listing(kinds)}."
            )


def _matrices(model: nn.Module, layers_path: str) -> dict[str, nn.Parameter]:
    return {
        name: param
        for name, param in model.named_parameters()
        if name.startswith(f"{layers_path}.") and param.dim() > 1
    }


def _holder(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _kind(name: str) -> str:
    """Return a param's name with a star for each number of a layer or an expert."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)
