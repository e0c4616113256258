"""What a streamed trainer has in place of the trainer's own: a step, an optimizer, checkpoints.

    get_batch_samples     notes the micro-batches of the step that begins
    training_step         the first of a step runs the losses of all of them in turns (turns.py):
                          the engine computes one forward, and each loss goes back to its leaves
    _get_grad_norm        streams back, clips and updates
    optimizer             a shell whose learning rate their scheduler sets
    save_pretrained       of the stand-in (stand_in.py) exports; a checkpoint has the engine's, too

Laws (tests/integrations/test_trl.py)
    1. Micro-batches of a step share its two passes over the weights.
    2. Resumed from a checkpoint, a run ends with the bits of one that was not interrupted.
    3. A step that a callback ends between its micro-batches is not taken.
"""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.batch import MicroBatch
from megatrain.devices.accelerator import accelerator
from megatrain.devices.device import CpuDevice, Device
from megatrain.disk.checkpoint.custom_loop import load_checkpoint, save_checkpoint
from megatrain.disk.hf.model import HostModel, load_model
from megatrain.engine.engine import Engine
from megatrain.engine.open_step import ForwardPass
from megatrain.engine.results import StepResult
from megatrain.errors import CheckpointMismatch, ConfigError
from megatrain.hub import find_model
from megatrain.integrations.arguments import (
    check_arguments,
    model_settings,
    optimizer_of,
    precision_of,
)
from megatrain.integrations.stand_in import dropout_of, make_stand_in, set_dropout
from megatrain.integrations.turns import Call, take_turns
from megatrain.losses.leaves import TokenOutputs, TokenOutputSpec
from megatrain.memory.kinds import TensorKind, store_kinds
from megatrain.models.adapters.lora import LoraConfig
from megatrain.optim.states import STATES
from megatrain.step.settings import StepSettings

OWN_FOLDER = "megatrain"
"""Folder of the engine's own checkpoint within one of the trainer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What `streamed` was given."""

    wanted: TokenOutputSpec
    """The leaves that the trainer's loss and metrics read."""
    settings: StepSettings | None = None
    lora: LoraConfig | None = None
    make_device: Callable[[], Device] | None = None
    num_labels: int | None = None
    opened: tuple[HostModel, Engine] | None = None
    """A model at home and its engine, which a run has opened; None: the trainer opens them."""
    weights_folder: str | None = None
    """Folder through which weights go to vLLM; None: one in memory."""


class Served:
    """A model at home and its engine, which is made when it is first needed."""

    def __init__(
        self,
        home: HostModel,
        make_engine: Callable[[], Engine],
        *,
        trains: bool,
        most_tokens: int = StepSettings().micro_batch_tokens,
        is_reference: bool = False,
    ) -> None:
        """Calls are cut into micro-batches of `most_tokens`, as device memory wants them.

        With `is_reference` they are of the engine's reference.
        """
        self.home = home
        self._most_tokens = most_tokens
        self._is_reference = is_reference
        self.trains = trains
        self._make_engine = make_engine
        self._part: ForwardPass | None = None
        self.on_forward: Callable[[], None] = lambda: None
        """Is called when a step's forward begins."""
        self.batch: Sequence[MicroBatch] = ()
        """Micro-batches of the last step."""
        self.result: StepResult | None = None
        """Of the last step."""

    @functools.cached_property
    def engine(self) -> Engine:
        return self._make_engine()

    def answer(self, calls: Sequence[Call]) -> Sequence[TokenOutputs]:
        """Return the leaves of some calls; of those that train, behind a first phase."""
        wanted = calls[0].model.wanted
        parts = [_cut(call.micro, self._most_tokens) for call in calls]
        micros = [one for part in parts for one in part]
        if calls[0].trains:
            self.on_forward()
            self._part, self.batch = self.engine.forward(micros, wanted), micros
            found = iter(self._part.outputs)
        else:
            found = iter(self.engine.token_outputs(micros, wanted, reference=self._is_reference))
        # Joining is differentiable: gradients of a call's leaves reach those of its parts.
        return [_joined([next(found) for _ in part]) for part in parts]

    def go_back(self) -> float | None:
        """Stream back what the losses gave the leaves; return the norm of all gradients."""
        part, self._part = self._part, None
        assert part is not None, "no loss of the step called the model with gradients"
        leaves = [leaf for one in part.outputs for leaf in one.named().values()]
        # Its gradients are those of the losses, to the bit.
        total = sum(
            ((leaf * leaf.grad).sum() for leaf in leaves if leaf.grad is not None), torch.zeros(())
        )
        self.result = part.backward(total)
        return self.result.grad_norm

    def drop(self) -> None:
        """Let go of a step that a callback ended between its micro-batches."""
        part, self._part = self._part, None
        if part is not None:
            part.discard()

    def close(self) -> None:
        """Finish updates and release the device and the weights."""
        if "engine" in self.__dict__:
            self.drop()
            self.engine.close()
        self.home.store.close()


