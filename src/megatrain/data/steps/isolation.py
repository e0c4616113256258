"""Which models keep the documents of a packed row apart.

Restarting position ids mark where a document begins, but not every layer uses them.
Layers with a state (convolutions, recurrences, linear attention) and some older attention do not,
and attention in chunks or over the best few keys counts from the row's beginning. Nothing fails
then: each document is trained as a continuation of the one before it. So documents share
rows only in families that were shown to keep them apart.

Flash attention takes no mask. It is given the lengths of the documents instead, as arguments that
a model's forward must pass on to the attention of every layer. Some families drop them.

Laws (tests/engine/test_isolation.py, tests/engine/test_flash_isolation.py)
    1. In ISOLATES, loss, logits and gradients of a packed row are those of its documents alone; in
       every other family that we test they are not.
    2. The same holds with flash attention, for any number of rows, except in DROPS_LENGTHS.
"""

from __future__ import annotations

from megatrain.errors import ConfigError

ISOLATES = frozenset(
    """
    afmoe apertus arcee aria_text axk1 axk2 beam bitnet codegen cohere cohere2 cohere2_moe cwm
    deepseek_v2 deepseek_v3 deepseek_v32 diffllama ernie4_5 ernie4_5_moe exaone4 exaone_moe
    flex_olmo flint gemma gemma2 gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode
    gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa
    granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe kolibri1
    laguna llama mellum mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral
    modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 phimoe qwen2
    qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu
    """.split()  # noqa: SIM905
)


DROPS_LENGTHS = frozenset({"gpt_neo", "gptj", "nemotron", "stablelm"})
"""Families whose flash attention is not given the lengths of documents."""


def check_packing(model_type: str, attn: str = "auto") -> None:
    """Raise ConfigError if documents in one row might see each other in this family."""
    if model_type not in ISOLATES:
        raise ConfigError(
            f"data.packing: {model_type} is not known to keep the documents of a packed row apart: "
            "each would be trained after unrelated text. Set data.packing to false; then each row "
            "is one document."
        )
    if attn.startswith("flash") and model_type in DROPS_LENGTHS:
        raise ConfigError(
            f"data.packing: with model.attn {attn}, {model_type} does not keep the documents of a "
            "packed row apart: its code does not pass their lengths to the kernel. Set model.attn "
            "to sdpa, or data.packing to false."
        )
