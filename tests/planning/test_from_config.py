"""One config has one plan: `estimate` and `train` cannot tell different things."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from megatrain import choices
from megatrain.config import Config, load_config
from megatrain.devices.accelerator import AcceleratorDevice, Coherent
from megatrain.devices.device import CpuDevice, Device
from megatrain.disk.hf.model import read_model_folder
from megatrain.errors import ConfigError
from megatrain.planning import estimate as estimating
from megatrain.planning.catalog.asked_machines import find_machine
from megatrain.planning.estimate import estimate
from megatrain.planning.from_config import (
    LINEAR_ATTENTION_FAMILIES,
    compile_choice,
    free_on_disk,
    fused,
    kernels_choice,
    linear_attention_path,
    step_settings_of,
    within,
)
from megatrain.planning.machine.examination import Examination
from megatrain.planning.machine.facts import host_facts
from megatrain.planning.machine.profile import MEASURED, MachineProfile
from megatrain.planning.plan import Plan
from megatrain.run.opening import planned
from megatrain.run.opening.model import adapters_of
from megatrain.run.opening.planned import plan_run
from testkit.families import save_tiny
from testkit.machines import DESKTOP, GIB, PROCESSOR
from testkit.simulated.accelerator import Simulator

MACHINES = [DESKTOP, PROCESSOR, find_machine("spark")[0].profile()]
SETTINGS: list[list[str]] = [
    [],
    ["data.packing=false", "data.max_length=512"],
    ["train.max_grad_norm=null", "train.batch_tokens=8k"],
    ["model.dtype=fp32", "model.attn=eager"],
    ["model.frozen=[model.embed_tokens*, lm_head*]"],
    ["train.micro_batch_tokens=4096", "memory.chunk_tokens=512", "memory.slots=3"],
    ["train.compile=auto", "data.packing=false"],
    ["lora.rank=8", "lora.targets=[q_proj, v_proj]", "lora.dropout=0.1"],
    ["memory.ram=2GB", "memory.vram=1GB"],
]


@pytest.fixture(autouse=True)
def _any_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are those of a Python that compiles."""
    monkeypatch.setattr(choices, "why_not_compiled", lambda: "")


@pytest.fixture(params=MACHINES, ids=lambda profile: profile.name)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MachineProfile:
    """A machine that doctor has measured, with all of its memory free."""
    profile: MachineProfile = request.param.changed(source="measured")
    found = Examination(
        facts=host_facts(), profile=profile, kernel="native", folder=".", when="now", seconds=1.0
    )
    monkeypatch.setattr(estimating, "kept_examination", lambda: found)
    monkeypatch.setattr(estimating, "free_bytes", lambda: profile.ram_bytes)
    monkeypatch.setattr(planned, "measured_profile", lambda: profile)
    monkeypatch.setattr(planned, "free_bytes", lambda: profile.ram_bytes - profile.base_bytes)
    monkeypatch.setattr(planned, "resident_bytes", lambda: profile.base_bytes)
    monkeypatch.setattr(planned, "LATER_BYTES", 0)
    monkeypatch.setattr(planned, "give_back_at_once", lambda: None)
    return profile


def as_train_plans(path: Path, settings: list[str], machine: MachineProfile) -> Plan:
    config = load_config(path, settings)
    model = config.model
    device: Device = CpuDevice()
    if not machine.on_host:
        kind = Coherent if machine.unified and config.memory.slots == "auto" else AcceleratorDevice
        device = kind(Simulator(integrated=machine.integrated))
    read = read_model_folder(
        model.name_or_path,
        dtype=model.dtype,
        frozen=model.frozen,
        attn=model.attn,
        lora=adapters_of(config)[0],
    )
    return plan_run(config, device, read.decoder)


def config_for(folder: Path, family: str) -> Path:
    save_tiny(folder / "model", family)
    path = folder / "run.yaml"
    path.write_text(f"model: {folder / 'model'}\ndata: never.jsonl\n")
    return path


AUTO = {"compile": "auto"}


