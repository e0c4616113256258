"""The engine: a step on a batch, streamed block by block.

    engine = Engine(decoder, store, optimizer=AdamW(...), settings=StepSettings(slots=3))
    with engine:
        result = engine.step(batch)      # loss and metrics; updates may still be under way
        engine.settle()                  # now they are done: weights may be read

A step is a schedule (schedule.py) played on lanes, or one op at a time (`player=Reference()`, the
oracle for bisecting a bug). The engine owns no weights: they live in the store, and between
`settle` and the next `step` they are the caller's to read.

Laws (tests/engine/test_engine.py, test_exactness.py)
    1. Lanes give the bits of the reference, whatever their timing.
    2. A step that fails raises the lane's own error; `torn` tells whether weights were touched.
    3. A late update is finished by settle, evaluate and close, before anyone reads weights.
    4. No gradient that is not finite reaches a weight (test_guards.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from megatrain.devices.device import CpuDevice, Device
from megatrain.engine.actions import StepActions
from megatrain.engine.batch import (
    Fault,
    MicroBatch,
    StepResult,
    check_batch,
    check_loss,
    locate_fault,
)
from megatrain.engine.machine import build_machine
from megatrain.engine.snapshot import Snapshot
from megatrain.errors import (
    CheckpointMismatch,
    ConfigError,
    DeviceFull,
    LaneStuck,
    NonFiniteStep,
    PlayerStopped,
)
from megatrain.lanes.player import Player
from megatrain.lanes.playing import Plays
from megatrain.lanes.trace import Trace
from megatrain.losses.loss import Loss
from megatrain.losses.next_token import NEXT_TOKEN
from megatrain.memory.kinds import kinds_on_disk
from megatrain.memory.store import Store
from megatrain.models.decoder import Decoder
from megatrain.models.key_values import bytes_per_token, caches_keys_and_values
from megatrain.optim.optimizer import Optimizer
from megatrain.step.ops import Op, OpKind
from megatrain.step.schedule import build_flush, build_forward, build_step
from megatrain.step.settings import StepSettings
from megatrain.step.shape import StepShape

LEAST_CACHE_BYTES = 64 << 20
_UNTIL_KNOWN = tuple(kind for kind in OpKind if kind.spec.ends_step)
"""A step's caller waits for these: losses and norms. Updates continue."""


