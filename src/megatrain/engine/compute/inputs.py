"""The inputs of a step on the device: tokens, targets, rows, bounds, in one copy, sent ahead.

Before a step is played, every tensor that compute will read of its micro-batches is packed into one
buffer on the host, and what the model will ask about its inputs is asked there
(front_and_tail.py). The first fetch of the step, on lane in, sends the buffer. So no op of the
compute lane looks at host memory, and the host's part of it does not grow with tokens.

Where compute shares the host's memory its tensors are used as they are, and nothing is sent.

Who waits: nothing here does. All that computes follows FORWARD(0, m), which waits for the fetch of
the embedding. A batch is laid out when no op of an earlier step is under way.

Laws (tests/engine/compute/test_inputs.py)
    1. Tensors arrive bit for bit, whatever was laid out before.
    2. A step sends them once, in one copy, and the compute lane touches no element on the host.
    3. Room grows only if a batch needs more than any before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils.generic import is_flash_attention_requested

from megatrain.batch import MicroBatch
from megatrain.devices.device import Device, copy_bits
from megatrain.engine import optional
from megatrain.engine.compute.front_and_tail import Edges
from megatrain.engine.tape import HOST_GROWTH
from megatrain.errors import BatchError
from megatrain.losses.head import TrainedRows, trained_index, trained_rows
from megatrain.losses.loss import LossInputs
from megatrain.media import MEDIA
from megatrain.models.decoder import Decoder
from megatrain.models.documents import PackedDocuments, attending, attends_by_document
from megatrain.models.probing.host_answers import Answers
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.models.key_values import TextCache

_ALIGNMENT = 16
_Name = tuple[str, str]
RowsOf = Callable[[int], Tensor | None]
"""Takes a micro-batch; returns the row of each of its tokens, on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroInputs:
    """A micro-batch as compute reads it. Tensors are on the device, but for `on_host`."""

    on_host: Mapping[str, Any]
    """The arguments of the model's forward, on the host."""
    model: Mapping[str, Any]
    """The same on the device."""
    answers: Answers | None
    """Answers to the front's questions about them; None: it is to be asked when it runs."""
    rows: Tensor | None
    """The row of each token in a table that does not have all tokens. (rows, length)"""
    documents: PackedDocuments | None
    """Documents of a packed row, if they are attended to one by one."""
    loss: LossInputs
    trained: TrainedRows
    last_tokens: Tensor | None
    """Position of each row's last token among all tokens, in a prediction. (rows,)"""
    num_tokens: int
    """Real tokens: padding is not counted."""

    @property
    def mask(self) -> Tensor | None:
        """1 for tokens, 0 for padding; None: no padding."""
        return self.model.get("attention_mask")


