"""Tiny tokenizers with chat templates of eight kinds, in our own words.

Each kind says how it writes a turn: what must come out is written down a second time, by hand, in
`expected`, so that a test compares two sources.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

_WORDS = [
    "user assistant system what is two and three four six think you are brief hello world"
] * 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    template: str
    marks: tuple[str, ...]
    end: str
    """What closes an assistant turn, the end-of-turn token last."""
    eos: str
    before: str = ""
    """What stands between generation prompt and content."""
    has_system: bool = True


def _tagged(body: str) -> str:
    return "{% generation %}" + body + "{% endgeneration %}"


KINDS = {
    "chatml": Kind(
        template=(
            "{% for m in messages %}"
            "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        ),
        marks=("<|im_start|>", "<|im_end|>"),
        end="<|im_end|>",
        eos="<|im_end|>",
    ),
    "llama3": Kind(
        template=(
            "{{ bos_token }}{% for m in messages %}"
            "{{ '<|head|>' + m.role + '<|/head|>\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
        ),
        marks=("<|begin|>", "<|head|>", "<|/head|>", "<|eot|>"),
        end="<|eot|>",
        eos="<|eot|>",
    ),
    "mistral": Kind(
        template=(
            "{{ bos_token }}{% set ns = namespace(s='') %}{% for m in messages %}"
            "{% if m.role == 'system' %}{% set ns.s = m.content + '\n\n' %}"
            "{% elif m.role == 'user' %}{{ '[INST] ' + ns.s + m.content + ' [/INST]' }}"
            "{% set ns.s = '' %}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
        ),
        marks=("<s>", "</s>", "[INST]", "[/INST]"),
        end="</s>",
        eos="</s>",
        before=" ",
    ),
    "gemma": Kind(
        template=(
            "{{ bos_token }}{% if messages[0].role == 'system' %}"
            "{{ raise_exception('no system role') }}{% endif %}{% for m in messages %}"
            "{% set who = 'model' if m.role == 'assistant' else m.role %}"
            "{{ '<turn>' + who + '\n' + m.content | trim + '</turn>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
        ),
        marks=("<bos>", "<eos>", "<turn>", "</turn>"),
        end="</turn>",
        eos="<eos>",
        has_system=False,
    ),
    "phi": Kind(
        template=(
            "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}"
            "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
        ),
        marks=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
        end="<|end|>",
        eos="<|endoftext|>",
    ),
    "zephyr": Kind(
        template=(
            "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\n' }}"
            + _tagged("{{ m.content + eos_token }}")
            + "{{ '\n' }}{% else %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}"
            "{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
        ),
        marks=("</s>", "<|system|>", "<|user|>", "<|assistant|>"),
        end="</s>",
        eos="</s>",
    ),
    "deepseek": Kind(
        template=(
            "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
            "{% elif m.role == 'user' %}{{ '<User>' + m.content }}"
            "{% else %}{{ '<Assistant>' + m.content + eos_token }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<Assistant>' }}{% endif %}"
        ),
        marks=("<begin>", "<end>", "<User>", "<Assistant>"),
        end="<end>",
        eos="<end>",
    ),
    "qwen3": Kind(  # thoughts are written for the turns after the last question only
        template=(
            "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
            "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
            "{% for m in messages %}{% if m.role == 'assistant' %}"
            "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
            "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n')"
            " if '</think>' in m.content else '' %}{{ '<|im_start|>assistant\n' }}"
            + _tagged(
                "{% if loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}"
                "{% endif %}{{ said + '<|im_end|>' }}"
            )
            + "{{ '\n' }}{% else %}"
            "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
            "{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        ),
        marks=("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
        end="<|im_end|>",
        eos="<|im_end|>",
        before="<think>\n\n</think>\n\n",
    ),
}


@cache
def tokenizer_of(kind: str) -> Any:
    """Return a byte-level tokenizer that knows the marks of `kind`. Do not change it."""
    return made(KINDS[kind].template, KINDS[kind].marks, eos=KINDS[kind].eos)


@cache
def tokenizer_of_style(style: str) -> Any:
    """Return a tokenizer with a template of styles/, near to one that models have in use."""
    folder = Path(__file__).parent / "styles"
    about = tomllib.loads((folder / "styles.toml").read_text())[style]
    path = folder / f"{style}.jinja"
    return made(path.read_text() if path.exists() else None, about["marks"], eos=about["eos"])


def made(template: str | None, marks: Sequence[str], *, eos: str) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", *marks],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_WORDS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=marks[0], eos_token=eos, pad_token="<pad>"
    )
    fast.chat_template = template
    return fast
