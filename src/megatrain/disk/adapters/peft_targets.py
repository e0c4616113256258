"""The targets of adapter_config.json: how PEFT finds the adapted modules and params of a model.

PEFT rewrites targets for families whose experts were modules once, and are one tensor now: it
takes every target that ends in `gate_proj` for that of all experts. Adapters of a dense layer or a
shared expert with such a name would be left out, with a warning only. A target that names a param
is not rewritten, and PEFT keeps its adapter under the same names:

    target_modules      [o_proj, q_proj]                                   found by how they end
    target_parameters   [model.layers.0.mlp.shared_experts.gate_proj.weight]     found by name

Params of experts are found by name, too. The second form needs PEFT 0.17 or newer, and has no
dropout.

Laws (tests/disk/adapters/test_peft_targets.py; against PEFT: proofs/adapters/loading.py)
    1. Every adapted module or param is found by exactly one target.
    2. No target of modules is one that PEFT rewrites for the family.
    3. An adapter that PEFT would leave out all the same is named before the first step, and is not
       exported without a merge.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.errors import ConfigError, listing
from megatrain.models.decoder import Decoder
from megatrain.models.patterns import matches

_MIXTRAL = frozenset({"gate", "w1", "w2", "w3"})
_QWEN2_MOE = frozenset({"gate", "gate_proj", "up_proj", "down_proj"})
_OF_QWEN2_MOE = """
afmoe beam cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5_moe exaone_moe flex_olmo
glm4_moe glm4_moe_lite glm4v_moe glm_moe_dsa hunyuan_v1_moe longcat_flash mellum olmoe qwen3_moe
qwen3_next qwen3_omni_moe qwen3_omni_moe_text qwen3_omni_moe_thinker solar_open
""".split()  # noqa: SIM905
REWRITTEN: dict[str, frozenset[str]] = {
    **dict.fromkeys(("minimax", "minimax_m2", "mixtral"), _MIXTRAL),
    **dict.fromkeys(_OF_QWEN2_MOE, _QWEN2_MOE),
}
"""The ends of module names that PEFT 0.21 takes for experts or their router, by model type."""

_LOST = {"laguna": "*.mlp.shared_experts.*", "unlimited_ocr": "*.language_model.*"}
"""Modules whose adapters PEFT 0.21 does not load, not even those that it has saved, by model type.

transformers renames tensors of published folders, and PEFT renames adapters by the same patterns.
Some of them match the new name too: the last dot of `mlp.shared_expert.` is any character, so also
the `s` of `shared_experts`; `model.layers.` is found again in `language_model.layers.`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftTargets:
    """The targets by which PEFT finds what is adapted in a model."""

    modules: tuple[str, ...]
    """Names of modules, or ends of names."""
    parameters: tuple[str, ...] = ()
    """Names of adapted params, and of the weights of modules whose names PEFT would rewrite."""


def peft_targets(decoder: Decoder) -> PeftTargets:
    """Return the targets that stand for what is adapted, and for nothing else."""
    assert decoder.adapters is not None
    rewritten = REWRITTEN.get(decoder.config.model_type, frozenset())
    adapted = set(decoder.adapters.modules)
    by_weight = {name for name in adapted if _end(name) in rewritten}
    by_name = adapted - by_weight
    ends = {_end(name) for name in by_name}
    alike = {name for name, _ in decoder.model.named_modules() if _end(name) in ends}
    return PeftTargets(
        modules=tuple(sorted(ends if alike == by_name else by_name)),
        parameters=tuple(
            sorted([*decoder.adapters.params, *(f"{name}.weight" for name in by_weight)])
        ),
    )


def not_loaded_by_peft(decoder: Decoder) -> tuple[str, ...]:
    """Return the adapted modules whose adapters PEFT would leave out with a warning."""
    if decoder.adapters is None:
        return ()
    patterns = [pattern] if (pattern := _LOST.get(decoder.config.model_type)) else []
    if decoder.adapters.lora.dora:  # which PEFT has for modules alone
        rewritten = REWRITTEN.get(decoder.config.model_type, frozenset())
        patterns += [f"*.{end}" for end in rewritten]
    return tuple(name for name in decoder.adapters.modules if matches(name, patterns))


def require_loaded_by_peft(decoder: Decoder) -> None:
    """Raise ConfigError if PEFT would load a part of the adapters only."""
    assert decoder.adapters is not None
    if lost := not_loaded_by_peft(decoder):
        raise ConfigError(
            f"PEFT 0.21 would leave out the adapters of {len(lost)} of "
            f"{len(decoder.adapters.modules)} modules ({listing(lost, most=2)}): it renames those "
            f"of {decoder.config.model_type}. Export with --merge, which every tool loads."
        )


def _end(name: str) -> str:
    return name.rpartition(".")[2]