class Inputs:
    """The room for the tensors of a batch, on both sides. It stays from step to step."""

    def __init__(
        self, device: Device, decoder: Decoder, edges: Edges, settings: StepSettings
    ) -> None:
        self._device = device
        self._edges = edges
        self._settings = settings
        self._takes_lengths = is_flash_attention_requested(decoder.text_config)
        self._decoder = decoder
        self._by_document = attends_by_document(decoder.config, compiles=settings.compile)
        self._masks_by_type = decoder.towers is not None and optional.towers.masks_by_type(
            decoder.model, decoder.towers
        )
        self._going = torch.empty(0, dtype=torch.uint8)
        self._there: Tensor | None = None

    @property
    def chunk(self) -> int:
        """Tokens whose logits exist at a time."""
        return self._settings.chunk_tokens

    def laid_out(
        self,
        batch: Sequence[MicroBatch],
        rows_of: RowsOf = lambda micro: None,
        *,
        predicts: bool = False,
        caches: Sequence[TextCache | None] | None = None,
    ) -> SentInputs:
        """Return what compute reads of each micro-batch, on its way. Nothing may be under way.

        Valid until the next call. `predicts`: of a prediction, with keys and values in `caches`.
        """
        micros: list[MicroInputs] = []
        made = [
            self._gathered(micro, rows_of(number), predicts, caches[number] if caches else None)
            for number, micro in enumerate(batch)
        ]
        if not self._device.own_memory:
            micros = [self._placed(one, one.tensors) for one in made]
            return SentInputs(micros=micros, send=lambda: 0)
        sizes = [_padded(t.nbytes) for one in made for t in one.tensors.values()]
        self._reserve(sum(sizes))
        assert self._there is not None
        start = 0
        for one in made:
            there: dict[_Name, Tensor] = {}
            for name, tensor in one.tensors.items():
                span = slice(start, start + tensor.nbytes)
                lay(self._going[span], tensor)
                there[name] = self._there[span].view(tensor.dtype).view(tensor.shape)
                start += _padded(tensor.nbytes)
            micros.append(self._placed(one, there))
        return SentInputs(micros=micros, send=_once(lambda: self._sent(start)))

    def _sent(self, num_bytes: int) -> int:
        assert self._there is not None
        if num_bytes:
            self._device.copy(self._there[:num_bytes], self._going[:num_bytes])
        return num_bytes

    def _reserve(self, num_bytes: int) -> None:
        if self._there is not None and self._there.nbytes >= num_bytes:
            return
        if self._there is not None:
            num_bytes = max(num_bytes, int(self._there.nbytes * HOST_GROWTH))
        self._device.unmap_host(self._going)
        self._there = None
        if self._device.copying:
            self._there = self._device.allocate(num_bytes, "inputs")
        self._going = self._device.map_host(num_bytes, "inputs")
        if self._there is None:
            self._there = self._device.in_place(self._going)

    def _gathered(
        self, micro: MicroBatch, rows: Tensor | None, predicts: bool, cache: TextCache | None
    ) -> _Gathered:
        lengths = micro.document_lengths() if self._takes_lengths else {}
        model: dict[str, Any] = {
            **micro.inputs,
            **lengths,
            **({} if cache is None else cache.inputs(micro.input_ids.shape[1])),
            **self._with_media(micro, cache),
        }
        apart = self._by_document and not (self._masks_by_type and MEDIA in model)
        documents = micro.packed_documents() if apart and cache is None else None
        with attending(documents):
            answers = self._edges.asked(model, by_document=documents is not None)
        seen = micro.loss_inputs()
        own = {
            "rows": rows,
            "bounds": None if documents is None else documents.bounds,
            "targets": seen.targets,
            "trained": trained_index(seen.targets.view(-1)),
            "last": micro.last_tokens() if predicts else None,
        }
        tensors = {("own", name): tensor for name, tensor in own.items() if tensor is not None}
        tensors |= {("extra", name): tensor for name, tensor in seen.loss_tensors.items()}
        tensors |= {("model", n): value for n, value in model.items() if isinstance(value, Tensor)}
        for number, item in enumerate(model.get(MEDIA, ())):
            tensors |= {(f"media {number}", n): one for n, one in item.tensors.items()}
        return _Gathered(
            micro=micro,
            model=model,
            documents=documents,
            answers=answers,
            tensors=tensors,
        )

    def _with_media(self, micro: MicroBatch, cache: TextCache | None) -> dict[str, Any]:
        """Return the arguments of the front about media; positions have several axes with some.

        A cache learns the positions of the texts that it begins with.
        """
        items = [item for document in micro.media for item in document]
        if micro.mm_token_type_ids is None or not items:
            return {}
        model, towers = self._decoder.model, self._decoder.towers
        if towers is None:
            raise BatchError(
                "a micro-batch has media, and the model was built without: model.media"
            )
        given = optional.towers.media_inputs(model, towers, items, micro.mm_token_type_ids) | {
            MEDIA: items
        }
        spans = micro.document_spans()
        flat_ids, types = micro.input_ids.flatten(), micro.mm_token_type_ids.flatten()
        axes = optional.towers.positions_by_axis(model, towers, spans, flat_ids, types, micro.media)
        if axes is not None:
            axes = axes.view(-1, *micro.input_ids.shape)
            if cache is not None:
                cache.read_at(axes)
            if micro.position_ids is not None:  # by these it keeps packed documents apart
                axes = torch.cat([micro.position_ids[None], axes])
            given["position_ids"] = axes
        return given

    def _placed(self, one: _Gathered, there: Mapping[_Name, Tensor]) -> MicroInputs:
        """Return what compute reads, of tensors that are where it can read them."""
        targets, bounds = there["own", "targets"], there.get(("own", "bounds"))
        documents = one.documents
        if documents is not None and bounds is not None:
            documents = replace(documents, bounds=bounds)
        extra = {name: there["extra", name] for name in one.micro.loss_tensors}
        model = {name: there.get(("model", name), value) for name, value in one.model.items()}
        if MEDIA in model:
            model[MEDIA] = [
                replace(item, tensors={n: there[f"media {i}", n] for n in item.tensors})
                for i, item in enumerate(model[MEDIA])
            ]
        return MicroInputs(
            on_host=one.model,
            model=model,
            answers=one.answers,
            rows=there.get(("own", "rows")),
            documents=documents,
            loss=LossInputs(targets=targets, loss_tensors=extra),
            trained=trained_rows(targets.view(-1), self.chunk, there["own", "trained"]),
            last_tokens=there.get(("own", "last")),
            num_tokens=one.micro.num_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SentInputs:
    """The inputs of a step."""

    micros: Sequence[MicroInputs]
    send: Callable[[], int]
    """Queues the copy to the device, the first time it is called; returns its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathered:
    """A micro-batch as compute will read it, still on the host."""

    micro: MicroBatch
    model: Mapping[str, Any]
    documents: PackedDocuments | None
    answers: Answers | None
    tensors: Mapping[_Name, Tensor]


def _once(send: Callable[[], int]) -> Callable[[], int]:
    left = [send]
    return lambda: left.pop()() if left else 0


def lay(target: Tensor, tensor: Tensor) -> None:
    """Copy a tensor of the host into flat memory there."""
    if not target.is_meta:  # a rehearsal has nothing to copy
        copy_bits(target.view(tensor.dtype).view(tensor.shape), tensor)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
