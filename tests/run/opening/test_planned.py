"""Laws of planned.py: what `auto` becomes, and what is refused before a weight is read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.cli.demo import write_demo
from megatrain.config import Config, load_config
from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.devices.device import CpuDevice
from megatrain.disk.hf.model import ModelFolder
from megatrain.errors import DoesNotFit, OutOfDeviceMemory
from megatrain.models.decoder import Decoder
from megatrain.optim.states import STATES
from megatrain.planning.from_config import step_settings_of
from megatrain.planning.machine.profile import MachineProfile, unmeasured
from megatrain.planning.plan import Plan
from megatrain.ranks.ranks import Ranks
from megatrain.report.run import read_run
from megatrain.report.summary import run_facts as report_facts
from megatrain.run.opening import planned
from megatrain.run.opening.planned import cap_device, facts, plan_run
from megatrain.run.opening.resumption import read_model
from megatrain.run.trainer import Trainer
from testkit.rank_threads import ONE_AT_A_TIME, Together
from testkit.simulated.accelerator import Simulator

BASE = 2_000_000
PLENTY = 1 << 28


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(planned, "resident_bytes", lambda: BASE)
    monkeypatch.setattr(planned, "free_bytes", lambda: PLENTY)
    monkeypatch.setattr(planned, "LATER_BYTES", 0)
    monkeypatch.setattr(planned, "give_back_at_once", lambda: None)
    return write_demo(tmp_path / "demo", num_steps=2)


@pytest.fixture(params=["measured", "unmeasured"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    found = _profile() if request.param == "measured" else None
    monkeypatch.setattr(planned, "measured_profile", lambda: found)
    return str(request.param)


def _profile() -> MachineProfile:
    return unmeasured(ram_bytes=1 << 30, base_bytes=BASE).changed(source="measured")


def config_of(path: Path, *changes: str) -> Config:
    return load_config(path, ["model.dtype=bf16", "train.micro_batch_tokens=auto", *changes])


def plan_of(path: Path, *changes: str) -> Plan:
    config = config_of(path, *changes)
    return plan_run(config, CpuDevice(), decoder_of(config))


def decoder_of(config: Config) -> Decoder:
    return read_model(config, Path(config.model.name_or_path)).decoder


def least_ram(path: Path, *changes: str, once: bool = False) -> int:
    """Return the smallest `memory.ram` that is enough, if asked so without a second backward."""
    low, high = BASE, PLENTY
    while low < high:
        middle = (low + high) // 2
        try:
            plan = plan_of(path, f"memory.ram={middle}B", *changes)
            is_enough = not once or plan.settings.update != "second_backward"
        except DoesNotFit:
            is_enough = False
        low, high = (low, middle) if is_enough else (middle + 1, high)
    return low


def test_what_the_config_decides_is_kept(path: Path, machine: str) -> None:
    plan = plan_of(path, "train.micro_batch_tokens=256", "memory.slots=3", "memory.tape=host")
    settings = plan.settings
    assert (settings.micro_batch_tokens, settings.slots, settings.tape) == (256, 3, "host")


@pytest.mark.parametrize(("measured", "free", "expected"), [(8, 5, 5), (5, 8, 5), (None, 5, 5)])
def test_a_card_is_planned_with_what_is_free_now_and_was_there_when_it_was_measured(
    path: Path, monkeypatch: pytest.MonkeyPatch, measured: int | None, free: int, expected: int
) -> None:
    card = None
    if measured is not None:
        card = _profile().changed(device_bytes=measured << 30, unified=False)
    monkeypatch.setattr(planned, "measured_profile", lambda: card)
    device = AcceleratorDevice(Simulator(), cap_bytes=free << 30)
    config = config_of(path)
    plan = plan_run(config, device, decoder_of(config))
    assert plan.profile.device_bytes == expected << 30
    (reserve,) = (line for line in plan.ledger.lines if line.purpose == "libraries and driver")
    assert reserve.place == "device"
    assert reserve.num_bytes >= (expected << 30) // 8


def least_free(path: Path, monkeypatch: pytest.MonkeyPatch, *, integrated: bool) -> int:
    """Return the least free host memory that a run on such a device starts with."""
    config = config_of(path)
    decoder, low, high = decoder_of(config), 1 << 20, PLENTY
    while high - low > 1 << 14:
        middle = (low + high) // 2
        monkeypatch.setattr(planned, "free_bytes", lambda free=middle: free)
        try:
            plan_run(config, AcceleratorDevice(Simulator(integrated=integrated)), decoder)
            high = middle
        except DoesNotFit:
            low = middle
    return high


@pytest.mark.merge
def test_an_integrated_device_and_its_host_share_one_budget(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned, "measured_profile", lambda: None)
    config = config_of(path)
    decoder = decoder_of(config)
    apart = least_free(path, monkeypatch, integrated=False)
    together = least_free(path, monkeypatch, integrated=True)
    monkeypatch.setattr(planned, "free_bytes", lambda: together)
    plan = plan_run(config, AcceleratorDevice(Simulator(integrated=True)), decoder)
    taken = plan.ledger.total("host")
    assert taken > plan.ledger.total("device") > 0
    assert taken <= plan.profile.ram_bytes == int(0.9 * (together + BASE))
    # The host alone would be content with less, as it is where the device has its own memory.
    monkeypatch.setattr(planned, "free_bytes", lambda: apart)
    assert plan_run(config, AcceleratorDevice(Simulator()), decoder).fits
    text = r"does not fit: memory of host and device together \d.* short\. Ways out:"
    with pytest.raises(DoesNotFit, match=text):
        plan_run(config, AcceleratorDevice(Simulator(integrated=True)), decoder)


@pytest.mark.parametrize("integrated", [True, False])
def test_an_integrated_device_is_capped_to_what_the_host_leaves_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, integrated: bool
) -> None:
    monkeypatch.setattr(planned, "measured_profile", lambda: None)
    config, simulator = config_of(path), Simulator(integrated=integrated)
    device = AcceleratorDevice(simulator)
    plan = plan_run(config, device, decoder_of(config))
    without = device.free_bytes
    cap_device(device, plan)
    if not integrated:
        assert device.free_bytes == without
        return
    lines = [line for line in plan.ledger.lines if line.place == "host"]
    host = sum(line.num_bytes for line in lines if line.purpose != "device memory")
    assert device.free_bytes + int(1.04 * host) == plan.profile.ram_bytes
    assert device.free_bytes >= plan.ledger.total("device")
    with pytest.raises(OutOfDeviceMemory, match=r"^device memory: slots needs .*, .* are free"):
        device.allocate(device.free_bytes + 1, "slots")


def test_a_run_that_continues_has_its_prediction_and_keeps_its_bits(
    path: Path, machine: str
) -> None:
    config, device = config_of(path), CpuDevice()
    kept = {"micro_batch_tokens": 128, "chunk_tokens": 64, "tile_tokens": 32}
    resumed: Any = SimpleNamespace(known=SimpleNamespace(kept=kept, batch_tokens=512))
    plan = plan_run(config, device, decoder_of(config), resumed)
    assert {name: getattr(plan.settings, name) for name in kept} == kept
    found = facts(plan, device, [])
    assert found["settings"]["chunk_tokens"] == 64
    if machine == "measured":
        assert found["predicted"]["step_s"] > 0
        assert found["reasons"]["micro_batch_tokens"] == "unchanged since the start of the run"
    little = config_of(path, f"memory.ram={BASE}B")
    plan_run(little, device, decoder_of(config), resumed)  # it ran before: it is not refused


@pytest.mark.merge
def test_memory_decides_where_states_live_and_the_config_how_exact_they_are(path: Path) -> None:
    """A run that needs more than there is is refused with the line that would fit."""
    least = {state: least_ram(path, f"optim.state={state}", once=True) for state in STATES["adamw"]}
    assert least["fp32"] > least["bf16"] > least["8bit"]
    for state, num_bytes in least.items():
        plan = plan_of(path, f"memory.ram={num_bytes}B", f"optim.state={state}")
        assert plan.settings.state == state
        assert plan.settings.update != "second_backward"
    twice = least_ram(path)
    assert twice < least["fp32"]
    assert plan_of(path, f"memory.ram={twice}B").settings.state == "fp32"
    with pytest.raises(DoesNotFit, match=r"optim\.state=bf16 \(host .*\)\n.* weights move 0\.2 %"):
        plan_of(path, f"memory.ram={twice - 1}B")


def test_elsewhere_simple_rules_decide(path: Path) -> None:
    config = config_of(path)
    plan = plan_of(path)
    assert not plan.knows_time
    assert plan.facts()["predicted"] is None
    assert plan.settings == step_settings_of(config.decided(kernels="none"), unified=True)


@pytest.mark.merge
def test_where_the_rules_do_not_fit_something_that_does_is_found(path: Path) -> None:
    usual = plan_of(path).settings
    cap = f"memory.ram={least_ram(path)}B"
    assert plan_of(path, cap).settings.micro_batch_tokens < usual.micro_batch_tokens
    with pytest.raises(DoesNotFit):
        plan_of(path, cap, f"train.micro_batch_tokens={usual.micro_batch_tokens}")


@pytest.mark.merge
def test_a_refusal_names_changes_that_fit(path: Path, machine: str) -> None:
    cap = f"memory.ram={least_ram(path) - 1}B"
    with pytest.raises(DoesNotFit) as refused:
        plan_of(path, cap)
    first, *ways = re.findall(r"\n  (\S+=\S+)", str(refused.value))
    assert first.startswith("memory.ram=")
    assert ways
    plan_of(path, first)
    for way in ways:
        plan_of(path, cap, way)


@pytest.mark.merge
def test_what_is_not_free_cannot_be_had(
    path: Path, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = least_ram(path)
    monkeypatch.setattr(planned, "free_bytes", lambda: least - BASE - 1)
    with pytest.raises(DoesNotFit, match=r"host memory .* short"):
        plan_of(path, f"memory.ram={PLENTY}B")
    monkeypatch.setattr(planned, "free_bytes", lambda: least - BASE)
    plan_of(path)


@pytest.mark.merge
def test_where_memory_is_tight_malloc_keeps_nothing(
    path: Path, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(planned, "give_back_at_once", lambda: told.append(True))
    plan_of(path)
    assert not told
    plan_of(path, f"memory.ram={int(1.2 * least_ram(path))}B")
    assert told


def test_a_run_is_refused_before_its_weights_are_read(
    path: Path, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelFolder, "load", lambda *_: pytest.fail("loaded"))
    with pytest.raises(DoesNotFit, match=r"memory\.ram="):
        Trainer(config_of(path, f"memory.ram={BASE}B"))


def test_steps_are_compared_with_their_roofline_where_the_machine_is_known(
    path: Path, machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Trainer(load_config(path, ["eval.samples=0"])) as trainer:
        trainer.train()
        run = trainer.folder.path
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    shown, found = capsys.readouterr().err, read_run(run, "run")
    if machine == "measured":
        least, name = trainer.plan.roofline().of(steps[0]["num_tokens"])
        share = min(1.0, least / steps[0]["seconds"])
        assert steps[0]["of_roofline"] == pytest.approx(share, abs=1e-4)
        assert f"% of roofline ({name})" in shown
        assert " measured, " in shown
        assert report_facts(found)["Share of the roofline"].endswith(f"({name})")
        assert " to " in report_facts(found)["Time of a step, predicted"]
    else:
        assert "of_roofline" not in steps[0]
        assert "roofline" not in shown
        assert shown.count("this machine was not measured") == 1
        assert "Share of the roofline" not in report_facts(found)


def test_nothing_is_compared_with_a_machine_that_was_busy_when_it_was_measured(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rates are too low, so steps would be faster than the roofline."""
    monkeypatch.setattr(planned, "measured_profile", _profile)
    busy = SimpleNamespace(disturbance="Other programs ran: 9.0 processes on 2 cores.")
    monkeypatch.setattr(planned, "kept_examination", lambda: busy)
    with Trainer(load_config(path, ["eval.samples=0"])) as trainer:
        trainer.train()
        run = trainer.folder.path
    shown, found = capsys.readouterr().err, read_run(run, "run")
    assert "of_roofline" not in (run / "metrics.jsonl").read_text()
    assert "roofline" not in shown
    assert not re.search(r"measured, .* predicted", shown)
    assert planned.MEASURED_BUSY in shown
    assert "Time of a step, predicted" not in report_facts(found)


