"""The parts that all optimizers here share; engine/updates.py has the interface they fulfil.

An optimizer declares its states: the numbers that it keeps for each element beside the fp32 master.
The store holds them, a checkpoint saves them, a plan counts them. For an update the engine hands
over views (views.py). An optimizer keeps nothing between updates, takes no tensor out of the store,
and does not know where the bytes live or which part of a segment it was given.

Law (tests/optim/test_optimizer.py): a new optimizer needs no change in the engine. Lion, with one
state, trains to the bits of plain PyTorch.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from torch import Tensor

from megatrain.memory.kinds import TensorKind
from megatrain.models.decoder import Param
from megatrain.models.matrices import is_norm_or_bias
from megatrain.optim.groups import ParamGroup, grouped
from megatrain.optim.kernel import Kernel
from megatrain.optim.native import load_kernel
from megatrain.optim.views import Treatment, Views


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptimizer(abc.ABC):
    """Learning rate, decay and clipping. A subclass declares its states and computes an update.

    Safe to call from one thread at a time.
    """

    learning_rate: Callable[[int], float] | float
    """A number, or a function of the run's step, counted from 0."""
    weight_decay: float = 0.0
    groups: tuple[ParamGroup, ...] = ()
    """Params with a learning rate or a decay of their own."""
    max_grad_norm: float | None = None
    num_threads: int = 1
    kernel: Kernel = field(default_factory=load_kernel)

    @property
    @abc.abstractmethod
    def states(self) -> tuple[TensorKind, ...]:
        """The states that `update` is handed, in this order."""

    def rate(self, step: int, treatment: Treatment) -> float:
        """Return the learning rate of a step of the run, counted from 1."""
        rate = self.learning_rate
        return treatment.lr_ratio * (rate(step - 1) if callable(rate) else rate)

    def treated(self, params: Collection[Param]) -> dict[str, Treatment]:
        """Return the treatment of each param, by name.

        Raises ConfigError for a pattern of `groups` that matches none that is trained, and for a
        param in two groups.
        """
        own = grouped(self.groups, params)
        return {param.name: self._treatment(param, own.get(param.name)) for param in params}

    def _treatment(self, param: Param, group: ParamGroup | None) -> Treatment:
        decay = self.weight_decay if decays(param) else 0.0
        if group is not None and group.weight_decay is not None:
            decay = group.weight_decay
        return Treatment(1.0 if group is None else group.lr_ratio, decay)

    def squared_norm(self, gradient: Tensor) -> float:
        """Return the sum of squares; finite exactly when every element is."""
        return self.kernel.squared_norm(gradient, num_threads=self.num_threads)

    def clip_factor(self, norm: float) -> float:
        """Return the factor that brings a gradient of this norm to `max_grad_norm`, as torch's."""
        if self.max_grad_norm is None or norm == 0:
            return 1.0
        return min(1.0, self.max_grad_norm / (norm + 1e-6))

    def look_ahead(self, views: Views, gradient: Tensor, *, number: int, scale: float) -> None:
        """Make of `scale` x `gradient` the direction that is orthogonalized, in its place.

        Only of matrices that the optimizer keeps other states for; `update` then gets the result.
        """
        raise NotImplementedError(f"{type(self).__name__} has the same states for all params")

    @abc.abstractmethod
    def update(
        self, views: Views, gradient: Tensor, *, step: int, number: int, scale: float
    ) -> None:
        """Apply `scale` x `gradient` with the learning rate of `step`."""


def decays(param: Param) -> bool:
    """Return whether weight decay applies to this param: to all but norms and biases."""
    return not is_norm_or_bias(param.name, param.shape)
