"""The run that a config describes, as the planner sees it: one reading for `estimate` and `train`.

Law (tests/planning/test_from_config.py): on one machine, one config has one plan everywhere.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from megatrain import choices
from megatrain.config import Config
from megatrain.config.sections import TOP_K
from megatrain.errors import ConfigError
from megatrain.files import free_disk_bytes
from megatrain.memory.kinds import divides_matrices
from megatrain.optim.states import STATES
from megatrain.planning.levers import LEVERS
from megatrain.planning.machine.profile import MEASURED, MachineProfile
from megatrain.planning.model.shapes import ModelShape
from megatrain.planning.ranks.division import SOLE_RANK, Division
from megatrain.planning.step_size import StepSize, default_step
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

USUAL_TOKENS = 8192
"""Tokens of a micro-batch where nothing is known about the machine."""
LIGER_FAMILIES = frozenset(
    """
    exaone4 gemma gemma2 glm4 granite hunyuan_v1_dense llama ministral mistral olmo2 olmo3 phi3
    qwen2 qwen3 qwen3_5_text smollm3
    """.split()  # noqa: SIM905
)
"""Families in which Liger's kernels have losses and gradients of the model's own code, within the
tolerance of its own tests, packed or not: `python -m proofs.liger` shows it with the package.
Mixtures of experts are not among them: their groups have kernels of their own (models/experts.py).
"""
LINEAR_ATTENTION_FAMILIES = frozenset(
    """
    bailing_hybrid glm5_next_text kimi_linear olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next
    qwen4_exp_text
    """.split()  # noqa: SIM905
)
"""Families whose linear attention has kernels in the package flash-linear-attention, which
transformers takes where it can be imported."""
INSTALL = "pip install 'megatrain[kernels]'"


def workload_of(
    config: Config, model: ModelShape, division: Division = SOLE_RANK, *, unified: bool
) -> Workload:
    """Return what one step of the run works on, and the ranks that share it.

    Raises ConfigError if the config wants what the model cannot have.
    """
    for lever in LEVERS:
        lever.check(config, model)
    states = STATES[config.optim.name]
    if any(divides_matrices(kinds) for kinds in states.values()):
        model = model.with_matrices_apart()
    return Workload(
        model=model,
        step_tokens=_step_tokens(config),
        batch_rows=config.train.batch_rows,
        sequence=config.data.max_length,
        dtype=config.model.dtype,
        attn=config.model.attn,
        packed=packs_rows(config, model),
        compiled=compile_choice(config, unified=unified)[0],
        kernels=config.kernels,
        products=config.train.products,
        max_grad_norm=config.train.max_grad_norm,
        projects_twice=config.loss.name != "next_token",
        taught_tokens=min(num_taught(config), model.vocab),
        keeps_reference=config.keeps_reference,
        serves_weights=_serves_here(config),
        states=states,
        kept_checkpoints=config.save.keep + config.keeps_best,
        division=division,
    )


def _serves_here(config: Config) -> bool:
    """Return whether weights go to a server through memory of this host."""
    given = config.rollouts
    return config.loss.draws and given.engine == "vllm" and given.weights_folder is None


def num_taught(config: Config) -> int:
    """Return the tokens of a teacher that are kept for each trained token; 0: there is none."""
    top_k = config.loss.top_k or TOP_K
    return 0 if config.loss.teacher is None else top_k


def packs_rows(config: Config, model: ModelShape) -> bool:
    """Return whether rows are packed; auto packs where the model keeps them apart."""
    given = config.data.packing
    return model.packs_with(config.model.attn) if given == "auto" else given


def step_settings_of(
    config: Config,
    *,
    unified: bool,
    in_place: bool = False,
    router_aux_loss: float = 0.0,
    division: Division = SOLE_RANK,
) -> StepSettings:
    """Return the config's settings of a step; where it has `auto`, simple rules decide.

    `unified`: the host's cores compute; `in_place`: a device that shares the host's memory does.
    """
    train = config.train
    of_rank = -(-_step_tokens(config) // division.size)
    by_rules = {
        "micro_batch_tokens": max(config.data.max_length, min(of_rank, USUAL_TOKENS)),
        "tape": "device" if unified or in_place else "host",
    }
    return StepSettings(
        update="in_backward" if train.max_grad_norm is None else "late",
        router_aux_loss=router_aux_loss,
        on_nonfinite=train.on_nonfinite,
        compile=compile_choice(config, unified=unified)[0],
        kernels=config.kernels,
        products=train.products,
        state=config.optim.state,
        deterministic=train.deterministic,
        seed=train.seed,
    ).changed(**by_rules | _given(config))


def compile_choice(config: Config, *, unified: bool) -> tuple[bool, str]:
    """Return whether layers are compiled, and why."""
    wanted = config.train.compile
    if wanted != "auto":
        return wanted, "set by you"
    if unified:
        return False, "compute is on the CPU"
    if fault := choices.why_not_compiled():
        return False, fault
    if config.train.kernels == "liger":
        return False, "layers have Liger's kernels"
    if why := next(filter(None, (lever.why_not_compiled(config) for lever in LEVERS)), ""):
        return False, why
    return True, "fewer passes over memory; the gain is predicted, not measured"


def liger_installed() -> bool:
    """Return whether Liger and the compiler of its kernels are installed here."""
    return all(find_spec(name) is not None for name in ("liger_kernel", "triton"))


def kernels_choice(
    config: Config, family: str, *, has_triton: bool, installed: bool
) -> tuple[Literal["none", "liger"], str]:
    """Return the fused kernels of layers, and why.

    `has_triton`: Triton compiles for the device; `installed`: Liger is, where the run will be.
    """
    wanted = config.train.kernels
    if wanted != "auto":
        return wanted, "set by you"
    if not has_triton:
        return "none", "Triton does not compile for this device"
    if compile_choice(config, unified=False)[0]:
        return "none", "compiled layers have kernels that torch makes"
    if family not in LIGER_FAMILIES:
        return "none", f"Liger was not shown to compute what {family} does"
    if not installed:
        return "none", f"the package liger-kernel is not installed ({INSTALL})"
    return "liger", (
        "norms, rotary positions and feed-forward make fewer passes over memory. The last bits are "
        "not those of train.kernels: none"
    )


def linear_attention_path(family: str, *, has_triton: bool, installed: bool) -> str:
    """Return what computes a model's linear attention; empty for a model that has none.

    `has_triton`: Triton compiles for the device; `installed`: flash-linear-attention is, where the
    run will be.
    """
    if family not in LINEAR_ATTENTION_FAMILIES:
        return ""
    if not has_triton:
        return "torch path, slower: Triton does not compile for this device"
    if not installed:
        return f"torch path, slower; {INSTALL}"
    return f"flash-linear-attention, of {INSTALL}"


def linear_attention_installed() -> bool:
    """Return whether flash-linear-attention and its compiler are installed here."""
    return all(find_spec(name) is not None for name in ("fla", "triton"))


def fused(config: Config, model: ModelShape, profile: MachineProfile) -> Config:
    """Return the config with the kernels that a run on this machine would choose.

    A machine that was measured has the packages of this one. One of the catalog is taken to have
    all that a run there can use.
    """
    kernels, _ = kernels_choice(
        config,
        model.family,
        has_triton=not profile.on_host,
        installed=profile.source != MEASURED or liger_installed(),
    )
    return config.decided(kernels=kernels)


def _step_tokens(config: Config) -> int:
    """Return the tokens of a step; of one that is not decided yet, the default ones."""
    size = step_size_of(config)
    if size is not None:
        return size.tokens
    assert config.step_tokens is not None, "it is open only where the size is decided here"
    return config.step_tokens


def step_size_of(config: Config, epoch_tokens: int | None = None) -> StepSize | None:
    """Return the size of a step that the config leaves open; None: it has one.

    `epoch_tokens` are those of the data, where they are known.
    """
    if config.train.batch_tokens != "auto":
        return None
    micro = config.train.micro_batch_tokens
    shortest = max(config.data.max_length, 0 if micro == "auto" else micro)
    return default_step(shortest, epoch_tokens)


def pins_of(config: Config) -> dict[str, str]:
    """Return the settings that a plan may not choose, and why, by name."""
    return dict.fromkeys(_given(config), "set by you")


def _given(config: Config) -> dict[str, Any]:
    values = {lever.name: lever.given(config) for lever in LEVERS}
    return {name: value for name, value in values.items() if value != "auto"}


def within(profile: MachineProfile, config: Config) -> MachineProfile:
    """Return the machine with no more memory and disk than the section `memory` allows.

    Slots that the config gives are used, also where device and host are one memory.
    """
    if profile.integrated and config.memory.slots != "auto":
        profile = profile.changed(unified=False)
    ram, vram = config.memory.ram, config.memory.vram
    if config.memory.disk is None:
        profile = profile.changed(disk_bytes=0)
    if isinstance(ram, int):
        profile = profile.changed(ram_bytes=min(ram, profile.ram_bytes))
    if isinstance(vram, int) and not profile.on_host:
        profile = profile.changed(device_bytes=min(vram, profile.device_bytes))
    return profile


def free_on_disk(config: Config) -> int:
    """Return the free bytes in `memory.disk`, on this machine; 0 without one."""
    if config.memory.disk is None:
        return 0
    folder = Path(config.memory.disk)
    if not folder.is_dir():
        raise ConfigError(f"memory.disk: {folder} is not a folder. Make it, or name another one.")
    return free_disk_bytes(folder)
