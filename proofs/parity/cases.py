"""What is compared: rows, a template, and the settings that mean the same in both tools.

A template name that begins with `trl:` is a file of TRL's own collection, as the models' makers
ship it; TRL puts a template of its own with generation tags in its place where it masks turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proofs.parity.rows import Row, Rows

NEWLINE = (
    "TRL's templates also train the line break after the end-of-turn token, which the model is "
    "never asked to write; it is left out of TRL's labels here"
)
CHATML = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>
{%- if message.role == 'assistant' %}assistant
{% generation %}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>{% endgeneration %}
{%- else %}{{ message.role }}
{{ message.content }}<|im_end|>
{%- endif %}
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison."""

    name: str
    sources: tuple[list[Row], ...]
    template: str | None = CHATML
    end: str = "<|im_end|>"
    family: str = "qwen3"
    epochs: float = 4.0
    rows_per_step: int = 8
    accumulate: int = 2
    max_length: int = 512
    packing: bool = False
    theirs: Mapping[str, Any] = field(default_factory=dict)
    """Settings of SFTConfig."""
    ours: Mapping[str, Any] = field(default_factory=dict)
    """Settings of ours by key, like data.train_on."""
    untrained_after: str | None = None
    """The token after this one is no target of ours."""
    difference: str = ""
    """What differs, and why, if anything."""

    def template_text(self) -> str | None:
        if self.template is None or not self.template.startswith("trl:"):
            return self.template
        return Path(resolved(self.template)).read_text(encoding="utf-8")

    def shared_by_trl(self) -> dict[str, Any]:
        """Return what both are given, in TRL's words."""
        return {
            "num_train_epochs": self.epochs,
            "per_device_train_batch_size": self.rows_per_step // self.accumulate,
            "gradient_accumulation_steps": self.accumulate,
            "max_length": self.max_length,
            "packing": self.packing,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 3,
        }

    def shared_by_ours(self) -> dict[str, Any]:
        """Return the same in ours."""
        return {
            "model.dtype": "fp32",
            "data.max_length": self.max_length,
            "data.overlong": "truncate",
            "data.packing": self.packing,
            "data.shuffle": False,
            "train.epochs": self.epochs,
            "train.batch_rows": self.rows_per_step,
            "optim.learning_rate": 1e-3,
            "optim.schedule": "cosine",
            "optim.warmup": 3,
        }


def resolved(value: Any) -> Any:
    """Return a value, or the path of the template of TRL's that it names."""
    if not isinstance(value, str) or not value.startswith("trl:"):
        return value
    import trl

    folder = Path(str(trl.__file__)).parent / "chat_templates"
    return str(folder / f"{value.removeprefix('trl:')}.jinja")


def _qwen3(name: str, rows: list[Row], **named: Any) -> Case:
    return Case(
        name=name,
        sources=(rows,),
        template="trl:qwen3",
        untrained_after="<|im_end|>",
        difference=NEWLINE,
        **named,
    )


ASSISTANT = {"assistant_only_loss": True}
ALL = {"data.train_on": "all"}
COMPLETION = {"data.train_on": "completion"}
RAW = {"data.chat_template": "none"}
TRL_TEMPLATE = {"data.chat_template": "trl:qwen3_training"}
WHOLE: dict[str, Any] = {"epochs": 20, "rows_per_step": 40, "accumulate": 1}
"""All rows in every step: packers that fill rows otherwise still train the same documents."""

CASES = (
    Case(name="chat", sources=(Rows(1).chats(40),), theirs=ASSISTANT),
    Case(name="chat, Llama 3's template", sources=(Rows(2).chats(40, 3, True),), theirs=ASSISTANT,
         template="trl:llama3", end="<|eot_id|>", family="llama"),
    Case(name="chat, every token", sources=(Rows(3).chats(40, 2),), ours=ALL),
    Case(name="chat, several turns, short last step", sources=(Rows(4).chats(37, 3, True),),
         theirs=ASSISTANT),
    Case(name="chat, from and value", sources=(Rows(5).from_value(40),), ours=ALL),
    _qwen3("chat, Qwen3's template", Rows(6).chats(40), theirs=ASSISTANT),
    Case(name="prompt and completion", sources=(Rows(7).pairs(40),), template=None,
         ours=COMPLETION),
    Case(name="prompt and completion, every token", sources=(Rows(8).pairs(40),), template=None,
         ours=ALL, theirs={"completion_only_loss": False}),
    Case(name="prompt and completion beside a template", sources=(Rows(9).pairs(40),),
         ours=COMPLETION | RAW),
    Case(name="prompt and completion, already ended", sources=(Rows(10).pairs(40, "<|im_end|>"),),
         ours=COMPLETION | RAW),
    Case(name="prompt and completion of messages", sources=(Rows(11).chat_pairs(40),),
         ours=COMPLETION, template="trl:llama3", end="<|eot_id|>", family="llama"),
    Case(name="text", sources=(Rows(12).text(40),), ours=ALL, family="llama"),
    Case(name="text, truncated", sources=(Rows(13).text(40, 60),), ours=ALL, max_length=24),
    Case(name="tools", sources=(Rows(14).tool_chats(24),), theirs=ASSISTANT, max_length=1024,
         epochs=7),
    _qwen3("tools, TRL's training template", Rows(15).tool_chats(24), theirs=ASSISTANT,
           ours=TRL_TEMPLATE, max_length=1024, epochs=7),
    Case(name="parallel calls", sources=(Rows(16).tool_chats(24, 2),), theirs=ASSISTANT,
         max_length=1024, epochs=7),
    Case(name="thoughts", sources=(Rows(17).thoughts(40),), theirs=ASSISTANT),
    _qwen3("thoughts, Qwen3's template", Rows(18).thoughts(40), theirs=ASSISTANT),
    _qwen3("thoughts, several turns, TRL's training template", Rows(19).thoughts(40, 3),
           theirs=ASSISTANT, ours=TRL_TEMPLATE),
    Case(name="two sources", sources=(Rows(20).chats(30), Rows(21).chats(10, 2)), theirs=ASSISTANT),
    Case(name="fractional epochs", sources=(Rows(22).chats(37),), theirs=ASSISTANT, epochs=2.5),
    Case(name="chat, packed", sources=(Rows(23).chats(40),), theirs=ASSISTANT, packing=True,
         max_length=96, **WHOLE),
    Case(name="text, packed", sources=(Rows(24).text(40),), ours=ALL, packing=True, max_length=96,
         **WHOLE),
    Case(name="mixture of experts", sources=(Rows(25).chats(40),), theirs=ASSISTANT,
         family="qwen3_moe", accumulate=1, ours={"train.router_aux_loss": 0.001}),
)  # fmt: skip
