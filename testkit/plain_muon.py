"""The other side of Muon: torch.optim.Muon over the resident model, and AdamW by hand.

torch.optim.Muon has the matrices of layers, each expert as a matrix of its own; all other params
have AdamW as a textbook has it. Nothing here knows of stores, kernels or directions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatrain.batch import MicroBatch
from megatrain.models.decoder import Decoder
from megatrain.optim.optimizer import decays
from testkit.adamw_by_hand import HandAdamW, global_norm
from testkit.plain import plain_gradients


class PlainMuon:
    """The two optimizers of a model in fp32."""

    def __init__(
        self,
        model: PreTrainedModel,
        matrices: Collection[str],
        *,
        rate: float,
        weight_decay: float,
        decayed: Collection[str],
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self._params = {name: param.data for name, param in model.named_parameters()}
        self._matrices = {
            name: [nn.Parameter(one) for one in _single(self._params[name])]
            for name in sorted(matrices)
        }
        self._muon = torch.optim.Muon(
            [one for single in self._matrices.values() for one in single],
            lr=rate,
            weight_decay=weight_decay,
            momentum=momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        self._adamw = HandAdamW(
            {name: p for name, p in self._params.items() if name not in self._matrices},
            lr=rate,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decays=lambda name: name in decayed,
        )
        self._number = 0

    def step(self, gradients: Mapping[str, Tensor], scale: float = 1.0) -> None:
        """Apply the gradients of one step, scaled by the factor that clips them."""
        self._number += 1
        for name, single in self._matrices.items():
            for one, part in zip(single, _single(gradients[name]), strict=True):
                one.grad = part * scale
        self._muon.step()  # type: ignore[no-untyped-call]
        others = {name: gradients[name] for name in self._adamw.masters}
        self._adamw.update(others, self._number, scale)
        for name, master in self._adamw.masters.items():
            self._params[name].copy_(master)


def trained_by_torch(
    model: PreTrainedModel,
    decoder: Decoder,
    batches: Iterable[Sequence[MicroBatch]],
    clip_factor: Callable[[float], float],
    *,
    rate: float,
    weight_decay: float,
) -> dict[str, Tensor]:
    """Train the resident model on each batch; return its weights."""
    plain = PlainMuon(
        model,
        {name for block in decoder.blocks for name in block.hidden_matrices},
        rate=rate,
        weight_decay=weight_decay,
        decayed={param.name for param in decoder.params if decays(param)},
    )
    for batch in batches:
        gradients = plain_gradients(model, batch)[1]
        plain.step(gradients, clip_factor(global_norm(gradients.values())))
    return {name: param.detach() for name, param in model.named_parameters()}


def _single(param: Tensor) -> list[Tensor]:
    """Return the matrix itself, or those of experts, as views."""
    return [param] if param.dim() == 2 else list(param)
