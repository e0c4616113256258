"""Chat templates: the library's text, and the characters between generation tags."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from megatrain.data.chat.template import TEMPLATE_REFUSED, ChatTemplate
from megatrain.data.rows.messages import Message
from megatrain.data.rows.rows import Row
from megatrain.data.rows.skipped import BadRow
from megatrain.errors import DataError
from testkit.tokenizers_of_kinds import KINDS, made, tokenizer_of

TALK: list[Message] = [
    {"role": "user", "content": "a <b> & 'c'\n"},
    {"role": "assistant", "content": " one \U0001f600"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "two"},
]

ROW = Row(messages=tuple(TALK))

PARTICULARS = {
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2, ensure_ascii=True) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "blocks are trimmed": "a\n    {% if true %}\nb\n    {% endif %}\n  c",
    "date": "{{ strftime_now('%Y') }}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}",
    "no tools": "{{ tools is none }}{{ documents is none }}{{ tools is defined }}",
    "a macro": "{% macro say(m) %}<{{ m.content }}>{% endmacro %}{{ say(messages[0]) }}",
    "undefined": "{{ missing }}{{ messages[0].missing }}{{ missing is defined }}",
    "a namespace": "{% set n = namespace(x=1) %}{% set n.x = n.x + 1 %}{{ n.x }}",
    "string methods": "{{ messages[0]['content'].strip().split(' ')[-1].upper() | trim }}",
    "the prompt": "{% if add_generation_prompt %}p{% else %}n{% endif %}",
    "tags with dashes": "x {%- generation -%} y {%- endgeneration -%} z",
}


def _tokenizer(template: str) -> Any:
    return made(template, ("<s>", "</s>"), eos="</s>")


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("template", PARTICULARS.values(), ids=PARTICULARS)
def test_particulars_are_written_as_the_library_writes_them(template: str, prompt: bool) -> None:
    tokenizer = _tokenizer(template)
    ours = ChatTemplate(tokenizer).render(ROW, add_generation_prompt=prompt)
    assert ours == tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_written_as_the_library_writes_it(kind: str) -> None:
    template, tokenizer = ChatTemplate(tokenizer_of(kind)), tokenizer_of(kind)
    for end in range(1, 5):
        for prompt in (False, True):
            assert template.render(
                ROW, end, add_generation_prompt=prompt
            ) == tokenizer.apply_chat_template(
                TALK[:end], tokenize=False, add_generation_prompt=prompt
            )
    template.check(ROW)


@pytest.mark.parametrize("kind", ["zephyr", "qwen3"])
def test_tagged_characters_are_the_answers(kind: str) -> None:
    template = ChatTemplate(tokenizer_of(kind))
    assert template.has_tags
    for _ in range(2):  # the second time nothing is left of the first
        text, spans = template.render_tagged(ROW)
        assert text == template.render(ROW)
        first, last = (text[begin:end] for begin, end in spans)
        assert first.endswith(" one \U0001f600" + KINDS[kind].end)
        assert last.endswith("two" + KINDS[kind].end)


def test_a_template_that_is_written_otherwise_when_used_is_refused() -> None:
    tokenizer = _tokenizer("{{ messages[0].content }}")
    template = ChatTemplate(tokenizer)
    template.check(ROW)
    tokenizer.chat_template = "{{ messages[1].content }}"
    with pytest.raises(DataError, match=r"writes \"a <b>.* here and ' one .* at inference"):
        template.check(ROW)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].update(role='x') }}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    with pytest.raises(BadRow, match=f"{TEMPLATE_REFUSED}.*SecurityError"):
        ChatTemplate(_tokenizer(template)).render(ROW)


def test_an_answer_to_nothing_is_refused() -> None:
    with pytest.raises(BadRow, match=f"{TEMPLATE_REFUSED}.*no turn comes before the first answer"):
        ChatTemplate(_tokenizer("x")).render(Row())


CALLING = Row(
    messages=(
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}],
        },
    )
)
_GIVES_NO_NULL = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
_CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}"


@pytest.mark.parametrize(
    "said",
    [
        _CALLS + "{{ c.function.arguments | tojson }}{% endfor %}{{ m.content or '' }}",
        _CALLS + "{{ c.function.arguments | tojson }}{% endfor %}{{ m.content }}",
        _CALLS + "{{ c.function.arguments | tojson }}{% endfor %}{{ '' + m.content }}",
        _CALLS + "{{ '' + c.function.arguments }}{% endfor %}{{ m.content }}",
        pytest.param(
            "{% if m.content is none %}" + _CALLS + "{{ '' + c.function.arguments }}{% endfor %}"
            "{% else %}{{ m.content }}{% endif %}",
            marks=pytest.mark.skipif(_GIVES_NO_NULL, reason="transformers gives templates no null"),
        ),
    ],
    ids=["any", "writes None", "fails on null", "arguments as text", "only where null"],
)
def test_a_call_is_given_in_the_form_that_the_template_writes(said: str) -> None:
    tokenizer = _tokenizer("{% for m in messages %}" + said + "{% endfor %}")
    template = ChatTemplate(tokenizer)
    assert template.render(CALLING) == 'hiadd{"a": 2}'
    template.check(CALLING)


def test_a_call_without_words_is_written_where_earlier_turns_are_split() -> None:
    """QwQ's template cuts thoughts from every turn but the last, and cannot cut them from null."""
    tokenizer = _tokenizer(
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% set said = m.content if loop.last else m.content.split('</think>')[-1] %}"
        "{{ 'A:' }}{% if m.content %}{{ said }}{% endif %}" + _CALLS + "{% endfor %}"
        "{% else %}{{ m.role + ':' + m.content }}{% endif %}{% endfor %}"
    )
    talk = (
        *CALLING.messages,
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "four"},
    )
    row = Row(messages=talk)
    assert ChatTemplate(tokenizer).render(row) == "user:hiA:addtool:4A:four"


def test_rows_with_tools_have_a_template_of_their_own_if_there_is_one() -> None:
    tokenizer = _tokenizer("x")
    tokenizer.chat_template = {"default": "plain", "tool_use": "{{ tools[0].name }}"}
    template = ChatTemplate(tokenizer)
    assert template.render(ROW) == "plain"
    assert template.render(Row(messages=tuple(TALK), tools=({"name": "add"},))) == "add"
