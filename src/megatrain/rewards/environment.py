"""Several turns: a function of the user that reads an answer and says what the model is told next.

    def game(row):                      # a generator, one for each rollout
        answer = yield                  # the model's answer to the row's prompt
        while "DONE" not in answer:
            answer = yield run(answer)  # what it is told next, as text or messages; its next answer
        return 1.0                      # a reward, if there is one

All rollouts go on together: each turn is one draw of those that are not over. What the model is
told becomes tokens by the chat template, as if its answer were a turn; these tokens are marked as
not its own, and nothing trains on them. A rollout is over when its function returns, when an answer
is cut off, or when the tokens of answers and of what was told have no room for another answer.

Laws (tests/rewards/test_environment.py)
    1. The tokens of a rollout of several turns are those of the chat template for its messages.
    2. Every token that the model wrote is trained with its log-probability, and no other.
    3. A function that raises, loops or says something else than text is named, in time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatrain.data.chat.template import ChatTemplate
from megatrain.data.rows.rows import Row
from megatrain.data.rows.skipped import BadRow
from megatrain.errors import RewardError
from megatrain.rewards.rollouts import Rollout

Draw = Callable[[Sequence[Sequence[int]], int, int], list[Rollout]]
"""Returns an answer to each prompt, of at most so many tokens, drawn by the seed of a turn."""
Told = Sequence[tuple[int, Any, float | None]]
"""Number of a rollout, what it is told next (None: it is over), and its reward, if it has one."""


@dataclass(slots=True, kw_only=True)
class _Game:
    """A rollout under way."""

    rollout: Rollout
    reward: float | None = None
    is_over: bool = False


def play(
    rollouts: Sequence[Rollout],
    tell: Callable[[Sequence[tuple[int, str]]], Told],
    draw: Draw,
    turns: TurnTokens,
    max_new_tokens: int,
) -> tuple[list[Rollout], list[float | None]]:
    """Return rollouts after all their turns, and the rewards that their functions returned.

    `rollouts` have the first answers. `tell` gets numbers and answers, and says what each is told.
    """
    games = [_Game(rollout=one) for one in rollouts]
    last = {number: one.tokens for number, one in enumerate(rollouts)}
    turn = 0
    while last:
        said = tell([(number, turns.text(tokens)) for number, tokens in last.items()])
        for number, told, reward in said:
            game = games[number]
            game.reward = reward
            new = () if told is None else turns.tokens(told)
            left = max_new_tokens - len(game.rollout.tokens) - len(new)
            game.is_over = told is None or not game.rollout.ended or left < 1
            if not game.is_over:
                game.rollout = _with_told(game.rollout, new)
            elif told is not None:
                game.rollout = replace(game.rollout, ended=False)
        live = [number for number in last if not games[number].is_over]
        if not live:
            break
        turn += 1
        rooms = {n: max_new_tokens - len(games[n].rollout.tokens) for n in live}
        texts = [(*games[n].rollout.prompt, *games[n].rollout.tokens) for n in live]
        answers = draw(texts, max(rooms.values()), turn)
        last = {}
        for number, answer in zip(live, answers, strict=True):
            games[number].rollout = _with_answer(games[number].rollout, answer, rooms[number])
            last[number] = answer.tokens[: rooms[number]]
    return [game.rollout for game in games], [game.reward for game in games]


def _with_told(rollout: Rollout, tokens: Sequence[int]) -> Rollout:
    return replace(
        rollout,
        tokens=(*rollout.tokens, *tokens),
        logprobs=(*rollout.logprobs, *[0.0] * len(tokens)),
        written=(*rollout.own, *[False] * len(tokens)),
    )


def _with_answer(rollout: Rollout, answer: Rollout, room: int) -> Rollout:
    count = min(room, len(answer.tokens))
    return replace(
        rollout,
        tokens=(*rollout.tokens, *answer.tokens[:count]),
        logprobs=(*rollout.logprobs, *answer.logprobs[:count]),
        written=(*rollout.own, *[True] * count),
        ended=answer.ended and count == len(answer.tokens),
    )


class TurnTokens:
    """What follows on an answer, in the tokens of a model's chat template."""

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any], ends: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, kwargs) if tokenizer.chat_template else None
        self._ends = [str(tokenizer.decode([end])) for end in sorted(ends)]

    def text(self, tokens: Sequence[int]) -> str:
        """Return an answer as people read it."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def tokens(self, told: Any) -> tuple[int, ...]:
        """Return the tokens between an answer and the next. Raises RewardError."""
        messages = [{"role": "user", "content": told}] if isinstance(told, str) else told
        if self._template is None:
            if not isinstance(told, str):
                raise RewardError(
                    "rollouts.environment says messages, but there is no chat template: let it "
                    "say text, or set data.chat_template"
                )
            found = self._tokenizer(told, add_special_tokens=False)["input_ids"]
            return tuple(map(int, found))
        before = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "y"})
        try:
            begin = self._template.render(Row(messages=before))
            whole = self._template.render(
                Row(messages=(*before, *messages)), add_generation_prompt=True
            )
        except BadRow as bad:
            raise RewardError(
                f"rollouts.environment says {str(told)[:80]!r}, and the chat template refuses it: "
                f"{bad.detail[:200]}"
            ) from None
        if not whole.startswith(begin):
            raise RewardError(
                "the chat template rewrites an answer once something follows it, so that it would "
                "be trained as it was not drawn. Set data.chat_template to one that does not"
            )
        text = self._after_end(begin) + whole[len(begin) :]
        return tuple(map(int, self._tokenizer(text, add_special_tokens=False)["input_ids"]))

    def _after_end(self, text: str) -> str:
        """Return what the template writes after the end of an answer, which the model has drawn."""
        places = [text.rfind(end) + len(end) for end in self._ends if end and end in text]
        return text[max(places) :] if places else ""
