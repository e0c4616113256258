"""A streamed step, timed, and the least times that its parts would take alone.

A Llama of random weights is made in host memory. It takes a few steps to warm up and some to
measure, chained, so that each meets the updates that the one before left. The bound of the step is
the longest of what no schedule of the same work can avoid:

    compute_s      median step with copies turned off and without updates
    in_s, out_s    bytes that cross in a step, each way, over the copy rate measured alone
    host_s         one norm and update of every block, alone
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig

from megatrain.batch import MicroBatch
from megatrain.devices.device import Device
from megatrain.doctor.rates import CopyRates
from megatrain.doctor.subject import Subject
from megatrain.engine.engine import Engine
from megatrain.lanes.trace import Trace
from megatrain.memory.kinds import TensorKind, store_kinds
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.models.build import build_decoder
from megatrain.models.decoder import Decoder
from megatrain.optim.adamw import AdamW
from megatrain.optim.optimizer import HostOptimizer
from megatrain.optim.states import ADAMW
from megatrain.optim.views import UpdateViews, Views
from megatrain.step.settings import StepSettings

WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedModel:
    """A Llama by its sizes, and the tokens of a step."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    length: int
    """Tokens of a row."""
    rows: int
    """Rows of a micro-batch."""
    num_micro: int

    @property
    def step_tokens(self) -> int:
        return self.num_micro * self.rows * self.length

    def decoder(self) -> Decoder:
        config = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=max(2048, self.length),
            tie_word_embeddings=False,
        )
        return build_decoder(config, "bf16")

    def batch(self) -> list[MicroBatch]:
        """Return random tokens, all of which are trained."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.rows, self.length)
        ids = [
            torch.randint(0, self.vocabulary, shape, generator=generator)
            for _ in range(self.num_micro)
        ]
        return [MicroBatch(input_ids=part, labels=part) for part in ids]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """The measured times of a step."""

    step_s: float
    """Median time from one step's result to the next one's."""
    compute_s: float
    host_s: float
    bytes_in: int
    bytes_out: int
    peak_bytes: int
    """The most device memory that was in use at once."""
    num_params: int
    num_tokens: int
    num_multiplied: int
    """Params but the embedding's table: each is multiplied with every token."""
    trace: Trace

    def lanes_s(self, copies: CopyRates) -> dict[str, float]:
        """Return the least times of the step by what they are for."""
        return {
            "compute": self.compute_s,
            "in": self.bytes_in / copies.into,
            "out": self.bytes_out / copies.out,
            "host": self.host_s,
        }

    @property
    def flops(self) -> float:
        """FLOP/s: 8 per token and parameter, for forward, recompute and backward."""
        return 8 * self.num_multiplied * self.num_tokens / self.step_s


def _fill_weights(decoder: Decoder, store: Store) -> None:
    """Make the weights small random numbers; all layers have those of the first."""
    generator = torch.Generator().manual_seed(0)
    last = len(decoder.blocks) - 1
    for block in (0, 1, last):
        for param in decoder.blocks[block].params:
            weight = store.param(param.name, TensorKind.HI)
            if weight.dim() > 1:
                weight.normal_(0.0, 0.02, generator=generator)
            else:
                weight.fill_(1.0)
    for block in range(2, last):
        store.block_bytes(block, TensorKind.HI).copy_(store.block_bytes(1, TensorKind.HI))


def time_step(
    subject: Subject,
    model: TimedModel,
    settings: StepSettings,
    *,
    num_steps: int,
    num_threads: int,
    cap_bytes: int | None = None,
) -> TimedStep:
    """Return the figures of a step on `subject`. Raises DoesNotFit or OutOfDeviceMemory."""
    decoder, batch = model.decoder(), model.batch()
    clips = settings.update == "late"
    store = Store(build_layout(decoder.blocks, store_kinds(ADAMW, waits=clips)))
    _fill_weights(decoder, store)
    optimizer = AdamW(
        learning_rate=1e-6, max_grad_norm=1.0 if clips else None, num_threads=num_threads
    )
    device = subject.new_device(cap_bytes)
    with Engine(
        decoder, store, optimizer=optimizer, device=device, trace=True, settings=settings
    ) as engine:
        step_s = _median_seconds(engine, batch, num_steps)
    assert engine.trace is not None
    lanes = engine.trace.last_step().lane_summaries()
    num_params = store.layout.num_params
    return TimedStep(
        step_s=step_s,
        compute_s=_compute_seconds(
            subject.new_device(cap_bytes), decoder, store, settings, batch, num_steps
        ),
        host_s=_host_seconds(store, optimizer),
        bytes_in=lanes["in"].num_bytes,
        bytes_out=lanes["out"].num_bytes,
        peak_bytes=device.peak_bytes,
        num_params=num_params,
        num_tokens=model.step_tokens,
        num_multiplied=num_params - model.vocabulary * model.hidden,
        trace=engine.trace,
    )


def _median_seconds(
    engine: Engine,
    batch: Sequence[MicroBatch],
    num_steps: int,
    warmed_up: Callable[[], None] = lambda: None,
) -> float:
    """Return the median step; `warmed_up` is called before the first that counts."""
    for _ in range(WARM_UP_STEPS):
        engine.step(batch)
    warmed_up()
    seconds = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        engine.step(batch)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _compute_seconds(
    device: Device,
    decoder: Decoder,
    store: Store,
    settings: StepSettings,
    batch: Sequence[MicroBatch],
    num_steps: int,
) -> float:
    """Return the median step without copies, on the weights that are in the slots once warm."""

    def without_copies() -> None:
        device.copy = lambda target, source: None  # type: ignore[method-assign]

    with Engine(
        decoder, store, optimizer=_Idle(learning_rate=0.0), device=device, settings=settings
    ) as engine:
        return _median_seconds(engine, batch, num_steps, without_copies)


class _Idle(HostOptimizer):
    """An optimizer that does nothing."""

    states = ()

    def squared_norm(self, gradient: Tensor) -> float:
        return 0.0

    def update(
        self, views: Views, gradient: Tensor, *, step: int, number: int, scale: float
    ) -> None:
        pass


def _host_seconds(store: Store, optimizer: AdamW) -> float:
    """Return the time of one norm and update of every block, with gradients of zero."""
    segments = [
        segment
        for block in range(store.layout.num_blocks)
        for segment in store.layout.trained_segments(block)
    ]
    sizes = [segment.num_elements * segment.dtype.itemsize for segment in segments]
    zeros = torch.zeros(max(sizes), dtype=torch.uint8)
    update_views = UpdateViews(store, optimizer)
    begin = time.perf_counter()
    for segment, size in zip(segments, sizes, strict=True):
        gradient = zeros[:size].view(segment.dtype)
        optimizer.squared_norm(gradient)
        for span, views in update_views.of(segment):
            optimizer.update(views, gradient[span], step=1, number=1, scale=1.0)
    return time.perf_counter() - begin
