"""Known decoders: the dimensions in their published config.json, and their published size.

Dimensions only, so a plan can be made for a model that is not on this machine, without a network.
Names are those of the Hub. A name is found whatever its case, without its organisation, and with
the ending of a variant that has the same dimensions (`-Instruct`, `-Base`, `-it`, ...).

The column `from` says how the dimensions were checked:

    c   compared with a public copy of the config: litgpt's table of models, NVIDIA's
        Megatron-Bridge, or the defaults of transformers
    k   from knowledge of the config; the published number of parameters is the only check

Models with a vision part stand with their decoder alone, which is what is trained.

Laws (tests/planning/catalog/test_known_models.py)
    1. The params that the dimensions give are within 1 % of the published number.
    2. A name that is not known is refused with the names that come near.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any

from megatrain.errors import ConfigError

# family, name, published (billions), from, hidden, layers, heads, key-value heads, head size,
# inner, vocabulary, then what else matters. `t`: embedding and head are one; `u`: they are two;
# `8/128x768+1`: experts chosen / all x width + shared; `w=`: sliding window of some layers;
# `@`: what the published weights are, where they cannot be trained as they are.
_TABLE = """
llama       meta-llama/Llama-2-7b-hf              6.74  c  4096  32  32 32 128 11008  32000 u
llama       meta-llama/Llama-2-13b-hf             13.0  c  5120  40  40 40 128 13824  32000 u
llama       meta-llama/Llama-2-70b-hf             69.0  c  8192  80  64  8 128 28672  32000 u
llama       meta-llama/Meta-Llama-3-8B            8.03  c  4096  32  32  8 128 14336 128256 u
llama       meta-llama/Meta-Llama-3-70B           70.6  c  8192  80  64  8 128 28672 128256 u
llama       meta-llama/Llama-3.1-8B               8.03  c  4096  32  32  8 128 14336 128256 u
llama       meta-llama/Llama-3.1-70B              70.6  c  8192  80  64  8 128 28672 128256 u
llama       meta-llama/Llama-3.1-405B             405.9 c 16384 126 128  8 128 53248 128256 u
llama       meta-llama/Llama-3.2-1B               1.24  c  2048  16  32  8  64  8192 128256 t
llama       meta-llama/Llama-3.2-3B               3.21  c  3072  28  24  8 128  8192 128256 t
llama       meta-llama/Llama-3.3-70B-Instruct     70.6  c  8192  80  64  8 128 28672 128256 u
llama       codellama/CodeLlama-34b-hf            33.7  c  8192  48  64  8 128 22016  32000 u
llama       TinyLlama/TinyLlama-1.1B-Chat-v1.0    1.10  c  2048  22  32  4  64  5632  32000 u
llama       01-ai/Yi-6B                           6.06  k  4096  32  32  4 128 11008  64000 u
llama       01-ai/Yi-1.5-9B                       8.83  k  4096  48  32  4 128 11008  64000 u
llama       01-ai/Yi-1.5-34B                      34.4  k  7168  60  56  8 128 20480  64000 u
llama       HuggingFaceTB/SmolLM2-135M            0.1345 c  576  30   9  3  64  1536  49152 t
llama       HuggingFaceTB/SmolLM2-360M            0.362 c   960  32  15  5  64  2560  49152 t
llama       HuggingFaceTB/SmolLM2-1.7B            1.71  c  2048  24  32 32  64  8192  49152 t
llama       tiiuae/Falcon3-1B-Base                1.67  c  2048  18   8  4 256  8192 131072 u
llama       tiiuae/Falcon3-3B-Base                3.23  c  3072  22  12  4 256  9216 131072 u
llama       tiiuae/Falcon3-7B-Base                7.46  c  3072  28  12  4 256 23040 131072 u
llama       tiiuae/Falcon3-10B-Base               10.3  c  3072  40  12  4 256 23040 131072 u
llama       deepseek-ai/DeepSeek-R1-Distill-Llama-8B 8.03 c 4096 32  32  8 128 14336 128256 u
llama       deepseek-ai/DeepSeek-R1-Distill-Llama-70B 70.6 c 8192 80 64  8 128 28672 128256 u
smollm3     HuggingFaceTB/SmolLM3-3B              3.08  c  2048  36  16  4 128 11008 128256 t
granite     ibm-granite/granite-3.1-2b-base       2.53  k  2048  40  32  8  64  8192  49155 t
granite     ibm-granite/granite-3.1-8b-base       8.17  k  4096  40  32  8 128 12800  49155 t
seed_oss    ByteDance-Seed/Seed-OSS-36B-Base      36.2  k  5120  64  80  8 128 27648 155136 u qkv
mistral     mistralai/Mistral-7B-v0.1             7.24  c  4096  32  32  8 128 14336  32000 u w=4096
mistral     mistralai/Mistral-7B-v0.3             7.25  c  4096  32  32  8 128 14336  32768 u
mistral     mistralai/Ministral-8B-Instruct-2410  8.02  k  4096  36  32  8 128 12288 131072 u
mistral     mistralai/Mistral-Nemo-Base-2407      12.2  k  5120  40  32  8 128 14336 131072 u
mistral     mistralai/Codestral-22B-v0.1          22.2  k  6144  56  48  8 128 16384  32768 u
mistral     mistralai/Mistral-Small-24B-Base-2501 23.6  c  5120  40  32  8 128 32768 131072 u
mistral     mistralai/Mistral-Large-Instruct-2407 122.6 c 12288  88  96  8 128 28672  32768 u
mixtral     mistralai/Mixtral-8x7B-v0.1           46.7  c  4096  32  32  8 128 14336  32000 u 2/8
mixtral     mistralai/Mixtral-8x22B-v0.1          141   c  6144  56  48  8 128 16384  32768 u 2/8
qwen2       Qwen/Qwen2.5-0.5B                     0.494 c   896  24  14  2  64  4864 151936 t
qwen2       Qwen/Qwen2.5-1.5B                     1.54  c  1536  28  12  2 128  8960 151936 t
qwen2       Qwen/Qwen2.5-3B                       3.09  c  2048  36  16  2 128 11008 151936 t
qwen2       Qwen/Qwen2.5-7B                       7.62  c  3584  28  28  4 128 18944 152064 u
qwen2       Qwen/Qwen2.5-14B                      14.8  c  5120  48  40  8 128 13824 152064 u
qwen2       Qwen/Qwen2.5-32B                      32.8  c  5120  64  40  8 128 27648 152064 u
qwen2       Qwen/Qwen2.5-72B                      72.7  c  8192  80  64  8 128 29568 152064 u
qwen2       Qwen/Qwen2.5-Coder-7B                 7.62  c  3584  28  28  4 128 18944 152064 u
qwen2       Qwen/Qwen2.5-Coder-32B                32.8  c  5120  64  40  8 128 27648 152064 u
qwen2       Qwen/QwQ-32B                          32.8  c  5120  64  40  8 128 27648 152064 u
qwen3       Qwen/Qwen3-0.6B                       0.596 c  1024  28  16  8 128  3072 151936 t
qwen3       Qwen/Qwen3-1.7B                       1.72  c  2048  28  16  8 128  6144 151936 t
qwen3       Qwen/Qwen3-4B                         4.02  c  2560  36  32  8 128  9728 151936 t
qwen3       Qwen/Qwen3-8B                         8.19  c  4096  36  32  8 128 12288 151936 u
qwen3       Qwen/Qwen3-14B                        14.8  c  5120  40  40  8 128 17408 151936 u
qwen3       Qwen/Qwen3-32B                        32.8  c  5120  64  64  8 128 25600 151936 u
qwen3_moe   Qwen/Qwen3-30B-A3B                    30.5  c  2048  48  32  4 128  6144 151936 u 8/128x768
qwen3_moe   Qwen/Qwen3-235B-A22B                  235.1 c  4096  94  64  4 128 12288 151936 u 8/128x1536
qwen3_moe   Qwen/Qwen3-Coder-480B-A35B-Instruct   480.2 k  6144  62  96  8 128  8192 151936 u 8/160x2560
gemma       google/gemma-2b                       2.51  c  2048  18   8  1 256 16384 256000 t
gemma       google/gemma-7b                       8.54  c  3072  28  16 16 256 24576 256000 t
gemma2      google/gemma-2-2b                     2.61  c  2304  26   8  4 256  9216 256000 t w=4096
gemma2      google/gemma-2-9b                     9.24  c  3584  42  16  8 256 14336 256000 t w=4096
gemma2      google/gemma-2-27b                    27.2  c  4608  46  32 16 128 36864 256000 t w=4096
gemma3_text google/gemma-3-270m                   0.268 k   640  18   4  1 256  2048 262144 t w=512
gemma3_text google/gemma-3-1b-pt                  1.00  c  1152  26   4  1 256  6912 262144 t w=512
gemma3_text google/gemma-3-4b-pt                  3.88  c  2560  34   8  4 256 10240 262208 t w=1024 @vision
gemma3_text google/gemma-3-12b-pt                 11.77 c  3840  48  16  8 256 15360 262208 t w=1024 @vision
gemma3_text google/gemma-3-27b-pt                 27.01 c  5376  62  32 16 128 21504 262208 t w=1024 @vision
phi         microsoft/phi-2                       2.78  c  2560  32  32 32  80 10240  51200 u
phi3        microsoft/Phi-3-mini-4k-instruct      3.82  c  3072  32  32 32  96  8192  32064 u w=2047
phi3        microsoft/Phi-3-medium-4k-instruct    13.96 k  5120  40  40 10 128 17920  32064 u
phi3        microsoft/Phi-3.5-mini-instruct       3.82  c  3072  32  32 32  96  8192  32064 u
phi3        microsoft/phi-4                       14.66 c  5120  40  40 10 128 17920 100352 u
phi3        microsoft/Phi-4-mini-instruct         3.84  c  3072  32  24  8 128  8192 200064 t
gpt_oss     openai/gpt-oss-20b                    20.9  c  2880  24  64  8  64  2880 201088 u 4/32 w=128 @MXFP4
gpt_oss     openai/gpt-oss-120b                   116.8 c  2880  36  64  8  64  2880 201088 u 4/128 w=128 @MXFP4
deepseek_v2 deepseek-ai/DeepSeek-V2-Lite          15.7  c  2048  27  16 16   0 10944 102400 u 6/64x1408+2 dense=1
deepseek_v2 deepseek-ai/DeepSeek-V2               235.7 c  5120  60 128 128  0 12288 102400 u 6/160x1536+2 dense=1 q=1536
deepseek_v3 deepseek-ai/DeepSeek-V3               671   c  7168  61 128 128  0 18432 129280 u 8/256x2048+1 dense=3 q=1536 @FP8
deepseek_v3 deepseek-ai/DeepSeek-R1               671   c  7168  61 128 128  0 18432 129280 u 8/256x2048+1 dense=3 q=1536 @FP8
deepseek_v3 moonshotai/Moonlight-16B-A3B          15.96 c  2048  27  16 16   0 11264 163840 u 6/64x1408+2 dense=1
deepseek_v3 moonshotai/Kimi-K2-Instruct           1030  c  7168  61  64 64   0 18432 163840 u 8/384x2048+1 dense=1 q=1536 @FP8
olmo2       allenai/OLMo-2-0425-1B                1.48  k  2048  16  16 16 128  8192 100352 u
olmo2       allenai/OLMo-2-1124-7B                7.30  c  4096  32  32 32 128 11008 100352 u
olmo2       allenai/OLMo-2-1124-13B               13.7  c  5120  40  40 40 128 13824 100352 u
olmo2       allenai/OLMo-2-0325-32B               32.2  k  5120  64  40  8 128 27648 100352 u
olmo3       allenai/Olmo-3-1025-7B                7.30  k  4096  32  32 32 128 11008 100278 u w=4096
olmoe       allenai/OLMoE-1B-7B-0924              6.92  k  2048  16  16 16 128  1024  50304 u 8/64
glm4        zai-org/GLM-4-9B-0414                 9.40  c  4096  40  32  2 128 13696 151552 u qkv
glm4        zai-org/GLM-4-32B-0414                32.6  k  6144  61  48  2 128 23040 151552 u
glm4_moe    zai-org/GLM-4.5-Air                   106   c  4096  46  96  8 128 10944 151552 u qkv 8/128x1408+1 dense=1
glm4_moe    zai-org/GLM-4.5                       355   c  5120  92  96  8 128 12288 151552 u qkv qkn 8/160x1536+1 dense=3
starcoder2  bigcode/starcoder2-3b                 3.03  c  3072  30  24  2 128 12288  49152 t bias
starcoder2  bigcode/starcoder2-7b                 7.17  k  4608  32  36  4 128 18432  49152 t bias
starcoder2  bigcode/starcoder2-15b                15.96 k  6144  40  48  4 128 24576  49152 u bias
cohere      CohereLabs/c4ai-command-r-v01         35.0  c  8192  40  64 64 128 22528 256000 t
cohere      CohereLabs/c4ai-command-r-08-2024     32.3  k  8192  40  64  8 128 24576 256000 t
cohere      CohereLabs/c4ai-command-r-plus        104   k 12288  64  96  8 128 33792 256000 t qkn
cohere2     CohereLabs/c4ai-command-r7b-12-2024   8.03  k  4096  32  32  8 128 14336 256000 t w=4096
cohere2     CohereLabs/c4ai-command-a-03-2025     111.1 k 12288  64  96  8 128 36864 256000 t w=4096
"""  # noqa: E501

_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
"""The same in every model of DeepSeek's kind so far."""
_EXPERT_KEYS = {
    "mixtral": "num_local_experts",
    "gpt_oss": "num_local_experts",
    "qwen3_moe": "num_experts",
    "olmoe": "num_experts",
}
"""Others call them n_routed_experts."""
_EXPERTS = re.compile(r"(\d+)/(\d+)(?:x(\d+))?(?:\+(\d+))?")
"""Chosen / all x width of each + shared."""
_VARIANT = re.compile(r"-(instruct|base|chat|it|pt|hf|thinking|preview|\d{4})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """One row of the table."""

    name: str
    published_params: float
    """As its makers or the Hub give it."""
    checked: bool
    """The dimensions were compared with a public copy of the config."""
    config: dict[str, Any]
    """What of its config.json the dimensions are."""
    weights: str = ""
    """What must be done to its published weights before they can be trained."""


def known_models() -> tuple[KnownModel, ...]:
    """Return every known model, in the order of the table."""
    return tuple(_row(line) for line in _TABLE.strip().splitlines())


def find_model(name: str) -> KnownModel:
    """Return the model that is meant. Raises ConfigError with the names that come near."""
    rows = [line.split()[1] for line in _TABLE.strip().splitlines()]
    for key in (_whole, _short, _stem):
        found = [number for number, row in enumerate(rows) if key(row) == key(name)]
        if found:
            return _row(_TABLE.strip().splitlines()[found[0]])
    raise ConfigError(
        f"{name[:200]}: not a folder, not a file and not a known model.{_nearest(name, rows)}"
    )


def _nearest(name: str, rows: list[str]) -> str:
    short = {_short(row): row for row in rows}
    near = difflib.get_close_matches(_short(name)[:100], short, n=3, cutoff=0.6)
    if near:
        return f" Did you mean {' or '.join(short[each] for each in near)}?"
    known = f"`megatrain estimate --list` shows the {len(rows)} that are known"
    return f" {known}; or give the path of a config.json"


def _whole(name: str) -> str:
    return name.lower()


def _short(name: str) -> str:
    return name.lower().rpartition("/")[2]


def _stem(name: str) -> str:
    """Return the name without the endings of variants: meta-llama-3-8b for ...-8B-Instruct."""
    stem = _short(name).removeprefix("meta-")
    while (shorter := _VARIANT.sub("", stem)) != stem:
        stem = shorter
    return stem


def _row(line: str) -> KnownModel:
    family, name, published, checked, *numbers = line.split()[:11]
    hidden, layers, heads, kv_heads, head_dim, inner, vocab = map(int, numbers)
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
    }
    if head_dim:
        config["head_dim"] = head_dim
    words = line.split()[11:]
    for word in words:
        config |= {} if word.startswith("@") else _extra(family, word)
    return KnownModel(
        name=name,
        published_params=float(published) * 1e9,
        checked=checked == "c",
        config=config,
        weights=next((weights_note(word[1:]) for word in words if word.startswith("@")), ""),
    )


def weights_note(form: str) -> str:
    """Return what must be done to weights of this form before they can be trained."""
    if form == "vision":
        return "come with a vision part; a text-only copy must be made first"
    return f"come in {form}; they must be converted to bf16 first"


def _extra(family: str, word: str) -> dict[str, Any]:
    """Return what a word behind the numbers of a row means."""
    if word in _WORDS:
        return _WORDS[word]
    key, _, value = word.partition("=")
    if value:
        return {_KEYS[key]: int(value)}
    match = _EXPERTS.fullmatch(word)
    assert match is not None, word
    chosen, experts, width, shared = match.groups()
    config: dict[str, Any] = {
        "num_experts_per_tok": int(chosen),
        _EXPERT_KEYS.get(family, "n_routed_experts"): int(experts),
    }
    if width:
        config["moe_intermediate_size"] = int(width)
    if shared:
        config["n_shared_experts"] = int(shared)
    return config | (_LATENT | {"q_lora_rank": None} if family.startswith("deepseek") else {})


_KEYS = {"dense": "first_k_dense_replace", "q": "q_lora_rank", "w": "sliding_window"}
_WORDS: dict[str, dict[str, Any]] = {
    "t": {"tie_word_embeddings": True},
    "u": {"tie_word_embeddings": False},
    "qkv": {"attention_bias": True},
    "qkn": {"use_qk_norm": True},
    "bias": {"use_bias": True},
}
