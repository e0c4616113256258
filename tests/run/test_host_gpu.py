"""A run on an accelerator that torch drives is the run on the CPU, bit for bit, and resumes."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from megatrain.cli.demo import byte_tokenizer
from megatrain.config import Config
from megatrain.devices.device import CpuDevice
from megatrain.devices.pinning import NotPinned
from megatrain.errors import DoesNotFit, Interrupted, OutOfDeviceMemory
from megatrain.memory.kinds import TensorKind
from megatrain.planning.memory.predicted import TEACHER
from megatrain.run.callbacks import Callback, TrainerControl, TrainerState
from megatrain.run.opening.opening import open_device, open_run
from megatrain.run.trainer import Trainer
from testkit.patience import HANG_S
from testkit.runs import Setting, State, config_of, run, state_of, write_model, write_world

pytest.importorskip("testkit.host_gpu", exc_type=ImportError)

from testkit.host_gpu import control, module

pytestmark = pytest.mark.hostgpu


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_world(folder)
    return folder


def trained(world: Path, folder: Path, setting: Setting, device: str, **how: Any) -> State | None:
    return run(config_of(world, folder, setting, memory={"device": device}), **how)


def same(first: State | None, second: State | None) -> bool:
    assert first is not None
    assert second is not None
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.merge
def test_a_run_has_the_bits_of_the_cpu(world: Path, tmp_path: Path) -> None:
    setting = Setting(tape="host", save_every=None)
    expected = trained(world, tmp_path / "cpu", setting, "cpu")
    with control.timed("random"):
        found = trained(world, tmp_path / "hostgpu", setting, "hostgpu:1")
    assert same(found, expected)
    assert control.registered_bytes() == 0


@pytest.mark.merge
def test_a_run_that_dies_and_resumes_is_the_whole_run(world: Path, tmp_path: Path) -> None:
    """With dropout, whose numbers are drawn by the device's own generator."""
    setting = Setting(dropout=0.1, eval_every=None)
    whole = trained(world, tmp_path / "whole", setting, "hostgpu:1")
    with control.timed("lazy"):
        trained(world, tmp_path / "died", setting, "hostgpu:1", die=5)
        resumed = trained(world, tmp_path / "died", setting, "hostgpu:1", resume=True)
    assert same(resumed, whole)
    assert not same(whole, trained(world, tmp_path / "cpu", setting, "cpu")), "other numbers"


MIXTURE_LAYER_BYTES = 2 * 64 * 3 * 256 * 1024
"""The experts of one of its layers, in bf16: 96 MiB."""


def write_mixture(folder: Path) -> None:
    """Write a model of two layers with 64 experts each."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    config = MixtralConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=1024, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        num_local_experts=64, num_experts_per_tok=2, tie_word_embeddings=False, pad_token_id=0,
        eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


@pytest.mark.merge
def test_a_layer_larger_than_the_device_trains_resumes_and_exports(
    world: Path, tmp_path: Path
) -> None:
    """Its experts are frozen and come in pages; its device peak is that of the plan within 3 %."""
    write_mixture(tmp_path / "mixture")
    setting = Setting(eval_every=None, save_every=1, state="8bit")
    vram = "95MiB"  # a layer has 96

    def config(name: str, **memory: Any) -> Config:
        return config_of(
            world,
            tmp_path / name,
            setting,
            model={"name_or_path": str(tmp_path / "mixture"), "frozen": ["*experts*"]},
            train={"steps": 2, "batch_tokens": 64, "micro_batch_tokens": 64},
            memory={"device": "hostgpu:1", "tape": "host", **memory},
        )

    paged = {"vram": vram, "expert_pages": 16}
    control.start_anew()
    with Trainer(config("paged", **paged)) as trainer:
        ledger, settings = trainer.plan.ledger, trainer.plan.settings
        trainer.train()
        peak, found = torch.accelerator.max_memory_allocated(1), state_of(trainer)
        trainer.save_model(tmp_path / "exported")
    assert settings.expert_pages == 16
    assert ledger.total("device") < MIXTURE_LAYER_BYTES - (1 << 20)
    driver = sum(line.num_bytes for line in ledger.lines if line.purpose == "libraries and driver")
    assert peak == pytest.approx(ledger.total("device") - driver, rel=0.03)
    with pytest.raises(DoesNotFit, match="device memory"):
        open_run(config("refused", vram=vram, expert_pages=1))
    control.start_anew()
    assert same(found, run(config("whole", expert_pages=1)))
    control.start_anew()
    with pytest.raises(Interrupted):
        run(config("stopped", **paged), stop=1)
    control.start_anew()
    assert same(found, run(config("stopped", **paged), resume=True))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.bfloat16)
    assert all(found[name, TensorKind.HI].equal(param) for name, param in plain.named_parameters())


@pytest.mark.merge
def test_a_teacher_three_times_the_size_of_the_device_is_learned_from(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits of the CPU, within the device memory of the plan, also if the run resumes."""
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 23}
    write_model(tmp_path / "teacher", 0.0, **sizes)
    weights = sum(path.stat().st_size for path in (tmp_path / "teacher").glob("*.safetensors")) // 2
    vram = 48 << 20
    assert weights > 3 * vram
    loss = {"name": "distill", "teacher": str(tmp_path / "teacher"), "top_k": 8}

    def config(name: str, **memory: Any) -> Config:
        rows = {"path": str(world / "rows.jsonl"), "rows": 12}
        data, setting = {"train": rows, "eval": None}, Setting(eval_every=None)
        changes = {"data": data, "loss": loss, "memory": memory, "train": {"steps": 3}}
        return config_of(world, tmp_path / name, setting, **changes)

    small: dict[str, Any] = {"device": "hostgpu:1", "vram": f"{vram}B"}
    control.start_anew()
    with Trainer(config("small", **small)) as trainer:
        ledger = trainer.plan.ledger
        trainer.train()
        peak, found = torch.accelerator.max_memory_allocated(1), state_of(trainer)
    before = {line.place for line in ledger.lines if line.purpose == TEACHER and line.num_bytes}
    assert before == {"host", "device"}, "it is larger than the run"
    assert 2 * weights / 24 < peak <= ledger.total("device") <= vram
    assert same(found, run(config("cpu", device="cpu")))
    run(config("died", **small), die=3)
    control.start_anew()
    assert same(found, run(config("died", **small), resume=True))