def test_no_share_of_the_roofline_is_above_all_of_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned, "measured_profile", _profile)
    slow = SimpleNamespace(of=lambda tokens: (1e6, "compute"))
    monkeypatch.setattr(Plan, "roofline", lambda plan: slow)
    with Trainer(load_config(path, ["eval.samples=0"])) as trainer:
        trainer.train()
        lines = (trainer.folder.path / "metrics.jsonl").read_text().splitlines()
    shares = [json.loads(line)["of_roofline"] for line in lines if "of_roofline" in line]
    assert shares == [1.0] * len(shares) != []


def test_a_run_by_rows_is_planned_and_advised_in_rows(path: Path, machine: str) -> None:
    config = config_of(path, "train.batch_tokens=null", "train.batch_rows=8")
    with Trainer(config, dry_run=True) as trainer:
        workload = trainer.plan.workload
    assert workload.step_setting == ("train.batch_rows", 8)
    assert workload.with_step(workload.step_tokens // 2).step_setting == ("train.batch_rows", 4)
    assert workload.step_tokens < 8 * config.data.max_length, "as long as the longest step"


@pytest.mark.usefixtures("machine")
def test_ranks_on_a_processor_plan_for_their_host(path: Path) -> None:
    config = config_of(path)

    def work(ranks: Ranks) -> Plan:
        with ONE_AT_A_TIME:
            decoder = decoder_of(config)
        return plan_run(config, CpuDevice(copying=True), decoder, ranks=ranks)

    first, second = Together(2).run(work)
    assert first.settings == second.settings
    assert first.workload.division.size == 2
    purposes = {line.purpose for line in first.ledger.lines if line.place == "host"}
    assert {"weight slots", "exchange"} <= purposes
    alone = plan_run(config, CpuDevice(), decoder_of(config))
    assert alone.workload.division.is_alone
    assert "exchange" not in {line.purpose for line in alone.ledger.lines}