@pytest.mark.parametrize(
    ("settings", "unified", "expected"),
    [
        ({"train": AUTO, "data": {"packing": False}}, False, True),
        ({"train": AUTO, "data": {"packing": False}}, True, False),
        ({"train": AUTO, "data": {"packing": True}}, False, True),
        (
            {"train": AUTO, "data": {"packing": False}, "memory": {"tile_tokens": 4096}},
            False,
            False,
        ),
        ({"train": AUTO | {"kernels": "liger"}, "data": {"packing": False}}, False, False),
        ({"train": {"compile": True}}, True, True),
        ({}, False, False),
    ],
    ids=str,
)
def test_layers_are_compiled_where_that_is_known_to_suit(
    settings: dict[str, dict[str, Any]], unified: bool, expected: bool
) -> None:
    data = {"train": "rows.jsonl"} | settings.get("data", {})
    config = Config.model_validate({"model": "m", **settings, "data": data})
    assert compile_choice(config, unified=unified)[0] is expected
    settings_of_step = step_settings_of(config.decided(kernels="none"), unified=unified)
    assert settings_of_step.compile is expected


def test_layers_are_not_compiled_by_themselves_on_a_python_that_hides_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choices, "why_not_compiled", lambda: "this Python hides changes")
    config = Config.model_validate({"model": "m", "data": "rows.jsonl", "train": AUTO})
    assert compile_choice(config, unified=False) == (False, "this Python hides changes")


@pytest.mark.parametrize(
    ("train", "family", "facts", "expected"),
    [
        ({}, "qwen3", {}, "liger"),
        ({}, "gpt2", {}, "none"),
        ({}, "mixtral", {}, "none"),
        ({}, "qwen3", {"has_triton": False}, "none"),
        ({}, "qwen3", {"installed": False}, "none"),
        ({"compile": True}, "qwen3", {}, "none"),
        ({"compile": "auto"}, "qwen3", {}, "none"),
        ({"kernels": "none"}, "qwen3", {}, "none"),
        ({"kernels": "liger"}, "gpt2", {"installed": False}, "liger"),
    ],
    ids=str,
)
def test_kernels_are_fused_where_they_are_known_to_suit(
    train: dict[str, Any], family: str, facts: dict[str, bool], expected: str
) -> None:
    data = {"train": "rows.jsonl", "packing": False}
    config = Config.model_validate({"model": "m", "train": train, "data": data})
    chosen, reason = kernels_choice(
        config, family, **{"has_triton": True, "installed": True} | facts
    )
    assert chosen == expected
    assert (reason == "set by you") is ("kernels" in train)


