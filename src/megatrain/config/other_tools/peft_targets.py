"""The modules that PEFT adapts when a config of TRL names none.

TRL then passes no target_modules, and PEFT takes those of its table by the model's type. The table
here is the part of TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING that has causal decoders;
`python -m proofs.migrated --check` compares it with the installed PEFT.
"""

from __future__ import annotations

from megatrain.config.other_tools.asked import Asks, DroppedKey, ToolConfig

QUERY_AND_VALUE = ("q_proj", "v_proj")
PEFT_TARGETS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("gemma", "gemma2", "gemma3_text", "gemma4", "gpt_neo", "gptj", "llama", "llama4",
         "mistral", "mixtral", "opt", "qwen2", "qwen3", "stablelm"),
        QUERY_AND_VALUE,
    ),
    **dict.fromkeys(("bloom", "chatglm", "falcon", "gpt_neox"), ("query_key_value",)),
    "codegen": ("qkv_proj",),
    "gpt2": ("c_attn",),
    "gpt_bigcode": ("c_attn",),
    "mpt": ("Wqkv",),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
}  # fmt: skip


def peft_targets(asked: ToolConfig) -> tuple[list[str], str]:
    """Return the modules that PEFT adapts, and a note. Raises DroppedKey if it refuses."""
    kind = asked.model_type
    if kind is None:
        return [*QUERY_AND_VALUE], Asks(
            "PEFT's table for llama, mistral, qwen2, qwen3, gemma and others; the type of this "
            "model is not known on this machine: if it is another one, set lora.targets to those "
            "of TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING in PEFT"
        )
    if kind not in PEFT_TARGETS:
        raise DroppedKey(
            Asks(
                f"PEFT has no default for the model type {kind}, so TRL does not start without "
                "lora_target_modules: set lora.targets; without it all linear modules are adapted"
            )
        )
    return [*PEFT_TARGETS[kind]], f"PEFT's table for the model type {kind}"