def _cut(micro: MicroBatch, most_tokens: int) -> list[MicroBatch]:
    """Return the rows of a micro-batch in parts of so many tokens, or of one row."""
    rows, length = micro.input_ids.shape
    step = max(1, most_tokens // length)
    begins = range(0, rows, step)
    return [micro.mapped(operator.itemgetter(slice(at, at + step))) for at in begins]


def _joined(parts: Sequence[TokenOutputs]) -> TokenOutputs:
    if len(parts) == 1:
        return parts[0]
    names = parts[0].named()
    return TokenOutputs(**{name: torch.cat([one.named()[name] for one in parts]) for name in names})


_BASE: Any = object
"""A trainer takes its place, whose methods and attributes are its package's."""


class StreamedTrainer(_BASE):  # type: ignore[misc]
    """What a streamed trainer has in place of the trainer's own."""

    optimizer: Any
    _choices: Choices
    _honored: ClassVar[Mapping[str, Any]] = {"model_init_kwargs": None}
    """Arguments that the trainer would act upon itself, with values at which it does not."""

    def __init__(self, *given: Any, **named: Any) -> None:
        found = inspect.signature(super().__init__).bind(*given, **named).arguments
        args = found.get("args")
        if args is None:
            raise ConfigError("give the trainer its arguments, as args.")
        self._check(args, found)
        name = str(found.get("model", ""))
        for kind in ("model", "ref_model"):
            if not isinstance(found.get(kind, name), str | Path | None):
                raise ConfigError(f"{kind}: weights are streamed from a folder. Give its path.")
        self._served: list[Served] = []
        self._rates: dict[int, float] = {}
        self._num_steps = 0
        self._samples: list[Any] = []
        self._losses: deque[Tensor] = deque()
        weakref.finalize(self, _close_all, self._served)
        most_tokens = self._settings.micro_batch_tokens
        if self._choices.opened is None:
            asked = model_settings(args)
            folder = str(find_model(name, asked.get("revision")).folder)
            home = load_model(
                folder,
                dtype=precision_of(args),
                kinds=self._kinds(),
                attn=asked.get("attn_implementation"),
                lora=self._choices.lora,
                num_labels=self._choices.num_labels,
            )
            this: Any = weakref.proxy(self)  # what is closed with the trainer must not keep it
            make_engine = functools.partial(type(self)._make_engine, this, args)
            policy = Served(home, make_engine, trains=True, most_tokens=most_tokens)
            self._served.append(policy)
        else:  # the run closes them
            home, engine = self._choices.opened
            folder = str(home.weights)
            policy = Served(home, lambda: engine, trains=True, most_tokens=most_tokens)
            self._served = [policy]
        found["model"] = make_stand_in(policy, name, self._wanted(args))
        takes_reference = "ref_model" in inspect.signature(super().__init__).parameters
        if takes_reference and not args.precompute_ref_log_probs:
            found["ref_model"] = self._reference(str(found.get("ref_model") or folder), args)
        with _hidden(args, self._honored):
            super().__init__(**found)
        if getattr(self, "aux_loss_enabled", False):
            raise ConfigError(
                "router_aux_loss_coef: set it to 0.0; the engine balances experts over all tokens "
                "of a step with streamed(..., settings=StepSettings(router_aux_loss=...))."
            )

    @property
    def engine(self) -> Engine:
        """The engine that trains the model."""
        return self._served[0].engine

    def close(self) -> None:
        """Finish updates, and release the device and the weights."""
        _close_all(self._served)

    def _reference(self, folder: str, args: Any) -> PreTrainedModel:
        """Return a frozen model, of which there are weights alone, with an engine of its own."""
        home = load_model(
            folder,
            dtype=precision_of(args),
            kinds=(TensorKind.HI,),
            attn=model_settings(args).get("attn_implementation"),
        )

        settings = self._settings.changed(router_aux_loss=0.0)
        make_engine = functools.partial(
            _make_frozen, home, settings, functools.partial(_make_device, self._choices, args)
        )
        most_tokens = self._settings.micro_batch_tokens
        reference = Served(home, make_engine, trains=False, most_tokens=most_tokens)
        self._served.append(reference)
        wanted = TokenOutputSpec(temperature=self._wanted(args).temperature)
        return make_stand_in(reference, folder, wanted)

    def _check(self, args: Any, given: Mapping[str, Any]) -> None:
        check_arguments(args, given)

    def _wanted(self, args: Any) -> TokenOutputSpec:
        return self._choices.wanted

    def _kinds(self) -> tuple[TensorKind, ...]:
        settings = self._settings
        return store_kinds(STATES["adamw"][settings.state], waits=settings.gradients_stay)

    @property
    def _settings(self) -> StepSettings:
        return self._choices.settings or StepSettings()

    def _make_engine(self, args: Any) -> Engine:
        home = self._served[0].home
        set_dropout(home.decoder.model, dropout_of(self.model))
        device, settings = _make_device(self._choices, args), self._settings
        optimizer = optimizer_of(
            args,
            home.decoder,
            self._rates.__getitem__,
            self.get_decay_parameter_names(self.model),
            state=settings.state,
            num_threads=device.placement.update_threads,
        )
        if args.full_determinism:
            settings = settings.changed(deterministic=True)
        if self._choices.settings is None:
            settings = settings.changed(seed=args.seed)
        return Engine(
            home.decoder,
            home.store,
            optimizer=optimizer,
            settings=settings,
            device=device,
            reference=home.reference,
        )

    # A step.

    def get_batch_samples(self, *given: Any, **named: Any) -> Any:
        self._forget_step()
        found = super().get_batch_samples(*given, **named)
        self._samples = list(found[0])
        return found

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if not self._losses:
            step = functools.partial(super().training_step, model)
            tasks = [functools.partial(step, one, num_items_in_batch) for one in self._samples]
            self._losses.extend(self._lose(tasks))
        return self._losses.popleft()

    def _lose(self, tasks: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """Compute the losses of a step."""
        return take_turns(tasks, answer)

    def _clip_grad_norm(self, model: Any) -> None:
        """Leave it to `_get_grad_norm`, which follows."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float | None:
        self._rates.pop(self._num_steps - 2, None)  # late updates are one step behind
        self._rates[self._num_steps] = float(self.optimizer.param_groups[0]["lr"])
        self._num_steps += 1
        return self._served[0].go_back()

    def _maybe_log_save_evaluate(self, *given: Any, **named: Any) -> None:
        self._forget_step()
        super()._maybe_log_save_evaluate(*given, **named)

    def _forget_step(self) -> None:
        self._losses.clear()
        self._served[0].drop()

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Return a shell that carries the learning rate: its one param never has a gradient."""
        if self.optimizer is None:
            shell = [torch.zeros(1, requires_grad=True)]
            self.optimizer = torch.optim.SGD(shell, lr=self.args.learning_rate)
        found: torch.optim.Optimizer = self.optimizer
        return found

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Leave it: the engine moves weights."""

    # Checkpoints.

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        folder, notes = Path(output_dir, OWN_FOLDER), {"steps": self._num_steps}
        save_checkpoint(folder, self._served[0].home, self.engine, notes, keep=1)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._resume(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Leave it to `_load_optimizer_and_scheduler`: masters and states come together."""

    def _load_best_model(self) -> None:
        self._resume(self.state.best_model_checkpoint)

    def _resume(self, checkpoint: str) -> None:
        notes = load_checkpoint(Path(checkpoint, OWN_FOLDER), self._served[0].home, self.engine)
        if notes is None:
            raise CheckpointMismatch(
                f"{checkpoint} has no folder {OWN_FOLDER}: another trainer saved it, or "
                "save_only_model was set. Give it as `model` to begin with its weights."
            )
        self._num_steps = int(notes["steps"])


def _make_device(choices: Choices, args: Any) -> Device:
    if choices.make_device is not None:
        return choices.make_device()
    return CpuDevice() if args.device.type == "cpu" else accelerator(str(args.device))


def _make_frozen(
    home: HostModel, settings: StepSettings, make_device: Callable[[], Device]
) -> Engine:
    return Engine(home.decoder, home.store, settings=settings, device=make_device())


@contextmanager
def _hidden(args: Any, honored: Mapping[str, Any]) -> Iterator[None]:
    """Let a trainer find other values of arguments that are honored already."""
    given = {name: getattr(args, name) for name in honored if hasattr(args, name)}
    for name in given:
        setattr(args, name, honored[name])
    try:
        yield
    finally:
        for name, value in given.items():
            setattr(args, name, value)


def answer(calls: Sequence[Call]) -> Sequence[TokenOutputs]:
    """Return the leaves of calls of one model."""
    served: Served = calls[0].model.serves
    return served.answer(calls)


def _close_all(served: list[Served]) -> None:
    while served:
        served.pop().close()