@pytest.mark.few(1)
def test_machines_of_the_catalog_have_the_package_and_this_one_if_it_is_installed(
    machine: MachineProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = estimate("Qwen/Qwen3-8B", gpu="4090").plan.workload.model
    assert model.family == "qwen3"
    assert estimate("Qwen/Qwen3-8B", gpu="4090").plan.settings.kernels == "liger"
    assert estimate("Qwen/Qwen3-8B", gpu="none").plan.settings.kernels == "none"
    config = Config(model="m", data="rows.jsonl")
    card = machine.changed(unified=False, device_bytes=1 << 34)
    assert (card.source, fused(config, model, card).kernels) == (MEASURED, "none")
    monkeypatch.setattr("megatrain.planning.from_config.liger_installed", lambda: True)
    assert fused(config, model, card).kernels == "liger"


@pytest.mark.few(2)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_estimate_and_train_make_the_same_plan(
    tmp_path: Path, machine: MachineProfile, settings: list[str]
) -> None:
    path = config_for(tmp_path, "llama")
    by_estimate = estimate(str(path), settings).plan
    by_train = as_train_plans(path, settings, machine)
    assert by_estimate.facts() == by_train.facts()
    assert str(by_estimate) == str(by_train)


@pytest.mark.few(3)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma2", "phi"])
def test_the_same_plan_for_other_families(
    tmp_path: Path, machine: MachineProfile, family: str
) -> None:
    path = config_for(tmp_path, family)
    by_train = as_train_plans(path, [], machine)
    by_estimate = estimate(str(path)).plan
    assert by_estimate.settings == by_train.settings
    assert by_estimate.ledger.total("host") == pytest.approx(by_train.ledger.total("host"), 1e-3)


@pytest.mark.merge
def test_another_setting_would_be_noticed(tmp_path: Path, machine: MachineProfile) -> None:
    path = config_for(tmp_path, "llama")
    facts = as_train_plans(path, [], machine).facts()
    for settings in SETTINGS[1:-1]:
        if machine.on_host and "train.compile=auto" in settings:
            continue  # layers are compiled for devices alone
        assert estimate(str(path), settings).plan.facts() != facts, settings


def test_only_what_was_set_is_called_so(tmp_path: Path, machine: MachineProfile) -> None:
    path = config_for(tmp_path, "llama")
    plan = as_train_plans(path, [], machine)
    assert set(plan.reasons) >= {"update", "chunk_tokens", "gather_embedding", "micro_batch_tokens"}
    assert "set by you" not in plan.reasons.values()
    chosen = as_train_plans(path, ["memory.chunk_tokens=1024"], machine)
    assert [name for name, why in chosen.reasons.items() if why == "set by you"] == ["chunk_tokens"]


def test_memory_that_a_config_allows_is_all_there_is(
    tmp_path: Path, machine: MachineProfile
) -> None:
    plan = estimate(
        str(config_for(tmp_path, "llama")), ["memory.ram=3GiB", "memory.vram=2GiB"]
    ).plan
    assert plan.profile.ram_bytes == 3 * GIB
    assert plan.profile.device_bytes == (0 if machine.on_host else 2 * GIB)


def test_a_disk_is_used_only_if_it_is_named_and_as_much_of_it_as_is_free(tmp_path: Path) -> None:
    profile = find_machine("4090")[0].profile()

    def config(**memory: object) -> Config:
        bare = {"model": "m", "data": "rows.jsonl", "memory": memory}
        return Config.model_validate(bare)

    def disk_bytes(**memory: object) -> int:
        return within(profile, config(**memory)).disk_bytes

    assert disk_bytes() == 0
    assert disk_bytes(disk="there") == profile.disk_bytes > 10**12
    assert 0 < free_on_disk(config(disk=str(tmp_path))) < 1 << 60
    with pytest.raises(ConfigError, match=r"memory\.disk: .* is not a folder"):
        free_on_disk(config(disk=str(tmp_path / "no")))


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("family", "settings", "packed"),
    [
        ("llama", [], True),
        ("lfm2", [], False),
        ("llama4_text", [], False),
        ("lfm2", ["data.packing=true"], True),
        ("llama", ["data.packing=false"], False),
        ("nemotron", [], True),
        ("nemotron", ["model.attn=flash_attention_2"], False),
    ],
    ids=str,
)
def test_a_plan_knows_what_becomes_of_packing(
    tmp_path: Path, family: str, settings: list[str], packed: bool
) -> None:
    path = config_for(tmp_path, family)
    found = estimate(str(path), ["train.compile=auto", *settings], gpu="24GB")
    workload = found.plan.workload
    assert (workload.packed, workload.compiled) == (packed, True)
    told = [line for line in str(found).splitlines() if line.startswith("packing   ")]
    mixes = f"packing   none: {family} mixes the documents of packed rows"
    assert told == ([] if packed or family in ("llama", "nemotron") else [mixes])


@pytest.mark.parametrize(
    ("family", "facts", "expected"),
    [
        ("qwen3_5_text", {}, "flash-linear-attention, of pip install 'megatrain[kernels]'"),
        ("qwen3_5_text", {"installed": False}, "torch path, slower; pip install"),
        ("qwen3_next", {"has_triton": False}, "torch path, slower: Triton does not compile"),
        ("qwen3", {"installed": False}, ""),
    ],
)
def test_what_computes_linear_attention_is_told(
    family: str, facts: dict[str, bool], expected: str
) -> None:
    path = linear_attention_path(family, **{"has_triton": True, "installed": True} | facts)
    assert path.startswith(expected)
    assert bool(path) is bool(expected)


def test_families_of_linear_attention_are_those_for_which_transformers_takes_kernels() -> None:
    models = Path(transformers.__path__[0]) / "models"
    takes = {
        path.parent
        for path in models.glob("*/modeling_*.py")
        if re.search(r'"fla"|is_flash_linear_attention_available', path.read_text())
    }
    named = {
        folder: set(re.findall(r'model_type = "(\w+)"', text.read_text()))
        for folder in takes
        for text in folder.glob("configuration_*.py")
    }
    assert all(types & LINEAR_ATTENTION_FAMILIES for types in named.values()), named
    assert set().union(*named.values()) >= LINEAR_ATTENTION_FAMILIES
