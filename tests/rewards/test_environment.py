"""Laws of environment.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli.demo import byte_tokenizer
from megatrain.errors import RewardError
from megatrain.losses.head import IGNORED
from megatrain.rewards.environment import TurnTokens, play
from megatrain.rewards.functions import EnvironmentFunction
from megatrain.rewards.rollouts import Rollout, rollout_batch

SOURCE = """
import time

def game(row):
    answer = yield
    for word in row["told"]:
        answer = yield word
    return len(answer)

def plain(row):
    return 1.0

def first(row):
    answer = yield "hello"

def raises(row):
    answer = yield
    raise ValueError("no tool")

def loops(row):
    answer = yield
    while True:
        time.sleep(0.01)

def number(row):
    answer = yield
    answer = yield 5

def nan(row):
    answer = yield
    return float("nan")
"""


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("given.py").write_text(SOURCE)


def environment(name: str, timeout_s: float = 30.0) -> EnvironmentFunction:
    return EnvironmentFunction(f"given.py:{name}", timeout_s)


def answer(tokenizer: Any, text: str, prompt: Sequence[int] = (), *, ended: bool = True) -> Rollout:
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = [*tokens, tokenizer.eos_token_id] if ended else tokens
    return Rollout(
        prompt=tuple(prompt),
        tokens=tuple(tokens),
        logprobs=tuple(-0.5 for _ in tokens),
        ended=ended,
    )


def asked(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


def test_tokens_of_several_turns_are_those_of_the_chat_template() -> None:
    tokenizer = byte_tokenizer()
    said = [{"role": "user", "content": "hi"}]
    rows: list[dict[str, Any]] = [{"told": ["more", "and"]}, {"told": []}, {"told": ["more"]}]
    first = [answer(tokenizer, text, asked(tokenizer, said)) for text in ("one", "two", "six")]
    draws: list[tuple[int, int]] = []

    def draw(texts: Sequence[Sequence[int]], most: int, turn: int) -> list[Rollout]:
        draws.append((len(texts), turn))
        return [answer(tokenizer, f"turn{turn}", text) for text in texts]

    game = environment("game")
    game.begin(rows)
    turns = TurnTokens(tokenizer, {}, frozenset({tokenizer.eos_token_id}))
    found, rewards = play(first, game.tell, draw, turns, max_new_tokens=200)
    game.close()
    assert draws == [(2, 1), (1, 2)]
    assert rewards == [5.0, 3.0, 5.0]
    turns_said = [("assistant", "one"), ("user", "more"), ("assistant", "turn1"), ("user", "and")]
    talk = [*said, *({"role": role, "content": text} for role, text in turns_said)]
    before = asked(tokenizer, talk)
    whole = [*found[0].prompt, *found[0].tokens]
    assert whole[: len(before)] == before
    assert whole[len(before) :] == list(answer(tokenizer, "turn2").tokens)
    assert found[1] == first[1]


def test_only_tokens_that_the_model_wrote_are_trained() -> None:
    tokenizer = byte_tokenizer()
    first = [answer(tokenizer, "one", [5, 6])]
    game = environment("game")
    game.begin([{"told": ["more"]}])
    turns = TurnTokens(tokenizer, {}, frozenset({tokenizer.eos_token_id}))
    (found,), _ = play(
        first,
        game.tell,
        lambda texts, most, turn: [answer(tokenizer, "two", text) for text in texts],
        turns,
        max_new_tokens=100,
    )
    game.close()
    (micro,) = rollout_batch([found], [2.0])
    trained = [int(token) for token in micro.labels[0] if token != IGNORED]
    assert trained == [*first[0].tokens, *answer(tokenizer, "two").tokens]
    assert sum(found.own) == len(trained) < len(found.tokens)
    spoilt = replace(found, written=())
    (other,) = rollout_batch([spoilt], [2.0])
    assert not other.labels.equal(micro.labels), "marks are read"


@pytest.mark.parametrize("room", [6, 20])
def test_a_rollout_without_room_for_another_answer_is_over(room: int) -> None:
    tokenizer = byte_tokenizer()
    game = environment("game")
    game.begin([{"told": ["a word that is long"]}])
    turns = TurnTokens(tokenizer, {}, frozenset({tokenizer.eos_token_id}))
    (found,), rewards = play(
        [answer(tokenizer, "one", [5])], game.tell, lambda *_: [], turns, max_new_tokens=room
    )
    game.close()
    assert (found.ended, rewards) == (False, [None])
    assert len(found.tokens) <= room


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plain", "returned 1.0, not a generator"),
        ("first", "yields 'hello' before the first answer"),
        ("raises", r"raised ValueError: no tool \(given.py, line 18\)"),
        ("loops", "has not returned within 1.5 s"),
        ("number", "yields 5; yield text, a message or a list of messages"),
        ("nan", "returned nan; return a finite number, or nothing"),
    ],
)
def test_a_function_that_fails_is_named(name: str, said: str) -> None:
    game = environment(name, 1.5 if name == "loops" else 30.0)

    def played() -> None:
        game.begin([{}])
        game.tell([(0, "answer")])

    with pytest.raises(RewardError, match=f"the environment given.py:{name} {said}"):
        played()