class Engine:
    """Plays steps. One caller at a time; use it in a `with` block, or `close` it."""

    def __init__(
        self,
        decoder: Decoder,
        store: Store,
        *,
        optimizer: Optimizer | None = None,
        loss: Loss = NEXT_TOKEN,
        settings: StepSettings = StepSettings(),  # noqa: B008  (immutable)
        device: Device | None = None,
        player: Plays | None = None,
        trace: bool = False,
    ) -> None:
        """Without an optimizer gradients stay in the store, in kind `grad`.

        A `player` is for tests: it has its own lanes and trace, and the engine closes it.
        """
        device = device or CpuDevice()
        _check_possible(decoder, device, settings)
        if optimizer is not None:
            _check_tier(store, settings)
        self._shape = functools.partial(
            settings.shape,
            num_blocks=len(decoder.blocks),
            copying=device.copying,
            updates=optimizer is not None,
            balances=settings.router_aux_loss != 0,
            tied=decoder.tied,
            trained=tuple(any(p.trained for p in block.params) for block in decoder.blocks),
        )
        self._machine = build_machine(decoder, store, device, self._shape(), optimizer, settings)
        if settings.head_pieces > 1 and not self._machine.template.scores_by_element:
            raise ConfigError(
                f"head_pieces is {settings.head_pieces}: what {decoder.config.model_type} does to "
                "its logits needs all of them at once, so the vocabulary cannot go in pieces"
            )
        self._vocab_size: int = decoder.model.get_input_embeddings().weight.shape[0]
        self.device = device
        self._player: Plays = player or Player(device.lanes(), trace=Trace() if trace else None)
        self.trace = self._player.trace
        self._schedule = functools.cache(_build)
        self._late = optimizer is not None and settings.update == "late"
        self._loss, self._skips_nonfinite = loss, settings.on_nonfinite == "skip"
        self._pending: StepActions | None = None
        self._num_steps = 0
        trained = self._shape().trained_blocks if optimizer is not None else []
        self._expected = dict.fromkeys(trained, 0)
        self.aux_loss: float | None = None
        """Of the last evaluation; None if experts are not balanced."""
        self.figures: dict[str, float] = {}
        """Of the last evaluation: what else the loss reports, means over its units."""
        self.torn = False
        """True once a failure left some blocks updated and others not: reload the weights."""

    def step(self, batch: Sequence[MicroBatch]) -> StepResult:
        """Train on one batch; return when the loss is known and compute is done.

        A late update whose gradient is not finite is not applied: the step is run once more from
        the same inputs, and if that changes nothing, stopped or skipped. In backward, the blocks
        with such a gradient are skipped, and only they.

        Raises BatchError before anything is touched, NonFiniteStep, else what a lane raised.
        """
        batch = self._received(batch)
        self._machine.reserve(batch)
        self._num_steps += 1
        actions = StepActions(self._machine, batch, self._num_steps, self._loss)
        kind = "pending step" if self._pending is not None else "step"
        self._play(kind, actions, len(batch), until=_UNTIL_KNOWN)
        self._pending, fault = None, None
        blocks = self._machine.updates.faulty_blocks
        if blocks and self._late:
            actions = StepActions(self._machine, batch, self._num_steps, self._loss)
            self._play("step", actions, len(batch), until=_UNTIL_KNOWN)
            fault = Fault(blocks=blocks, repeated=bool(self._machine.updates.faulty_blocks))
        elif blocks:
            fault = Fault(blocks=blocks, repeated=True)
        if fault is not None and fault.repeated:
            fault = locate_fault(fault, batch, self._gradient_is_finite)
            if not self._skips_nonfinite:
                raise NonFiniteStep(f"step {self._num_steps}: the gradient is {fault}")
        applied = fault is None or not fault.repeated
        self._pending = actions if self._late and applied else None
        sat_out = () if fault is None or applied else self._expected if self._late else blocks
        for block in self._expected.keys() - set(sat_out):
            self._expected[block] += 1
        losses = tuple(float(actions.head.losses[micro]) for micro in range(len(batch)))
        return StepResult(
            loss=sum(losses),
            micro_losses=losses,
            num_tokens=sum(micro.num_tokens for micro in batch),
            num_trained=sum(micro.num_trained for micro in batch),
            grad_norm=self._machine.updates.norm if self._late else None,
            aux_loss=None if actions.aux_loss is None else float(actions.aux_loss),
            figures=actions.head.mean_figures(),
            fault=fault,
            applied=applied,
        )

    def _received(self, batch: Sequence[MicroBatch], *, predicts: bool = False) -> list[MicroBatch]:
        """Return the batch, checked, where the device can take it from."""
        check_batch(batch, self._vocab_size, predicts=predicts)
        if not predicts:
            check_loss(batch, self._loss)
        return [micro.mapped(self.device.pinned) for micro in batch]

    def _gradient_is_finite(self, micro: MicroBatch) -> bool:
        """Return whether a micro-batch alone gives a finite gradient, without an update."""
        step = self._schedule("step", self._shape(num_micro=1))
        ops = [op for op in step if op.kind.spec.ends_step and op.kind is not OpKind.CLIP]
        self._machine.reserve([micro])  # it takes the place of the first, and may be larger
        actions = StepActions(self._machine, [micro], self._num_steps, self._loss)
        self._play_ops(ops, actions, (OpKind.NORM,))
        return not self._machine.updates.faulty_blocks

    def evaluate(self, batch: Sequence[MicroBatch]) -> tuple[float, int]:
        """Return the loss summed over the batch's units, not divided, and their number.

        That is the negative log-probability of the trained tokens, unless another loss is set.
        `aux_loss` is then the batch's load-balancing loss, `figures` what else the loss reports.
        """
        batch = self._received(batch)
        actions = StepActions(self._machine, batch, 0, self._loss)
        self._forward(actions, batch)
        total = actions.head.evaluated()
        self.aux_loss = None if actions.aux_loss is None else float(actions.aux_loss)
        self.figures = actions.head.mean_figures()
        return total, actions.head.num_units

    def predict(
        self, batch: Sequence[MicroBatch], caches: Sequence[Any] | None = None
    ) -> list[Tensor]:
        """Return, by micro-batch, the logits in fp32 behind each row's last token. (rows, tokens)

        Rows are padded on the right. Labels are not looked at, but must be there. `caches` has for
        each micro-batch what models/key_values.py makes, or None: the tokens then follow those
        that it holds, without padding, and are added to it.
        """
        batch = self._received(batch, predicts=True)
        actions = StepActions(self._machine, batch, 0)
        actions.predicts, actions.caches = True, caches
        self._forward(actions, batch)
        return [actions.head.predictions[micro] for micro in range(len(batch))]

    @property
    def model_config(self) -> PreTrainedConfig:
        return self._machine.decoder.config

    @functools.cached_property
    def cached_tokens(self) -> int:
        """How many tokens may be in caches at a time; 0: the model cannot use one.

        A prediction has no chunk of logits: caches may take as much as that has in a step.
        """
        machine = self._machine
        if not caches_keys_and_values(machine.on_host):
            return 0
        room = max(4 * machine.settings.chunk_tokens * self._vocab_size, LEAST_CACHE_BYTES)
        element_bytes = int(machine.decoder.model.dtype.itemsize)
        return room // bytes_per_token(self.model_config, element_bytes)

    def _forward(self, actions: StepActions, batch: Sequence[MicroBatch]) -> None:
        """Play an evaluation, without dropout; after settle no lane computes."""
        self.settle()
        self._machine.reserve(batch, trains=False)
        models = {self._machine.decoder.model, self._machine.template.model}
        for model in models:
            model.eval()
        try:
            self._play("forward", actions, len(batch), until=(OpKind.HEAD,))
        finally:
            for model in models:
                model.train()

    def leave_out(self) -> None:
        """Count a step that is not taken: later ones draw the random numbers they always would."""
        self._num_steps += 1

    def snapshot(self) -> Snapshot:
        """Return the state after the last step, to be read while training continues.

        Close it before asking for another. A late update happens in the next step or in `settle`:
        call `settle` if there is no further step, or the reader waits without end.
        """
        trained = list(self._expected)
        frozen = [b for b in range(self._shape().num_blocks) if b not in self._expected]
        order = trained if self._late else trained[::-1]
        updates = self._machine.updates
        return updates.snapshot([*order, *frozen], self._num_steps, self._expected)

    def restore(self, num_steps: int, num_updates: Mapping[int, int]) -> None:
        """Continue after a snapshot whose bytes are in the store again."""
        self.settle()
        if num_updates.keys() != self._expected.keys():
            raise CheckpointMismatch("other blocks were trained when the state was saved")
        self._num_steps, self._expected = num_steps, dict(num_updates)
        self._machine.updates.restore(num_updates)

    def settle(self) -> None:
        """Finish all updates. Weights, masters and moments are then those after the last step."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._play("flush", pending, 1, until=(OpKind.UPDATE,))
        self._guarded(self._player.settle)

    def close(self) -> None:
        """Finish all updates, unless a lane failed, and end the lanes."""
        try:
            if not self.torn:
                self.settle()
        except PlayerStopped:
            pass
        finally:
            self._player.close()
            self.device.close()

    def write_trace(self, path: Path) -> None:
        """Write what the lanes did as Chrome's JSON; Perfetto opens it."""
        assert self.trace is not None, "made without trace=True"
        self.trace.write(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"and then, closing the engine: {failure!r}")

    def _play(
        self, kind: str, actions: StepActions, num_micro: int, until: tuple[OpKind, ...]
    ) -> None:
        self._play_ops(self._schedule(kind, self._shape(num_micro=num_micro)), actions, until)

    def _play_ops(self, ops: list[Op], actions: StepActions, until: tuple[OpKind, ...]) -> None:
        # Layers draw from the global generator, seeded for each op; the caller's draws continue.
        random_state = self.device.random_state()
        try:
            self._guarded(lambda: self._player.play(ops, actions.table()).wait(*until))
        finally:
            self.device.set_random_state(random_state)

    def _guarded(self, run: Callable[[], None]) -> None:
        """Run; if it fails, end the lanes and note whether they left a step half applied."""
        try:
            run()
        except BaseException as error:
            if not isinstance(error, LaneStuck):
                with suppress(Exception):  # what a lane raised meanwhile is not the cause
                    self._player.close()
                with suppress(Exception):
                    self.device.synchronize()
            self.torn = self.torn or self._machine.updates.half_applied
            self._machine.updates.fail()
            self._pending = None
            self._machine.tape.clear()
            if isinstance(error, torch.OutOfMemoryError):
                where = "; ".join(getattr(error, "__notes__", ()))
                raise DeviceFull(
                    f"device memory: the working memory of compute does not fit ({where}). Smaller "
                    "micro-batches, or fewer slots, leave more room"
                ) from error
            raise


