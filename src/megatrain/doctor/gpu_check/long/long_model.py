"""The model of a long check: the blocks of an 8B model, and fewer of them, as the device allows.

Widths, grouped queries and vocabulary are those of Qwen3-8B where memory and time allow, so that
ops cost what they cost there; a smaller device gets the next smaller form of the same kind.

Laws (tests/doctor/gpu_check/long/test_long_model.py)
    1. A card of 24 GB beside 64 GB gets the blocks of 8B; its steps take a few seconds.
    2. Whatever the device, four queries share a key, and the plan of a step fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatrain.batch import MicroBatch
from megatrain.devices.device import Device
from megatrain.devices.runtime import TorchRuntime
from megatrain.doctor.gpu_check.long.given import Given
from megatrain.doctor.gpu_check.long.results import CannotRun
from megatrain.doctor.subject import Subject
from megatrain.doctor.timed_step import TimedModel, median_seconds, optimizer_for, random_store
from megatrain.engine.engine import Engine
from megatrain.lanes.trace import Trace, step_split
from megatrain.memory.store import Store
from megatrain.models.decoder import Decoder
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.machine.reserve import with_one_budget
from megatrain.planning.model.skeleton import shape_of
from megatrain.planning.plan import Plan, make_plan
from megatrain.planning.search import Search
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

STEP_S = 6.0
"""The most that a step may take by the rate of products alone, on a device that is fast."""
PINS = {"state": "measured with exact states", "tier": "measured in memory"}
_FORMS = (
    # layers, hidden, intermediate, heads, kv heads, vocabulary, tokens of a row, of a step
    (8, 4096, 12288, 32, 8, 151936, 2048, 16384),
    (8, 2048, 6144, 16, 4, 151936, 2048, 16384),
    (8, 1024, 3072, 8, 2, 32768, 1024, 8192),
    (6, 512, 1536, 8, 2, 8192, 256, 1024),
    (4, 256, 768, 4, 1, 2048, 64, 256),
    (4, 64, 192, 4, 1, 512, 32, 128),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongModel:
    """The model and its usual step: one flat row for each of two micro-batches."""

    form: TimedModel
    step_tokens: int

    @property
    def micro_tokens(self) -> int:
        return self.step_tokens // 2

    def with_step(self, tokens: int, *, packed: bool, micro: int | None = None) -> TimedModel:
        """Return it with steps of so many tokens, in micro-batches of `micro`, or the usual."""
        micro = max(self.form.length, min(tokens, micro or self.micro_tokens))
        rows = micro // self.form.length
        num_micro = max(1, tokens // (rows * self.form.length))
        return replace(self.form, rows=rows, num_micro=num_micro, packed=packed)

    def workload(self, tokens: int, *, packed: bool, **changes: Any) -> Workload:
        """Return the work of such a step, for the planner."""
        return Workload(
            model=shape_of(self.form.decoder(), "long check"),
            step_tokens=tokens,
            sequence=self.form.length,
            packed=packed,
            **changes,
        )

    def settings(self, **changes: Any) -> StepSettings:
        """Return usual settings, with some changed."""
        usual = StepSettings(micro_batch_tokens=self.micro_tokens, tape="host")
        return usual.changed(**changes)

    def facts(self) -> dict[str, Any]:
        form = self.form
        return {
            "layers": form.layers,
            "hidden": form.hidden,
            "intermediate": form.intermediate,
            "queries_per_key": form.heads // form.kv_heads,
            "vocabulary": form.vocabulary,
            "row_tokens": form.length,
            "step_tokens": self.step_tokens,
            "dtype": form.dtype,
        }


def long_model(profile: MachineProfile, scale: float) -> LongModel:
    """Return the largest form that fits and whose steps take STEP_S at most. Raises CannotRun."""
    flops = max(point.flops for point in profile.forward_flops)
    for model in forms():
        form, workload = model.form, model.workload(model.step_tokens, packed=True)
        tables = form.vocabulary * form.hidden
        seconds = 8 * (workload.model.params - tables) * model.step_tokens / flops
        if seconds <= scale * STEP_S and Search(profile, workload, pins=PINS).first_home():
            return model
    raise CannotRun("no model is small enough for the memory of this machine")


def forms() -> Iterator[LongModel]:
    """Yield the forms, the largest first."""
    for layers, hidden, intermediate, heads, kv_heads, vocabulary, length, tokens in _FORMS:
        form = TimedModel(
            layers=layers,
            hidden=hidden,
            intermediate=intermediate,
            heads=heads,
            kv_heads=kv_heads,
            vocabulary=vocabulary,
            length=length,
            rows=1,
            num_micro=1,
        )
        yield LongModel(form=form, step_tokens=tokens)


def planned_step(given: Given, model: LongModel) -> Plan:
    """Return the plan of a usual step, packed."""
    workload = model.workload(model.step_tokens, packed=True)
    return make_plan(with_one_budget(given.profile), workload, pins=PINS)


@dataclass(slots=True, kw_only=True)
class Steps:
    """Steps of one model on a device; the store is kept from one setting to the next."""

    subject: Subject
    decoder: Decoder
    num_threads: int
    store: Store | None = None
    update: str = ""

    def store_for(self, settings: StepSettings) -> Store:
        if self.store is None or self.update != settings.update:
            self.store = None  # before the next one is there
            self.store, self.update = random_store(self.decoder, settings), settings.update
        return self.store

    def engine(self, settings: StepSettings, device: Device) -> Engine:
        """Return an engine with a trace, to be closed by the caller."""
        return Engine(
            self.decoder,
            self.store_for(settings),
            optimizer=optimizer_for(settings, self.num_threads),
            device=device,
            trace=True,
            settings=settings,
        )

    def time(
        self, settings: StepSettings, batch: list[MicroBatch], num_steps: int
    ) -> tuple[float, Trace, int]:
        """Return the median step, the trace of all, and the most device memory in use."""
        device = self.subject.new_device()
        if isinstance(self.subject.runtime, TorchRuntime):
            self.subject.runtime.forget_peak()
        with self.engine(settings, device) as engine:
            step_s = median_seconds(engine, batch, num_steps)
        assert engine.trace is not None
        return step_s, engine.trace, device.peak_bytes


def steps_of(given: Given, model: LongModel) -> Steps:
    """Return steps of the model with the threads that a run would give to updates."""
    threads = max(1, int(given.profile.update_cores))
    return Steps(subject=given.subject, decoder=model.form.decoder(), num_threads=threads)


def step_facts(step_s: float, trace: Trace, tokens: int) -> dict[str, Any]:
    """Return the figures of a timed step, by the device's own clock."""
    last = trace.last_step()
    (summary,) = last.step_summaries()
    split = step_split(last, step_s)
    return {
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "device_busy_s": last.lane_summaries()["compute"].busy_s,
        "host_paced_s": summary.host_paced_s,
        "limit": summary.bottleneck,
        "compute_share": split["compute"] / step_s,
    }
