"""The engine: a step on a batch, streamed block by block.

    engine = Engine(decoder, store, optimizer=AdamW(...), settings=StepSettings(slots=3))
    with engine:
        result = engine.step(batch)      # loss and metrics; updates may still be under way
        engine.synchronize()                  # now they are done: weights may be read

        part = engine.forward(batch)     # the same in two phases: leaves, and back from a loss
        result = part.backward(-sum(leaves.logprobs.sum() for leaves in part.outputs))

A step is a schedule (schedule.py) played on lanes, or one op at a time (`player=Reference()`, the
oracle for bisecting a bug). The engine owns no weights: they live in the store, and between
`synchronize` and the next `step` they are the caller's to read.

Laws (tests/engine/test_engine.py, test_exactness.py)
    1. Lanes give the bits of the reference, whatever their timing.
    2. A step that fails raises the lane's own error; `weights_inconsistent` tells whether weights
       were touched. If the device was full, late updates of the step before are finished:
       `is_consistent`. Not so those of matrices that are orthogonalized on the device.
    3. A late update is finished by synchronize, evaluate and close, before anyone reads weights.
    4. No gradient that is not finite reaches a weight (test_guards.py).
    5. While blocks stay on the device for `sample_next` and `next_token_logits`, no step changes
       them (test_staying.py).
    6. A step in two phases has the bits of one, and moves as many weights (test_open_step.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor
from transformers import PreTrainedConfig

from megatrain.batch import (
    MicroBatch,
    StepPart,
    check_batch,
    check_closed,
    check_loss,
    step_part,
)
from megatrain.devices.device import CpuDevice, Device, is_out_of_memory
from megatrain.engine import optional
from megatrain.engine.actions import StepActions
from megatrain.engine.compute.attention_kernel import kernel_switches
from megatrain.engine.compute.head import Head
from megatrain.engine.features import registry
from megatrain.engine.machine import Machine, build_machine, check_parts
from megatrain.engine.results import NonFiniteInfo, SharedResults, StepResult, locate_fault
from megatrain.engine.snapshot import Snapshot
from megatrain.engine.updates import Optimizer
from megatrain.errors import (
    CheckpointMismatch,
    ConfigError,
    LaneTimeout,
    NonFiniteStep,
    OutOfDeviceMemory,
    PlayerStopped,
    StepAborted,
)
from megatrain.lanes.lane import Action
from megatrain.lanes.player import LANE_DEADLINE_S, Player, Plays
from megatrain.lanes.trace import Trace
from megatrain.losses.leaves import LOGPROBS_ALONE, TokenOutputs, TokenOutputSpec
from megatrain.losses.loss import NEXT_TOKEN, Loss
from megatrain.memory.store import Store
from megatrain.models.decoder import Decoder
from megatrain.ranks.ranks import ALONE, RankInfo, Ranks
from megatrain.step.ops import Op, OpKind
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.engine.compute.drawing import SamplingParams
    from megatrain.engine.open_step import ForwardPass
    from megatrain.engine.residence import Residence
    from megatrain.models.key_values import TextCache

LEAST_CACHE_BYTES = 64 << 20
RankInfoFn = Callable[[], RankInfo]
"""Called after compute, so the result includes events of the step itself."""
_UNTIL_KNOWN = tuple(kind for kind in OpKind if kind.spec.ends_step)
"""A step's caller waits for these: losses and norms. Updates continue."""
_COMPUTE = (OpKind.FORWARD, OpKind.HEAD, OpKind.BACKWARD)
"""Ops that can be left: none of them is on its way when a step's caller returns."""


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
        ranks: Ranks = ALONE,
        reference: Store | None = None,
        player: Plays | None = None,
        trace: bool = False,
    ) -> None:
        """Without an optimizer gradients stay in the store, in kind `grad`.

        `reference` has other weights of the same model, for `token_outputs`: a `clone_weights`.

        With `ranks` the store has the part of one of them, and all call the same methods with the
        same batches, in the same order: each does its share and gets the results of all.

        A `player` is for tests: it has its own lanes and trace, and the engine closes it.
        """
        device = device or CpuDevice()
        check_parts(decoder, store, device, optimizer, settings, ranks, reference)
        self._held = ExitStack()
        if settings.deterministic:
            self._held.enter_context(optional.deterministic.deterministic_kernels)
        self._shape = functools.partial(
            settings.shape,
            num_blocks=len(decoder.blocks),
            copying=device.copying,
            divided=not ranks.owner.is_alone,
            updates=optimizer is not None,
            balances=settings.router_aux_loss != 0,
            tied=decoder.tied,
            trained=tuple(any(p.trained for p in block.params) for block in decoder.blocks),
            matrices=tuple(
                optimizer is not None and bool(store.layout.matrix_segments(block.index))
                for block in decoder.blocks
            ),
        )
        try:
            self._built: Machine | None = build_machine(
                decoder, store, device, self._shape(), optimizer, settings, ranks, reference
            )
        except BaseException:
            self._held.close()
            with suppress(Exception):  # nobody else would; what was raised is the cause
                device.close()
            raise
        self._updates = self._machine.updates
        self._vocab_size: int = decoder.model.get_input_embeddings().weight.shape[0]
        self._player: Plays = player or _make_player(device, ranks, Trace() if trace else None)
        self.trace = self._player.trace
        self.loss = loss
        self._schedule = functools.cache(registry().build_ops)
        self._switches = kernel_switches(decoder, device)
        self._late = optimizer is not None and settings.update == "late"
        self._by_norm = optimizer is not None and settings.update != "in_backward"
        self._skips_nonfinite = settings.on_nonfinite == "skip"
        self._pending: StepActions | None = None
        self._open: ForwardPass | None = None
        self.device = device
        self._ranks = ranks
        self._num_steps = 0
        trained = [] if optimizer is None else self._shape().trained_blocks
        self._expected = dict.fromkeys(trained, 0)
        self.aux_loss: float | None = None
        """Load-balancing loss of the last evaluation, or None if experts are not balanced."""
        self.metrics: dict[str, float] = {}
        """Figures of the last evaluation: means over the units of the loss, for `loss.reported`."""
        self.weights_inconsistent = False
        """True once a failure left some blocks updated and others not: reload the weights."""
        self.should_abort: Callable[[], bool] = _never
        """Asked before each op of a step or an evaluation; if it returns True, that is left."""
        self._has_left = False

    @property
    def _machine(self) -> Machine:
        """The parts that compute. Raises PlayerStopped once the engine is closed."""
        if self._built is None:
            raise PlayerStopped("the engine is closed; create a new one")
        return self._built

    def announce(self, step_tokens: int | None) -> None:
        """Say how many tokens a step has at most, if that is known: memory is mapped once."""
        if step_tokens is not None:
            self._machine.announce(-(-step_tokens // self._ranks.owner.size))

    def step(self, batch: Sequence[MicroBatch], says: RankInfoFn | None = None) -> StepResult:
        """Train on one batch; return when the loss is known and compute is done.

        All ranks get what each `says` when compute is done, with the result.

        A late update whose gradient is not finite is not applied: the step is run once more from
        the same inputs, and if that changes nothing, stopped or skipped. In backward, the blocks
        with such a gradient are skipped, and only they.

        Raises BatchError before anything is touched, NonFiniteStep, else what a lane raised. If it
        `should_abort`: StepAborted. Late updates of the step before are then done, and
        `is_consistent` tells whether the state is that after it, to be saved; nothing more can be
        computed.
        """
        part = self._received(batch)
        actions = self._begin(part, self.loss)
        self._play_step(self._kind("step"), actions, part)
        self._pending = None
        return self._ended(batch, part, actions, self.loss, says)

    def forward(
        self, batch: Sequence[MicroBatch], wanted: TokenOutputSpec = LOGPROBS_ALONE
    ) -> ForwardPass:
        """Begin a step: return its leaves, and stay ready to go back from a loss of them.

        Leaves are those of each micro-batch of this rank, on the host: log-probabilities, and what
        else is asked for. The engine's own loss is not asked. Until `backward` or `discard` of the
        result nothing else can be computed. Raises as `step` does.
        """
        check_closed(self._open)
        check_batch(batch, self._vocab_size, predicts=wanted.hidden)
        loss = optional.open_step.Given(wanted)
        loss.check(batch)
        part = step_part(batch, loss, self._ranks.owner)
        actions = self._begin(part, loss)
        self._play_step(self._kind("leaves"), actions, part)
        self._pending = None
        found = [actions.head.given_leaves(micro).detached() for micro in range(len(part.batch))]

        def go_back(given: Loss, gradients: Sequence[Mapping[str, Tensor]]) -> StepResult:
            self._open = None
            return self._go_back(batch, part, actions, given, gradients)

        self._open = optional.open_step.ForwardPass(
            leaves=found, wanted=wanted, go_back=go_back, drop=self._drop
        )
        return self._open

    def _go_back(
        self,
        batch: Sequence[MicroBatch],
        part: StepPart,
        actions: StepActions,
        loss: Loss,
        given: Sequence[Mapping[str, Tensor]],
    ) -> StepResult:
        """Play the second phase, with what the loss reads of each micro-batch of this rank."""
        pinned = self.device.pinned
        actions.head.give(loss, [{n: pinned(t) for n, t in one.items()} for one in given])
        self._play_step("return", actions, part)
        own = [m.with_loss_tensors(**one) for m, one in zip(part.batch, given, strict=True)]
        # All ranks try a micro-batch, and only its own has its gradients.
        tried = own if self._ranks.owner.is_alone else ()
        result = self._ended(batch, replace(part, batch=own), actions, loss, tried=tried)
        return replace(result, micro_losses=())

    def _drop(self) -> None:
        """Let go of a step whose first phase is played; the next one draws what it would have."""
        self._open = None
        self._guarded(self._player.settle)
        self._machine.forget()
        self._num_steps -= 1

    def _kind(self, kind: str) -> str:
        """Return the kind of a list that begins a step."""
        return f"pending {kind}" if self._pending is not None else kind

    def _begin(self, part: StepPart, loss: Loss) -> StepActions:
        """Make room for a step, and return its actions."""
        if self._machine.weights.stays:
            raise ConfigError("layers stay on the device: leave `engine.staying` before a step")
        try:
            self._machine.reserve(part.batch)
        except OutOfDeviceMemory:
            self.synchronize()
            raise
        self._num_steps += 1
        return StepActions(self._machine, part, self._num_steps, loss)

    def _ended(
        self,
        batch: Sequence[MicroBatch],
        part: StepPart,
        actions: StepActions,
        loss: Loss,
        says: RankInfoFn | None = None,
        tried: Sequence[MicroBatch] | None = None,
    ) -> StepResult:
        """Judge the gradients of a step that was played, and return its result.

        To find a fault, each of `tried` is computed alone; None: each of `batch`.
        """
        fault = None
        blocks = self._updates.faulty_blocks
        if blocks and self._by_norm:
            actions = StepActions(self._machine, part, self._num_steps, loss)
            self._play_step("step", actions, part)
            fault = NonFiniteInfo(blocks=blocks, repeated=bool(self._updates.faulty_blocks))
        elif blocks:
            fault = NonFiniteInfo(blocks=blocks, repeated=True)
        if fault is not None and fault.repeated:
            tried = batch if tried is None else tried
            fault = locate_fault(fault, tried, lambda one: self._gradient_is_finite(one, loss))
            if not self._skips_nonfinite:
                raise NonFiniteStep(f"step {self._num_steps}: the gradient is {fault}")
        applied = fault is None or not fault.repeated
        self._pending = actions if self._late and applied else None
        sat_out = () if fault is None or applied else self._expected if self._by_norm else blocks
        for block in self._expected.keys() - set(sat_out):
            self._expected[block] += 1
        shared = self._shared(actions, actions.head.trained(), None if says is None else says())
        return StepResult(
            loss=sum(shared.losses),
            micro_losses=tuple(shared.losses),
            num_tokens=sum(micro.num_tokens for micro in batch),
            num_valid_tokens=sum(micro.num_valid_tokens for micro in batch),
            grad_norm=self._updates.norm if self._by_norm else None,
            aux_loss=shared.aux_loss,
            metrics=loss.reported(shared.figures),
            nonfinite=fault,
            applied=applied,
            rank_info=shared.said,
        )

    def _received(self, batch: Sequence[MicroBatch]) -> StepPart:
        """Return this rank's part of a batch, checked."""
        check_closed(self._open)
        check_batch(batch, self._vocab_size)
        check_loss(batch, self.loss)
        return step_part(batch, self.loss, self._ranks.owner)

    def _shared(
        self, actions: StepActions, losses: Sequence[float], says: RankInfo | None = None
    ) -> SharedResults:
        head, aux = actions.head, actions.aux_loss
        aux_loss = None if aux is None else float(aux)
        return SharedResults(
            self._ranks, losses, head.own_figures(), head.num_items, aux_loss, says
        )

    def _gradient_is_finite(self, micro: MicroBatch, loss: Loss) -> bool:
        """Return whether a micro-batch alone gives a finite gradient, without an update.

        All ranks try it.
        """
        part = step_part([micro], loss)
        step = self._schedule("step", self._shape(num_micro=1))
        measuring = itertools.takewhile(lambda op: op.kind is not OpKind.CLIP, step)
        ops = [op for op in measuring if op.kind.spec.ends_step]
        self._machine.reserve(part.batch)  # it takes the place of the first, and may be larger
        actions = StepActions(self._machine, part, self._num_steps, loss)
        self._play_ops(ops, actions, (OpKind.NORM,))
        self._machine.forget()  # what a second backward would need
        return self._updates.all_finite()

    def evaluate(
        self, batch: Sequence[MicroBatch], argmax_tokens: list[tuple[Tensor, Tensor]] | None = None
    ) -> tuple[float, int]:
        """Return the loss summed over the batch's units, not divided, and their number.

        That is the negative log-probability of the trained tokens, unless another loss is set.
        `aux_loss` is then the batch's load-balancing loss, `metrics` what else the loss reports.
        `argmax_tokens` gets, for each micro-batch of this rank, the log-probability of each target
        and the likeliest token in its place. (rows, length)
        """
        part = self._received(batch)
        actions = self._forward(part, self.loss, notes_likeliest=argmax_tokens is not None)
        if argmax_tokens is not None:
            argmax_tokens += actions.head.likeliest()
        shared = self._shared(actions, actions.head.evaluated())
        self.aux_loss = shared.aux_loss
        self.metrics = shared.figures
        return sum(shared.losses), part.num_items

    def logprobs(
        self,
        batch: Sequence[MicroBatch],
        *,
        reference: bool = False,
        temperature: float = 1.0,
    ) -> list[Tensor]:
        """Return, by micro-batch, the log-probability of each position's target. (rows, length)

        In fp32 on the host, 0 where there is none; position t is about label t + 1. Without
        dropout. Logits are divided by `temperature`; no loss is asked. Every rank computes all of
        the batch.

        Those of the `reference` are of the store that the engine was given for it; without one of
        the model under its adapters. Raises ConfigError if it has neither.
        """
        plain = [replace(micro, loss_tensors={}) for micro in batch]
        wanted = TokenOutputSpec(temperature=temperature)
        return [one.logprobs for one in self.token_outputs(plain, wanted, reference=reference)]

    def token_outputs(
        self,
        batch: Sequence[MicroBatch],
        wanted: TokenOutputSpec = LOGPROBS_ALONE,
        *,
        reference: bool = False,
    ) -> list[TokenOutputs]:
        """Return, by micro-batch, the leaves that `forward` would give, without dropout or a step.

        Weights cross once. The rest is as in `logprobs`.
        """
        check_closed(self._open)
        check_batch(batch, self._vocab_size, predicts=True)
        loss = optional.open_step.Given(wanted)
        loss.check(batch)
        with self._as_reference() if reference else nullcontext():
            actions = self._forward(StepPart.whole(batch), loss)
            return [actions.head.given_leaves(micro) for micro in range(len(batch))]

    def next_token_logits(self, batch: Sequence[MicroBatch]) -> list[Tensor]:
        """Return, by micro-batch, the logits in fp32 behind each row's last token. (rows, tokens)

        Rows are padded on the right. Labels are not looked at, but must be there. Every rank
        predicts all of the batch.
        """
        return list(self._predicted(batch).predictions.values())

    def sample_next(
        self,
        batch: Sequence[MicroBatch],
        drawing: SamplingParams,
        caches: Sequence[TextCache | None] | None = None,
    ) -> list[tuple[Tensor, Tensor]]:
        """Return, by micro-batch, a token behind each row and its log-probability. (rows,)

        It is chosen on the device: where `drawing` has a temperature, by the row's number from 0 up
        to 1 in `extra["number"]`. The log-probability is that at the temperature, without top-p;
        of the likeliest token at temperature 1. `caches` has for each micro-batch one of
        `new_cache`, or None: the tokens then follow those that it holds, without padding, and are
        added to it. The rest is as in `next_token_logits`, but each rank gives micro-batches of its
        own, perhaps none.
        """
        if not batch and self._ranks.owner.is_alone:
            return []
        found = self._predicted(batch, caches, drawing)
        return list(found.drawn.values())

    def _predicted(
        self,
        batch: Sequence[MicroBatch],
        caches: Sequence[TextCache | None] | None = None,
        drawing: SamplingParams | None = None,
    ) -> Head:
        check_closed(self._open)
        if batch:
            check_batch(batch, self._vocab_size, predicts=True)
        part = StepPart.whole(batch)
        changes = {"predicts": True, "caches": caches, "drawing": drawing}
        return self._forward(part, NEXT_TOKEN, **changes).head

    @property
    def ranks(self) -> Ranks:
        return self._ranks

    def new_cache(self) -> TextCache:
        """Return an empty cache for texts of equal length, if `cached_tokens` is not 0."""
        return optional.key_values.TextCache(self._machine.on_host.model)

    @contextmanager
    def staying(self, wanted_tokens: int, longest: int) -> Iterator[int]:
        """Let as many layers as fit stay on the device, until the block ends. No step may be taken.

        Gradient slots make room meanwhile; the next step makes them again.

        Yields how many tokens may be in caches at a time, for texts of `wanted_tokens` in all that
        have at most `longest` each; 0: they must be read whole for each token.
        """
        self.synchronize()
        self._machine.gradients.release()
        residence = self._residence(wanted_tokens, longest)
        weights, layers = self._machine.weights, self._shape().layers
        weights.stay(layers[: residence.num_layers])
        try:
            yield residence.cached_tokens
        finally:
            with suppress(PlayerStopped):
                self.synchronize()
            weights.leave()

    def _residence(self, wanted_tokens: int, longest: int) -> Residence:
        machine, cached = self._machine, self.cached_tokens
        free = machine.device.free_bytes if machine.device.copying else 0
        room = optional.residence.room_for(free, self.most_read * machine.template.bytes_per_token)
        room = min(said["room"] for said in self._ranks.agree({"room": room}))
        layers = self._shape().layers
        found = optional.residence.choose_residence(
            room,
            num_layers=len(layers),
            layer_bytes=max(map(machine.weights.slot_bytes, layers)),
            token_bytes=self._token_bytes,
            wanted_tokens=wanted_tokens if cached else 0,
            longest=longest if cached else 0,
        )
        if found.cached_tokens or longest > cached:
            return found
        return optional.residence.Residence(num_layers=found.num_layers, cached_tokens=cached)

    @property
    def model_config(self) -> PreTrainedConfig:
        return self._machine.decoder.config

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a text, by the files of the model."""
        return self._machine.decoder.eos_token_ids

    @functools.cached_property
    def cached_tokens(self) -> int:
        """Tokens that may be in caches at any time; 0: the model cannot use one.

        A prediction has no chunk of logits: caches may take as much as that has in a step. While
        layers stay, it is what `staying` says.
        """
        machine = self._machine
        if not optional.key_values.caches_keys_and_values(machine.on_host):
            return 0
        room = max(4 * machine.inputs.chunk * self._vocab_size, LEAST_CACHE_BYTES)
        return room // self._token_bytes

    @property
    def _token_bytes(self) -> int:
        """Bytes of a token in caches."""
        element_bytes = int(self._machine.decoder.model.dtype.itemsize)
        return optional.key_values.bytes_per_token(self.model_config, element_bytes)

    @property
    def most_read(self) -> int:
        """Tokens that a micro-batch of a prediction should have at most."""
        return min(self._machine.settings.micro_batch_tokens, optional.residence.MOST_READ)

    def _forward(self, part: StepPart, loss: Loss, **changes: Any) -> StepActions:
        """Play an evaluation, without dropout; after synchronize no lane computes."""
        self.synchronize()
        self._machine.reserve(part.batch, trains=False)
        models = {self._machine.decoder.model, self._machine.template.model}
        for model in models:
            model.eval()
        try:
            actions = StepActions(self._machine, part, 0, loss, **changes)
            self._play("forward", actions, part, until=_UNTIL_KNOWN)
            return actions
        finally:
            for model in models:
                model.train()

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        """Compute the reference, until the block ends; no lane computes then."""
        machine = self._machine
        if not machine.weights.has_reference and machine.decoder.adapters is None:
            raise ConfigError(
                "the engine has no reference: give it one, Engine(..., reference=store), or train "
                "adapters, whose base is one"
            )
        self.synchronize()
        with ExitStack() as held:
            if machine.weights.has_reference:
                held.enter_context(machine.weights.of_reference())
            else:
                for model in {machine.decoder.model, machine.template.model}:
                    held.enter_context(optional.lora.adapters_off(model))
            yield
            self.synchronize()

    def skip_step(self) -> None:
        """Count a step that is not taken: later ones draw the random numbers they always would."""
        self._num_steps += 1

    def snapshot(self) -> Snapshot:
        """Return the state after the last step, to be read while training continues.
        Close it before asking for another. A late update happens in the next step or in
        `synchronize`: call `synchronize` if there is no further step, or the reader waits without
        end. Raises BatchError while a step is open: it is counted, and may still be discarded.
        """
        check_closed(self._open)
        shape = self._shape()
        order = [block for block in shape.update_order if block in self._expected]
        frozen = [block for block in range(shape.num_blocks) if block not in self._expected]
        updates = self._updates
        return updates.snapshot([*order, *frozen], self._num_steps, self._expected)

    @property
    def num_updates(self) -> dict[int, int]:
        """Updates of each trained block after the last complete step."""
        return dict(self._expected)

    @property
    def is_consistent(self) -> bool:
        """Whether weights, masters and states are those after the last complete step.

        Another engine may take the step that failed again. Late updates that are still to come
        count as done: `synchronize` and `close` do them.
        """
        return not self.weights_inconsistent and not (self._lacking() and self._pending is None)

    def _lacking(self) -> set[int]:
        """Return the blocks that have not had the updates of all complete steps."""
        return self._updates.behind(self._expected)

    def restore(self, num_steps: int, num_updates: Mapping[int, int]) -> None:
        """Continue after a snapshot whose bytes are in the store again.

        Raises BatchError while a step is open, and CheckpointMismatch.
        """
        check_closed(self._open)
        self.synchronize()
        if num_updates.keys() != self._expected.keys():
            raise CheckpointMismatch("other blocks were trained when the state was saved")
        self._num_steps = num_steps
        self._expected = dict(num_updates)
        self._updates.restore(num_updates)

    def synchronize(self) -> None:
        """Finish all updates. Weights, masters and moments are then those after the last step."""
        if self._has_left:  # they are done
            return
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._play_ops(self._schedule("flush", self._shape()), pending, until=(OpKind.UPDATE,))
        self._guarded(self._player.settle)

    def close(self) -> None:
        """Finish all updates, unless a lane failed, end the lanes, and free device memory.

        A closed engine computes nothing, though it still knows its updates. A second call does
        nothing.
        """
        if self._built is None:
            return
        try:
            if not self.weights_inconsistent:
                self.synchronize()
        except PlayerStopped:
            pass
        finally:
            self._player.close()
            self._held.close()
            self.device.close()
            self._built = None

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

    def _play_step(self, kind: str, actions: StepActions, part: StepPart) -> None:
        """Play a step or a phase of it until its results are known; one that is left is no step."""
        try:
            self._play(kind, actions, part, until=_UNTIL_KNOWN)
        except StepAborted:
            self._num_steps -= 1
            raise

    def _play(
        self, kind: str, actions: StepActions, part: StepPart, until: tuple[OpKind, ...]
    ) -> None:
        shape = self._shape(num_micro=len(part.batch))
        self._play_ops(self._schedule(kind, shape), actions, until)

    def _play_ops(self, ops: list[Op], actions: StepActions, until: tuple[OpKind, ...]) -> None:
        # Layers draw from the global generator, seeded for each op; the caller's draws continue.
        random_state = self.device.random_state()
        try:
            with self._switches():
                table = self._leaving(actions)
                self._guarded(lambda: self._player.play(ops, table).wait(*until))
        finally:
            self.device.set_random_state(random_state)

    def _leaving(self, actions: StepActions) -> dict[OpKind, Action]:
        """Return actions of which those that compute raise StepAborted when it is time to leave."""
        table = actions.table()
        if self.should_abort is not _never:
            table |= {kind: functools.partial(self._act_or_leave, table[kind]) for kind in _COMPUTE}
        return table

    def _act_or_leave(self, act: Action, op: Op) -> int | None:
        if self.should_abort() and self._may_leave():
            raise StepAborted("left on request")
        return act(op)

    def _may_leave(self) -> bool:
        """Return whether the state would be that of a complete step if lanes ended now.

        Late updates that are on their way count as done where the host can do them without lanes.
        """
        if self._updates.beyond(self._expected):  # in backward
            return False
        return not self._lacking() or (self._pending is not None and self._finishes_alone)

    def _guarded(self, run: Callable[[], None]) -> None:
        """Run; if it fails, end the lanes and note whether they left a step half applied."""
        try:
            run()
        except BaseException as error:
            # Before anything of it is freed.
            snapshot = [self.device.memory_snapshot()] if is_out_of_memory(error) else None
            if not isinstance(error, LaneTimeout):
                with suppress(Exception):  # what a lane raised meanwhile is not the cause
                    self._player.close()
                with suppress(Exception):
                    self.device.synchronize()
                self._has_left = isinstance(error, StepAborted)
                if snapshot is not None or isinstance(error, OutOfDeviceMemory | StepAborted):
                    self._finish_updates()
            self.weights_inconsistent = self.weights_inconsistent or self._updates.half_applied
            self._pending = None
            if not self.is_consistent:
                self._updates.fail()
            self._machine.forget()
            if snapshot is not None:
                where = "; ".join(getattr(error, "__notes__", ()))
                raise OutOfDeviceMemory(
                    f"device memory: the working memory of compute does not fit ({where}). Smaller "
                    "micro-batches, or fewer slots, leave more room",
                    snapshot[0],
                ) from error
            if self._machine.settings.deterministic:
                optional.deterministic.require_kernel(error)
            raise

    def _finish_updates(self) -> None:
        """Do the late updates that the ended lanes have left, one at a time.

        Their gradients are in the store: a drain of the failed step comes after the update of its
        block. Not with a disk tier, whose ring is between two blocks then, nor with matrices, which
        need the device.
        """
        if self._pending is None or not self._finishes_alone:
            return
        lacking, actions = self._lacking(), self._pending.table()
        ops = [op for op in self._schedule("flush", self._shape()) if op.block in lacking]
        optional.reference.Reference().play(ops, actions)

    @property
    def _finishes_alone(self) -> bool:
        """Whether late updates can be done one at a time, by the host alone."""
        return self._machine.settings.tier == "none" and not self._shape().matrix_blocks


def _never() -> bool:
    return False


def _make_player(device: Device, ranks: Ranks, trace: Trace | None) -> Player:
    deadline_s = LANE_DEADLINE_S + ranks.patience_s  # a lane that waits for a rank is not stuck
    return Player(device.lanes(), deadline_s=deadline_s, trace=trace)