@pytest.mark.merge
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_run_repeats_and_resumes_where_kernels_do_if_they_are_asked_to(
    world: Path, tmp_path: Path, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that adds in another order each time, unless torch is told not to."""
    forward, orders = LlamaMLP.forward, count(1)

    def atomic(module: LlamaMLP, hidden: torch.Tensor) -> Any:
        found = forward(module, hidden)
        repeats = torch.are_deterministic_algorithms_enabled()
        return found if repeats else found * (1 + 2**-7 * (next(orders) % 3))

    monkeypatch.setattr(LlamaMLP, "forward", atomic)

    def states(name: str, **how: Any) -> State | None:
        changes = {"memory": {"device": "hostgpu:1"}, "train": {"deterministic": deterministic}}
        return run(config_of(world, tmp_path / name, Setting(eval_every=None), **changes), **how)

    whole, again = states("whole"), states("again")
    states("died", die=5)
    resumed = states("died", resume=True)
    assert same(whole, again) == same(whole, resumed) == deterministic
    assert not torch.are_deterministic_algorithms_enabled()


class Fuller(Callback):
    """Takes most of the device's memory before a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(
        self, config: Config, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.global_step == self._step - 1:
            torch.accelerator.synchronize(1)
            torch.accelerator.empty_cache()
            module.set_per_process_memory_fraction(16 / 4096, 1)


@pytest.mark.merge
@pytest.mark.parametrize("fits_less", [True, False])
def test_a_step_in_the_middle_that_no_longer_fits_is_done_again_smaller(
    tmp_path: Path, fits_less: bool
) -> None:
    """The sibling: micro-batches that the config gives stay, and the run ends."""
    write_world(tmp_path, num_rows=500)
    setting = Setting(eval_every=None, save_every=2)

    def config(name: str, micro: int | str) -> Config:
        train = {"steps": 4, "batch_tokens": 8192, "micro_batch_tokens": micro}
        memory = {"device": "hostgpu:1"}
        return config_of(tmp_path, tmp_path / name, setting, train=train, memory=memory)

    given = config("fuller", "auto" if fits_less else 8192)
    with Trainer(given, callbacks=[Fuller(3)]) as trainer:
        with nullcontext() if fits_less else pytest.raises(OutOfDeviceMemory):
            trainer.train()
        found, micro = state_of(trainer), trainer.plan.settings.micro_batch_tokens
        assert trainer.state.global_step == (4 if fits_less else 2)
    control.start_anew()
    assert (micro < 8192) == fits_less
    if fits_less:
        with pytest.raises(Interrupted):
            run(config("stopped", "auto"), stop=2)
        assert same(found, run(config("stopped", micro), resume=True))


@pytest.mark.merge
@pytest.mark.parametrize("told", [True, False])
def test_a_run_on_a_device_without_registration_allocates_what_is_copied(
    world: Path, tmp_path: Path, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sibling: where torch would round sizes up, copies go through a ring, with a warning."""
    if not told:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.9")
    setting = Setting(tape="host", save_every=None)
    expected = trained(world, tmp_path / "cpu", setting, "cpu")
    config = config_of(world, tmp_path / "run", setting, memory={"device": "hostgpu:1"})
    warned = nullcontext() if told else pytest.warns(NotPinned)
    with control.without_registration(), control.timed("random"), warned:
        with Trainer(config) as trainer:
            trainer.train()
            found, store = state_of(trainer), trainer.home.store
        pinned = [
            store.arena(kind).is_pinned()
            for kind in (TensorKind.HI, TensorKind.GRAD, TensorKind.LO)
        ]
    assert pinned == [told, told, False]
    assert same(found, expected)


@pytest.mark.merge
def test_a_run_in_one_memory_has_the_bits_of_the_cpu_and_resumes(
    world: Path, tmp_path: Path
) -> None:
    setting = Setting(save_every=2)
    expected = trained(world, tmp_path / "cpu", setting, "cpu")
    with control.integrated():
        assert isinstance(open_device(config_of(world, tmp_path, setting)), CpuDevice)
        with control.timed("random"):
            found = trained(world, tmp_path / "hostgpu", setting, "hostgpu:1")
        trained(world, tmp_path / "died", setting, "hostgpu:1", die=5)
        resumed = trained(world, tmp_path / "died", setting, "hostgpu:1", resume=True)
    assert same(found, expected)
    assert same(resumed, expected)
    plan = json.loads((tmp_path / "hostgpu" / "plan.json").read_text())
    purposes = {line["purpose"] for line in plan["ledger"]}
    assert "weight slots" not in purposes
    assert "device memory" in purposes


@pytest.mark.merge
def test_the_command_line_trains_on_it(world: Path, tmp_path: Path) -> None:
    config = config_of(world, tmp_path / "run", Setting(), memory={"device": "auto"})
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    done = subprocess.run(
        [sys.executable, "-m", "testkit.host_gpu", "train", str(path)],
        capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "hostgpu:0" in done.stdout + done.stderr
