"""The kinds of numbers that a store keeps for each element of a param, as plain data.

    hi, lo   the fp32 master: the weight as compute sees it, and the rest of the master's bits
    grad     gradients that wait for the global norm
    others   the states that an optimizer declares (optim/states.py)

Without torch: a plan counts the bytes of a store from the same declarations that allocate it.

Law (tests/memory/test_kinds.py, tests/planning/memory/test_predicted.py): bytes and traffic follow
from the declared states, in the plan as in the store.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1}
"""Bytes of a number, by torch's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorKind:
    """One arena of the store. Where its bytes live is the store's concern."""

    HI: ClassVar[TensorKind]
    """Weights as compute sees them: bf16, or fp32 where a param is fp32."""
    LO: ClassVar[TensorKind]
    """The other 16 bits of the fp32 master of a bf16 weight."""
    GRAD: ClassVar[TensorKind]
    """Gradients that wait for the global norm, in the dtype of the weights."""

    name: str
    """Prefix of its tensors in a checkpoint: `name.param`."""
    purpose: str = field(compare=False)
    """Its line in a ledger."""
    bf16: str | None
    """Dtype of its numbers for a bf16 param; None if it has none."""
    fp32: str | None
    """The same for an fp32 param."""
    is_for_frozen: bool = False
    """Whether params that are not trained have it too."""
    is_for_matrices: bool = True
    """Whether matrices of hidden layers have it too."""
    elements_per_number: int = 1
    """More than 1 for a scale that a block of elements shares. Divides layout.ALIGN."""

    def __str__(self) -> str:
        return self.name

    def dtype(self, *, is_fp32: bool) -> str | None:
        """Return the dtype of its numbers for an fp32 or a bf16 param."""
        return self.fp32 if is_fp32 else self.bf16

    def bytes_per_element(self, *, is_fp32: bool = False) -> float:
        """Return its bytes for each element of a trained param."""
        dtype = self.dtype(is_fp32=is_fp32)
        return 0 if dtype is None else NUMBER_BYTES[dtype] / self.elements_per_number


TensorKind.HI = TensorKind(
    name="hi", purpose="weights (hi)", bf16="bfloat16", fp32="float32", is_for_frozen=True
)
TensorKind.LO = TensorKind(name="lo", purpose="master remainder (lo)", bf16="int16", fp32=None)
TensorKind.GRAD = TensorKind(
    name="grad", purpose="gradients (grad)", bf16="bfloat16", fp32="float32"
)


def state(
    name: str,
    purpose: str,
    dtype: str = "float32",
    elements_per_number: int = 1,
    *,
    is_for_matrices: bool = True,
) -> TensorKind:
    """Return a state that an optimizer keeps for each trained element."""
    return TensorKind(
        name=name,
        purpose=purpose,
        bf16=dtype,
        fp32=dtype,
        is_for_matrices=is_for_matrices,
        elements_per_number=elements_per_number,
    )


def store_kinds(states: Iterable[TensorKind], *, waits: bool) -> tuple[TensorKind, ...]:
    """Return the kinds of a store that trains; `waits`: gradients wait for the global norm."""
    return (TensorKind.HI, TensorKind.LO, *states, *([TensorKind.GRAD] if waits else []))


def kinds_on_disk(kinds: Iterable[TensorKind], tier: str) -> tuple[TensorKind, ...]:
    """Return those of a store's `kinds` that `StepSettings.tier` keeps on disk between updates."""
    return (
        ()
        if tier == "none"
        else tuple(k for k in kinds if k not in (TensorKind.HI, TensorKind.GRAD))
    )


def divides_matrices(kinds: Iterable[TensorKind]) -> bool:
    """Return whether matrices of hidden layers have other kinds than all other params."""
    return not all(kind.is_for_matrices for kind in kinds)


def kinds_of_matrices(kinds: Iterable[TensorKind]) -> tuple[TensorKind, ...]:
    """Return those of `kinds` that matrices of hidden layers have."""
    return tuple(kind for kind in kinds if kind.is_for_matrices)


def bytes_per_param(kinds: Iterable[TensorKind], *, is_fp32: bool = False) -> float:
    """Return the bytes of all `kinds` for a trained element."""
    return sum(kind.bytes_per_element(is_fp32=is_fp32) for kind in kinds)


def update_traffic(states: Iterable[TensorKind], *, is_fp32: bool = False) -> float:
    """Return the host memory traffic of an update, in bytes per element.

    Masters and states are read and written once, gradients are read.
    """
    written = bytes_per_param(store_kinds(states, waits=False), is_fp32=is_fp32)
    return 2 * written + TensorKind.GRAD.bytes_per_element(is_fp32=is_fp32)
