"""Chat: every assistant turn with its end-of-turn token is trained once, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from megatrain.data.chat.masks import TOKENIZER_REFUSED, Encoder, Tokens
from megatrain.data.chat.render import NO_PREFIX, UNOPENED_THOUGHT, render_row
from megatrain.data.chat.template import TEMPLATE_REFUSED, ChatTemplate, has_generation_tags
from megatrain.data.rows.formats import format_of
from megatrain.data.rows.messages import Message
from megatrain.data.rows.rows import Row, canonical
from megatrain.data.rows.skipped import BadRow
from megatrain.errors import DataError
from testkit.row_shapes import SHAPES
from testkit.tokenizers_of_kinds import KINDS, made, tokenizer_of

TALK: tuple[Message, ...] = (
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "one  two\n"},
    {"role": "user", "content": "and \U0001f600?"},
    {"role": "assistant", "content": "three \U0001f600\u00e9"},
)


def trained_text(kind: str, documents: list[Tokens]) -> list[str]:
    """What is trained, turn by turn, as text."""
    tokenizer, found = tokenizer_of(kind), []
    for document in documents:
        run: list[int] = []
        for token, trained in [*zip(document.input_ids, document.trained, strict=True), (0, False)]:
            if trained:
                run.append(token)
            elif run:
                found.append(tokenizer.decode(run))
                run = []
    return found


def expected(kind: str, messages: Any) -> list[str]:
    """The same by hand: what `kind` writes before, the content, what it writes after."""
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    trimmed = [a.strip() if kind in ("llama3", "gemma") else a for a in answers]
    return [KINDS[kind].before + answer + KINDS[kind].end for answer in trimmed]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_answer_is_trained_once_with_its_end(shape: str, kind: str) -> None:
    value = SHAPES[shape][0]
    form = format_of(value)
    assert form
    row = canonical(value, form)
    encoder = Encoder(tokenizer_of(kind))
    if row.messages[0]["role"] == "system" and not KINDS[kind].has_system:
        with pytest.raises(BadRow, match=f"{TEMPLATE_REFUSED}.*no system role"):
            encoder.encode(row)
        return
    assert trained_text(kind, encoder.encode(row)) == expected(kind, row.messages[row.num_prompt :])


@pytest.mark.parametrize("kind", KINDS)
def test_spaces_and_emoji_keep_their_tokens(kind: str) -> None:
    documents = Encoder(tokenizer_of(kind)).encode(Row(messages=TALK))
    assert trained_text(kind, documents) == expected(kind, TALK)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_moved_by_one_token_would_be_noticed(kind: str) -> None:
    (*_, document) = Encoder(tokenizer_of(kind)).encode(Row(messages=TALK))
    last = len(document.input_ids)
    runs = tuple((begin + 1, min(end + 1, last)) for begin, end in document.runs)
    moved = Tokens(input_ids=document.input_ids, runs=runs)
    assert trained_text(kind, [moved]) != trained_text(kind, [document])


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_before_a_trained_turn_is_what_inference_gives(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    prompts = [
        text.text[: span[0]]
        for text in render_row(ChatTemplate(tokenizer), Row(messages=TALK), "assistant")
        for span in text.spans
    ]
    assert prompts == [
        tokenizer.apply_chat_template(list(TALK[:n]), tokenize=False, add_generation_prompt=True)
        for n in (1, 3)
    ]


def test_templates_that_rewrite_history_give_a_text_for_each_turn() -> None:
    row = Row(messages=TALK)
    assert len(render_row(ChatTemplate(tokenizer_of("chatml")), row, "assistant")) == 1
    first, second = render_row(ChatTemplate(tokenizer_of("qwen3")), row, "assistant")
    assert "<think>" in first.text
    assert second.text.count("<think>") == 1


def test_thoughts_are_trained_where_they_are_shown() -> None:
    thinking = [dict(message) for message in TALK]
    thinking[3]["content"] = "<think>\nhm\n</think>\n\nthree"
    documents = Encoder(tokenizer_of("qwen3")).encode(Row(messages=tuple(thinking)))
    assert trained_text("qwen3", documents)[-1] == "<think>\nhm\n</think>\n\nthree<|im_end|>"


@pytest.mark.parametrize("kind", KINDS)
def test_what_follows_the_last_answer_is_left_out(kind: str) -> None:
    encoder = Encoder(tokenizer_of(kind))
    assert encoder.encode(Row(messages=TALK[:3])) == encoder.encode(Row(messages=TALK[:2]))


@pytest.mark.parametrize("kind", KINDS)
def test_train_on_all_trains_all_of_one_text(kind: str) -> None:
    (document,) = Encoder(tokenizer_of(kind), "all").encode(Row(messages=TALK))
    assert all(document.trained)
    whole = tokenizer_of(kind).apply_chat_template(list(TALK), tokenize=True, return_dict=True)
    assert document.input_ids == whole["input_ids"]


@pytest.mark.parametrize("kind", ["zephyr", "qwen3"])
def test_tags_agree_with_prefixes(kind: str) -> None:
    assert has_generation_tags(KINDS[kind].template)
    tokenizer = tokenizer_of(kind)
    (document,) = Encoder(tokenizer).encode(Row(messages=TALK[:2]))
    tagged = tokenizer.apply_chat_template(
        list(TALK[:2]), return_dict=True, tokenize=True, return_assistant_tokens_mask=True
    )
    assert [int(one) for one in document.trained] == tagged["assistant_masks"]


_SAID = "{{ m.content + eos_token }}{% endgeneration %}"
_HEAD = "{{ '<|assistant|>\n' }}{% generation %}"


@pytest.mark.parametrize(
    ("right", "wrong", "text"),
    [
        (
            _SAID,
            "{{ m.content }}{% endgeneration %}{{ eos_token }}",
            "prefixes train token .*'</s>'",
        ),
        (
            "{% else %}{{ '<|'",
            "{% else %}{% generation %}{{ 'x' }}{% endgeneration %}{{ '<|'",
            "tags train token",
        ),
        ("{% generation %}{{ m.content", "{{ 'x' }}{% generation %}{{ m.content", "prefixes train"),
    ],
    ids=["no end of turn", "question too", "first letter lost"],
)
def test_tags_that_contradict_the_prefixes_are_refused(right: str, wrong: str, text: str) -> None:
    kind = KINDS["zephyr"]
    assert right in kind.template
    encoder = Encoder(made(kind.template.replace(right, wrong), kind.marks, eos=kind.eos))
    with pytest.raises(DataError, match=rf"a\.jsonl:3: the chat template contradicts.*{text}"):
        encoder.encode(Row(messages=TALK), "a.jsonl:3")


def test_tags_may_hold_the_header_that_the_generation_prompt_writes() -> None:
    """Laguna's and most of TRL's do. The model does not write it, so it is not trained."""
    kind = KINDS["zephyr"]
    template = kind.template.replace(_HEAD, "{% generation %}{{ '<|assistant|>\n' }}")
    assert template != kind.template
    documents = Encoder(made(template, kind.marks, eos=kind.eos)).encode(Row(messages=TALK))
    assert documents == Encoder(tokenizer_of("zephyr")).encode(Row(messages=TALK))


def test_tags_around_nothing_are_refused() -> None:
    kind = KINDS["zephyr"]
    template = kind.template.replace("{% generation %}", "{% generation %}{% endgeneration %}", 1)
    template = template.replace(_SAID, "{{ m.content + eos_token }}")
    with pytest.raises(DataError, match="Tags train 0 tokens"):
        Encoder(made(template, kind.marks, eos=kind.eos)).encode(Row(messages=TALK))


def test_a_generation_prompt_the_turn_does_not_begin_with_is_no_prefix() -> None:
    kind = KINDS["chatml"]
    template = kind.template.replace("assistant\n' }}{% endif", "assistant\nSure: ' }}{% endif")
    with pytest.raises(BadRow, match=rf"{NO_PREFIX}.*turn 3: the prompt continues with 'Sure: '"):
        Encoder(made(template, kind.marks, eos=kind.eos)).encode(Row(messages=TALK))


@pytest.mark.parametrize(
    "opened",
    [
        "<think>\n",
        "<think>\n\n</think>\n\n",
        "[THINK]",
        "<|channel>thought\n<channel|>",  # Gemma 4
        "<b_THINKING><e_THINKING>",  # Command: a mark that begins as that of an answer does
        "<b_THINKING>",
        "Here are my reasoning steps:\n",  # Apriel 1.6
    ],
)
def test_a_thought_that_only_the_generation_prompt_opens_does_not_cost_the_row(opened: str) -> None:
    kind = KINDS["chatml"]
    template = kind.template.replace(
        "assistant\n' }}{% endif", f"assistant\n{opened}' }}}}{{% endif"
    )
    talk = (*TALK[:3], {"role": "assistant", "content": "<b_four"})
    marks = (*kind.marks, "<|channel>", "<channel|>", "<b_THINKING>", "<e_THINKING>")
    tokenizer = made(template, marks, eos=kind.eos)
    (document,) = Encoder(tokenizer).encode(Row(messages=talk))
    plain = Encoder(made(kind.template, marks, eos=kind.eos)).encode(Row(messages=talk))[0]
    assert (document.input_ids, document.runs) == (plain.input_ids, plain.runs)
    assert document.notes == (UNOPENED_THOUGHT, UNOPENED_THOUGHT)
    assert plain.notes == ()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("{% if add_generation_prompt %}", "{% if true %}"),  # Command-R7B: at the end of all texts
        ("<|im_start|>assistant\n<think>", "<|im_start|>model\n"),  # another header
        ("<think>", "think of {{ messages[-1].content }}: "),  # no thought: it is of this question
    ],
)
def test_what_a_generation_prompt_has_beside_a_thought_costs_the_row(
    right: str, wrong: str
) -> None:
    kind = KINDS["chatml"]
    template = kind.template.replace(
        "{{ '<|im_start|>assistant\n' }}{% endif", "<|im_start|>assistant\n<think>{% endif"
    )
    assert right in template
    tokenizer = made(template.replace(right, wrong), kind.marks, eos=kind.eos)
    with pytest.raises(BadRow, match=rf"{NO_PREFIX}.*set data\.chat_template to a template that"):
        Encoder(tokenizer).encode(Row(messages=TALK))


_REWRITES = (  # thoughts go as soon as there is an answer after them
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<a>' + (m.thinking if loop.last and m.thinking else '') + m.content + '<end>' }}"
    "{% else %}{{ '<u>' + m.content + '<end>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def test_a_turn_follows_its_own_prompt_where_the_template_rewrites_what_that_shows() -> None:
    talk = (
        TALK[0],
        {"role": "assistant", "content": "look", "thinking": "hm "},
        {"role": "assistant", "content": "two", "thinking": "so "},
    )
    tokenizer = made(_REWRITES, ("<a>", "<u>", "<end>"), eos="<end>")
    template = ChatTemplate(tokenizer)
    texts = render_row(template, Row(messages=talk), "assistant")
    assert [one.text for one in texts] == [
        "<u>hello<end><a>hm look<end>",
        "<u>hello<end><a>hm look<end><a>so two<end>",
    ]
    for number, one in zip((1, 2), texts, strict=True):
        ((begin, _),) = one.spans
        assert one.text[:begin] == template.render(
            Row(messages=talk), number, add_generation_prompt=True
        )
    # A template that joins a turn to the one before has no place where it begins.
    joined = _REWRITES.replace("'<a>' + (m", "('' if loop.index0 == 2 else '<a>') + (m")
    with pytest.raises(BadRow, match=NO_PREFIX):
        render_row(
            ChatTemplate(made(joined, ("<a>", "<u>", "<end>"), eos="<end>")),
            Row(messages=talk),
            "assistant",
        )


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ messages[99].x }}", "{% for %}"]
)
def test_a_template_that_fails_costs_the_row(template: str) -> None:
    with pytest.raises(BadRow, match=TEMPLATE_REFUSED):
        Encoder(made(template, ("<s>",), eos="<s>")).encode(Row(messages=TALK))


def test_text_ends_with_the_end_of_sequence() -> None:
    tokenizer = tokenizer_of("mistral")
    (document,) = Encoder(tokenizer).encode(Row(text="hello world"))
    assert tokenizer.decode(document.input_ids) == "hello world</s>"
    assert all(document.trained)
    assert document.num_valid_tokens == len(document.input_ids) - 1


def test_without_template_a_pair_is_joined_and_a_conversation_refused() -> None:
    tokenizer = made(None, ("<s>", "</s>"), eos="</s>")
    encoder = Encoder(tokenizer)
    pair = Row(messages=TALK[:2], plain=True)
    (document,) = encoder.encode(pair)
    assert tokenizer.decode(document.input_ids) == "helloone  two\n</s>"
    trained = [i for i, t in zip(document.input_ids, document.trained, strict=True) if t]
    assert tokenizer.decode(trained) == "one  two\n</s>"
    with pytest.raises(DataError, match=r"a:1 is a conversation, but there is no chat template"):
        encoder.encode(Row(messages=TALK), "a:1")


def test_a_space_at_the_very_end_is_trained() -> None:
    """Its offsets are trimmed to nothing by the tokenizer."""
    tokenizer = made(None, ("<s>", "</s>"), eos="</s>")
    offsets = tokenizer("x ", return_offsets_mapping=True)["offset_mapping"]
    assert offsets[-1] == (2, 2)
    talk = ({"role": "user", "content": "hello"}, {"role": "assistant", "content": "x "})
    (document,) = Encoder(tokenizer).encode(Row(messages=talk, plain=True))
    trained = [i for i, t in zip(document.input_ids, document.trained, strict=True) if t]
    assert tokenizer.decode(trained) == "x </s>"


def test_turns_that_nothing_ends_are_counted() -> None:
    """Each trained turn of these kinds ends with a control token; without it, it is open."""
    for kind in KINDS:
        documents = Encoder(tokenizer_of(kind)).encode(Row(messages=TALK))
        assert sum(document.num_open for document in documents) == 0
    endless = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    tokenizer = made(endless, KINDS["phi"].marks, eos="<|endoftext|>")
    (document,) = Encoder(tokenizer).encode(Row(messages=TALK))
    assert document.num_open == 2


OPEN_TURNS = (  # as GLM's: what opens the next turn is all that ends one
    "{% for m in messages %}{% if m.role == 'tool' %}{{ '<|observation|>' + m.content }}{% else %}"
    "{{ '<|' + m.role + '|>\n' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<call>' + c.function.name + '</call>' }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
OPEN_MARKS = ("<|user|>", "<|assistant|>", "<|observation|>", "<call>", "</call>", "<|endoftext|>")
CALL: Message = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "add"}}],
}
TOOL_TALK: tuple[Message, ...] = (
    TALK[0], CALL,
    {"role": "tool", "content": "4"}, {"role": "assistant", "content": "four"}, *TALK[2:],
)  # fmt: skip


def _open_turns(template: str = OPEN_TURNS) -> Any:
    return made(template, OPEN_MARKS, eos="<|endoftext|>")


def _spans(tokenizer: Any, documents: list[Tokens]) -> list[str]:
    return [
        tokenizer.decode(document.input_ids[begin:end])
        for document in documents
        for begin, end in document.runs
    ]


@pytest.mark.parametrize("num_turns", [2, 4, 6])
def test_a_turn_that_nothing_closes_ends_with_what_opens_the_next(num_turns: int) -> None:
    tokenizer = _open_turns()
    trained = ["<call>add</call><|observation|>", "four<|user|>", "three \U0001f600\u00e9<|user|>"]
    (document,) = Encoder(tokenizer).encode(Row(messages=TOOL_TALK[:num_turns]))
    assert _spans(tokenizer, [document]) == trained[: num_turns // 2]
    assert document.num_open == 0
    # Only the end of the last turn is added to what the template writes.
    text = ChatTemplate(tokenizer).render(Row(messages=TOOL_TALK[:num_turns]))
    last = "<|observation|>" if num_turns == 2 else "<|user|>"
    assert tokenizer.decode(document.input_ids) == text + last


@pytest.mark.parametrize("train_on", ["completion", "all"])
def test_one_text_of_open_turns_ends_with_what_opens_a_question(train_on: Any) -> None:
    tokenizer = _open_turns()
    (document,) = Encoder(tokenizer, train_on).encode(Row(messages=TALK[:2]))
    assert document.trained[-1]
    assert tokenizer.decode(document.input_ids).endswith("one  two\n<|user|>")
    untrained = Row(messages=TALK, untrained=frozenset({1}))
    (document,) = Encoder(tokenizer, train_on).encode(untrained)
    assert "one  two\n<|user|>" not in "".join(_spans(tokenizer, [document]))


def test_turns_are_closed_where_the_template_closes_all_but_the_last() -> None:
    """Apriel 1.6 writes the end of an answer only if there is a turn behind it."""
    kind = KINDS["chatml"]
    is_open = "'' if loop.last and m.role == 'assistant' else '<|im_end|>\n'"
    template = kind.template.replace("'<|im_end|>\n'", f"({is_open})")
    tokenizer = made(template, kind.marks, eos=kind.eos)
    assert not ChatTemplate(tokenizer).render(Row(messages=TALK)).endswith("<|im_end|>\n")
    documents = Encoder(tokenizer).encode(Row(messages=TALK))
    assert _spans(tokenizer, documents) == expected("chatml", TALK)


def test_a_call_that_has_an_end_is_not_ended_twice() -> None:
    template = OPEN_TURNS.replace("+ '</call>'", "+ '</call><|endoftext|>'")
    documents = Encoder(_open_turns(template)).encode(Row(messages=TOOL_TALK[:2]))
    assert _spans(_open_turns(), documents) == ["<call>add</call><|endoftext|>"]


def test_a_first_token_is_written_where_the_tokenizer_writes_it() -> None:
    tokenizer = made(None, ("<s>", "</s>"), eos="</s>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    for row in (Row(messages=TALK[:2], plain=True), Row(text="hello")):
        (document,) = Encoder(tokenizer).encode(row)
        assert tokenizer.decode(document.input_ids).startswith("<s>hello")


@pytest.mark.parametrize("kind", KINDS)
def test_rows_give_the_same_together_as_one_by_one(kind: str) -> None:
    encoder = Encoder(tokenizer_of(kind))
    system: Message = {"role": "system", "content": "brief"}
    rows = [
        Row(messages=TALK),
        Row(text="hello world"),
        Row(messages=(system, *TALK)),
        Row(messages=TALK[1:]),
        Row(messages=TALK[2:]),
    ]
    together = encoder.encode_rows([(f"a:{number}", row) for number, row in enumerate(rows)])
    for row, documents in zip(rows, together, strict=True):
        if isinstance(documents, BadRow):
            with pytest.raises(BadRow, match=documents.reason):
                encoder.encode(row)
        else:
            assert encoder.encode(row) == documents
    assert isinstance(together[3], BadRow)  # no turn comes before the first answer


def test_a_file_that_asks_for_padding_or_truncation_is_not_obeyed() -> None:
    tokenizer = made(KINDS["chatml"].template, KINDS["chatml"].marks, eos="<|im_end|>")
    expected = Encoder(tokenizer).encode(Row(messages=TALK))
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    assert Encoder(tokenizer).encode(Row(messages=TALK)) == expected


class _Panic(BaseException):
    """What a tokenizer's own code may raise: no Exception."""


class _Panicking:
    """A tokenizer that cannot bear one word."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *texts: Any, **options: Any) -> Any:
        return self._tokenizer(*texts, **options)

    @property
    def backend_tokenizer(self) -> Any:
        return self

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        if any("world" in text for text in texts):
            raise _Panic("no world")
        return self._tokenizer.backend_tokenizer.encode_batch(texts, **options)


def test_a_row_that_the_tokenizer_cannot_bear_costs_itself_alone() -> None:
    encoder = Encoder(_Panicking(tokenizer_of("chatml")))
    texts = ["hello", "hello world", "two"]
    first, bad, last = encoder.encode_rows([("a:1", Row(text=text)) for text in texts])
    assert isinstance(bad, BadRow)
    assert (bad.reason, bad.detail) == (TOKENIZER_REFUSED, "_Panic: no world")
    plain = Encoder(tokenizer_of("chatml"))
    assert [first, last] == [plain.encode(Row(text=text)) for text in ("hello", "two")]


def test_a_tokenizer_without_offsets_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(DataError, match="Slow has no character offsets"):
        Encoder(Slow())
