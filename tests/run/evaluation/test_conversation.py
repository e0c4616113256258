"""Laws of conversation.py."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.batch import MicroBatch
from megatrain.engine.compute.drawing import Drawing
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError, DataError
from megatrain.run.evaluation import conversation
from megatrain.run.evaluation.conversation import Conversation, Speaker
from testkit.spoken import predicting, spoken_model
from testkit.tokenizers_of_kinds import made, tokenizer_of

MESSAGES = ("what is two and three", "and four", "think")
LONGEST = 7
FAMILIES = ("llama", "mistral", "mamba")
"""Keys and values of everything, of a window, and of nothing."""


@functools.cache
def model(family: str) -> PreTrainedModel:
    """A random model with the vocabulary of the tokenizers, whose answers depend on the text."""
    return spoken_model(
        family, seed=4, vocab_size=len(tokenizer_of("chatml")), max_position_embeddings=256
    )


class Counting(Engine):
    """Notes how many tokens are read in each pass."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.num_read: list[int] = []

    def predict(self, batch: Sequence[MicroBatch], caches: Any = None) -> list[Tensor]:
        self.num_read.append(sum(micro.num_tokens for micro in batch))
        return super().predict(batch, caches)


@contextmanager
def speaking(family: str = "llama", kind: str = "chatml", **settings: Any) -> Iterator[Speaker]:
    decoder, store = predicting(model(family))
    tokenizer = settings.pop("tokenizer", tokenizer_of(kind))
    with Counting(decoder, store) as engine:
        given = {"end_tokens": frozenset(), "template_kwargs": {}, **settings}
        yield Speaker(engine=engine, tokenizer=tokenizer, **given)


def answered(speaker: Speaker, messages: Sequence[str] = MESSAGES) -> list[list[int]]:
    """Return the tokens of the answers to messages, one after another."""
    talk = Conversation(speaker)
    answers: list[list[int]] = []

    def keep(token: int) -> bool:
        answers[-1].append(token)
        return True

    for message in messages:
        answers.append([])
        assert talk.answer(message, LONGEST, keep) == "cut"
    return answers


def generated(family: str) -> list[list[int]]:
    """Return the answers of transformers, each behind the text of all turns before it."""
    tokenizer = tokenizer_of("chatml")
    turns: list[dict[str, str]] = []
    answers = []
    for message in MESSAGES:
        turns.append({"role": "user", "content": message})
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        found = model(family).generate(
            torch.tensor([ids]), max_new_tokens=LONGEST, do_sample=False, eos_token_id=None
        )
        answers.append(found[0, len(ids) :].tolist())
        marks = [place for place, token in enumerate(answers[-1]) if token <= 2]  # the special ones
        text = tokenizer.decode(answers[-1][(marks or [-1])[-1] + 1 :])
        turns.append({"role": "assistant", "content": text.strip("\n")})
    return answers


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_transformers_turn_after_turn(family: str) -> None:
    with speaking(family) as speaker:
        found = answered(speaker)
    assert found == generated(family)
    assert len({tuple(answer) for answer in found}) == len(MESSAGES)


def test_turns_that_were_forgotten_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    written = conversation.prompt_tokens
    monkeypatch.setattr(
        conversation, "prompt_tokens", lambda t, turns, kwargs: written(t, turns[-1:], kwargs)
    )
    with speaking() as speaker:
        assert answered(speaker) != generated("llama")


def test_keys_and_values_of_other_turns_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "drop_last", lambda *_: True)
    with speaking() as speaker:
        assert answered(speaker) != generated("llama")


def test_a_turn_reads_only_what_is_new() -> None:
    with speaking() as speaker:
        talk = Conversation(speaker)
        talk.answer("hello", 2)
        talk.answer("world", 2)
        first, _, second, _ = speaker.engine.num_read  # type: ignore[attr-defined]
        asked = conversation.prompt_tokens(speaker.tokenizer, talk.turns[:-1], {})
    assert second <= len(asked) - first