def _build(kind: str, shape: StepShape) -> list[Op]:
    if kind == "forward":
        return build_forward(shape)
    if kind == "flush":
        return build_flush(shape)
    return build_step(shape, pending=kind == "pending step")


def _check_possible(decoder: Decoder, device: Device, settings: StepSettings) -> None:
    """Raise ConfigError for what the device or the model cannot do."""
    router_aux_loss = settings.router_aux_loss
    if settings.gather_embedding and not device.own_memory:
        raise ConfigError("gather_embedding needs a device with its own memory")
    num_tokens = decoder.model.get_output_embeddings().weight.shape[0]
    if settings.head_pieces > 1 and decoder.tied:
        raise ConfigError(
            f"head_pieces is {settings.head_pieces}: the head of this model reads the embedding's "
            "table, whose gradient is one sum and cannot leave in pieces"
        )
    if not 1 <= settings.head_pieces <= num_tokens:
        raise ConfigError(
            f"head_pieces is {settings.head_pieces}, must be between 1 and the {num_tokens} tokens "
            "of the vocabulary"
        )
    if router_aux_loss and decoder.balancing is None:
        raise ConfigError(
            f"router_aux_loss is {router_aux_loss:g}: the code of {decoder.config.model_type} "
            "has no load-balancing loss, or none that can be computed layer by layer"
        )


def _check_tier(store: Store, settings: StepSettings) -> None:
    """Raise ConfigError unless the store has on disk what the settings say."""
    planned = kinds_on_disk(store.kinds, settings.tier)
    if store.on_disk != planned:
        found, wanted = (
            ", ".join(map(str, kinds)) or "nothing" for kinds in (store.on_disk, planned)
        )
        raise ConfigError(
            f"the store has {found} on disk, but StepSettings.tier is {settings.tier!r}: it needs "
            f"{wanted} there"
        )