def test_a_thought_is_not_in_later_prompts_where_special_tokens_end_it() -> None:
    tokenizer = tokenizer_of("qwen3")
    with speaking(kind="qwen3") as speaker:
        talk = Conversation(speaker)
        end = tokenizer.convert_tokens_to_ids("</think>")
        hello = tokenizer.encode("hello")
        thought = [tokenizer.convert_tokens_to_ids("<think>"), *tokenizer.encode("two\n"), end]
        assert talk._content([*thought, *tokenizer.encode("\n\nhello\n")]) == "hello"
        assert talk._content([*hello, end]) == "hello"
        assert talk._content([]) == ""


def test_an_answer_that_is_stopped_is_a_turn_and_one_that_ends_says_so() -> None:
    with speaking() as speaker:
        talk = Conversation(speaker)
        assert talk.answer("hello", LONGEST, lambda _: False) == "stopped"
        assert [turn["role"] for turn in talk.turns] == ["user", "assistant"]
        talk.reset()
        assert talk.turns == []
        ((first, *_),) = answered(speaker, ["hello"])
    with speaking(end_tokens=frozenset({first})) as speaker:
        talk = Conversation(speaker)
        assert talk.answer("hello", LONGEST, lambda token: pytest.fail(str(token))) == "ended"
        assert talk.turns[-1] == {"role": "assistant", "content": ""}


def test_a_message_without_an_answer_leaves_the_conversation_as_it_was() -> None:
    with speaking() as speaker:
        talk = Conversation(speaker)
        too_long = r"the text up to this message has \d+ tokens, and the model has 256 positions"
        with pytest.raises(DataError, match=f"{too_long}$"):
            talk.answer("hello " * 250, 2)
        talk.answer("hello", 2)
        before = list(talk.turns)
        with pytest.raises(DataError, match=f"{too_long}. /reset begins a new conversation$"):
            talk.answer("hello " * 250, 2)
        assert talk.turns == before
        assert talk.answer("hello " * 100, 256) == "full"


def test_turns_that_the_template_refuses_are_an_error() -> None:
    refused = pytest.raises(DataError, match="refuses the turns: no system role")
    with speaking(kind="gemma", system="be brief") as speaker, refused:
        Conversation(speaker).answer("hello", 2)


def test_the_template_gets_the_arguments_of_the_run() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.chat_template = "{{ messages[-1].content }}{% if brief %} brief{% endif %}"
    found = [
        conversation.prompt_tokens(tokenizer, [{"role": "user", "content": "hello"}], kwargs)
        for kwargs in ({"brief": True}, {})
    ]
    assert [tokenizer.decode(tokens) for tokens in found] == ["hello brief", "hello"]


def test_without_a_template_each_message_is_continued_alone() -> None:
    plain = copy.deepcopy(tokenizer_of("chatml"))
    plain.chat_template = None
    with speaking(tokenizer=plain) as speaker:
        first, _, again = answered(speaker, ["hello", "world", "hello"])
        assert first == again
    refused = pytest.raises(ConfigError, match="no chat template to hold it")
    with speaking(tokenizer=plain, system="be brief") as speaker, refused:
        Conversation(speaker)


def test_a_text_that_is_to_be_continued_does_not_end() -> None:
    """Some tokenizers put an end after every text."""
    closing = made(None, ("<s>", "</s>"), eos="</s>")
    closing.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(m, closing.vocab[m]) for m in ("<s>", "</s>")]
    )
    found = conversation.prompt_tokens(closing, [{"role": "user", "content": "hello"}], {})
    assert closing.decode(found) == "<s>hello"
    assert closing.decode(closing("hello")["input_ids"]) == "<s>hello</s>"


def test_a_conversation_that_begins_again_draws_the_same() -> None:
    with speaking(drawing=Drawing(temperature=1.0, seed=5)) as speaker:
        talk = Conversation(speaker)
        texts = []
        for _ in range(2):
            talk.reset()
            talk.answer("hello", LONGEST)
            talk.answer("world", LONGEST)
            texts.append([turn["content"] for turn in talk.turns])
    assert texts[0] == texts[1]
    assert texts[0][1] != texts[0][3]
