"""The data of a run on rewards: prompts by position, answers that its model draws, their rewards.

It stands where TrainingData stands, so that all else of a run is as ever: schedules, saves,
evaluations, resuming. A batch is drawn when it is asked for, by the weights of that moment:

    prompts at a position -> policy.draw -> texts -> reward functions -> advantages -> micro-batches

A draw is a function of its position, the seed and the weights. The position moves on only when all
steps on a draw are taken; until then the draw is part of the state. A failure before that changes
nothing, so a run that is saved then draws the same again.

Laws (tests/run/test_rewards.py)
    1. A run that was stopped and resumed, however often, ends in the bits of one that was not.
    2. A reward function that fails ends the run with its name, after a save.
    3. Ranks draw and train the same (they agree on answers and rewards).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from megatrain.batch import MicroBatch
from megatrain.config import Config
from megatrain.data.prompts import Prompt, Prompts
from megatrain.data.steps.steps import State
from megatrain.devices.device import draw_seed
from megatrain.disk.hf.model import HostModel
from megatrain.engine.engine import Engine
from megatrain.errors import DataError, RewardError
from megatrain.ranks.ranks import Ranks
from megatrain.rewards.drawn import Drawn
from megatrain.rewards.environment import TurnTokens, play
from megatrain.rewards.functions import EnvironmentFunction, RewardFunctions, Rewards
from megatrain.rewards.policy import Policy, open_policy
from megatrain.rewards.rollouts import Rollout
from megatrain.run.evaluation.samples import end_tokens
from megatrain.step.settings import StepSettings

_JUDGED = 1
"""Marks the seed of evaluations, which draw by the same numbers each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedAnswers:
    """The evaluation of a model on prompts that it is not trained on: one answer to each."""

    reward: float
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The reward as a loss, for what goes by the lowest one: best model and patience."""
        return -self.reward

    def metrics(self) -> dict[str, float]:
        """Return the figures by their names in metrics.jsonl."""
        apart = {f"eval_{name}": figure for name, figure in self.figures.items()}
        return {"eval_loss": self.loss, "eval_reward": self.reward, **apart}

    def in_words(self) -> str:
        apart = "".join(f", {name} {figure:.4g}" for name, figure in self.figures.items())
        return f"reward {self.reward:.4f}{apart}"


class DrawnData:
    """Steps on drawn answers, in place of TrainingData. Close it when done."""

    eval_names: tuple[str, ...] = ()
    step_tokens = None

    def __init__(
        self, config: Config, tokenizer: Any, settings: StepSettings, rows: Prompts, ranks: Ranks
    ) -> None:
        """Start the reward functions. Raises RewardError."""
        self._config, self._tokenizer, self.rows = config, tokenizer, rows
        self._ranks = ranks
        self.held_fraction = config.data.eval if isinstance(config.data.eval, float) else None
        self._layout = {
            "micro_batch_tokens": settings.micro_batch_tokens,
            "pad_token": tokenizer.pad_token_id or 0,
        }
        self._epoch, self._row = 0, 0
        self._drawn: Drawn | None = None
        self._batch: list[MicroBatch] | None = None
        self._judged: list[dict[str, Any]] = []
        self.figures: Mapping[str, float] = {}
        """Figures of the answers of the last batch."""
        self._engine: Engine | None = None
        self._home: HostModel | None = None
        self._policy: Policy | None = None
        self._functions: RewardFunctions | None = None
        self._environment: EnvironmentFunction | None = None
        said = ranks.decide(self._start)
        if said is not None:
            raise RewardError(said)

    def _start(self) -> str | None:
        """Start the reward functions and the environment; return why they cannot be."""
        rewards, environment = self._config.rewards, self._config.rollouts.environment
        try:
            if self._functions is None:
                self._functions = RewardFunctions(rewards)
            if environment is not None and self._environment is None:
                self._environment = EnvironmentFunction(environment, rewards.timeout)
        except RewardError as error:
            return str(error)
        return None

    def attach(self, engine: Engine, home: HostModel) -> None:
        """Draw from this engine and model from now on."""
        self._engine, self._home = engine, home

    @property
    def card(self) -> dict[str, Any]:
        """The sources' cards as one."""
        return self.rows.card()

    @property
    def num_judged(self) -> int:
        """Prompts that an evaluation looks at."""
        return len(self.rows.held)

    @property
    def _per_draw(self) -> int:
        assert self._config.train.batch_rows is not None, "the config has it"
        return self._config.train.batch_rows

    @cached_property
    def steps_in_epoch(self) -> int:
        draws = math.ceil(self.rows.order.size / self._per_draw)
        return draws * self._config.rollouts.iterations

    @cached_property
    def num_steps(self) -> int:
        """Steps of the run."""
        train = self._config.train
        return train.steps or self.steps_of(train.epochs or 1.0)

    def steps_of(self, epochs: float) -> int:
        """Return how many steps so many epochs have; a part of a step counts as one."""
        return math.ceil(self.steps_in_epoch * epochs)

    @property
    def epoch(self) -> int:
        """Passes over the prompts that are complete."""
        return self._epoch

    @property
    def is_at_start(self) -> bool:
        """Whether the next batch is the first of an epoch."""
        return self._row == 0 and self._drawn is None

    def next_batch(self) -> list[MicroBatch]:
        """Return the micro-batches of the next step, drawn if need be. Raises RewardError."""
        if self._drawn is None:
            self._drawn = self._draw()
        if self._batch is None:
            self._batch = self._laid_out(self._drawn)
        batch, self.figures = self._batch, self._drawn.figures
        self._drawn = self._drawn.used()
        if self._drawn.num_used == self._config.rollouts.iterations:
            self._drawn, self._batch = None, None
            self._row += self._per_draw
            if self._row >= self.rows.order.size:
                self._epoch, self._row = self._epoch + 1, 0
        return batch

    def state(self) -> State:
        """Return where the next batch begins, of which prompts, with a draw that is not used up."""
        drawn = {} if self._drawn is None else {"drawn": self._drawn.to_json()}
        return {
            "order": self._order_mark,
            "epoch": self._epoch,
            "window": 0,
            "row": self._row,
            **drawn,
        }

    def seek(self, state: State) -> None:
        """Go to a saved state. Raises DataError if it belongs to other prompts."""
        if state["order"] != self._order_mark:
            raise DataError(
                "the prompts differ from those of the run: their tokens, rows, order or weights, "
                "or how many are held out, have changed. Resume with the same files, tokenizer "
                "and data settings, or start a new run from the exported model with another "
                "save.dir."
            )
        epoch, row = int(state["epoch"]), int(state["row"])
        if min(epoch, row) < 0 or row >= self.rows.order.size:
            raise DataError(
                f"the saved position is invalid: epoch {epoch}, row {row} of {self.rows.order.size}"
            )
        self._epoch, self._row = epoch, row
        drawn = state.get("drawn")
        self._drawn = None if drawn is None else Drawn.from_json(drawn)
        self._batch = None

    @cached_property
    def _order_mark(self) -> str:
        """A name for everything that decides the prompts of a position."""
        # Which rows are held out, and which come again, follows from how many.
        data = self._config.data
        parts = " ".join(f"{share.num_rows}x{share.weight!r}" for share in self.rows.shares)
        return f"prompts {self._per_draw} {data.seed} {data.shuffle}-{self.rows.digest} {parts}"

    def judged(self) -> JudgedAnswers | None:
        """Return the mean reward of an answer to each held-out prompt; None without any."""
        if not self.rows.held:
            return None
        held = self.rows.held
        rollouts, texts, rewards = self._answered(held, 1, self._seed(_JUDGED))
        self._judged = _records(self._tokenizer, held, texts, rewards.total)
        figures = {f"reward/{name}": mean for name, mean in rewards.means.items()}
        tokens = sum(len(one.tokens) for one in rollouts) / len(rollouts)
        return JudgedAnswers(
            reward=sum(rewards.total) / len(texts),
            figures={**figures, "answer_tokens": tokens},
        )

    def samples(self, count: int) -> Iterator[dict[str, Any]]:
        """Yield the prompt, text and reward of some answers: those of the last evaluation."""
        found, self._judged = self._judged[:count], []
        if not found and count:
            some = (self.rows.held or self.rows.train)[:count]
            _, texts, rewards = self._answered(some, 1, self._seed(_JUDGED))
            found = _records(self._tokenizer, some, texts, rewards.total)
        yield from found

    def close(self) -> None:
        if self._functions is not None:
            self._functions.close()
        if self._environment is not None:
            self._environment.close()
        if self._policy is not None:
            self._policy.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _seed(self, *key: int) -> int:
        """Return a seed for one draw: near keys give unrelated ones."""
        first, second = (*key, 0, 0)[:2]
        return draw_seed(self._config.train.seed, first, second, len(key)) >> 33

    def _draw(self) -> Drawn:
        """Return the answers to the prompts at the position, with their rewards."""
        config, engine = self._config, self._engine
        assert engine is not None, "attach comes first"
        rows = self.rows.order.rows(self._epoch, self._row, self._row + self._per_draw)
        prompts = [self.rows.train[int(row)] for row in rows]
        num_samples = config.rollouts.samples
        seed = self._seed(self._epoch, self._row)
        rollouts, _, rewards = self._answered(prompts, num_samples, seed)
        drawn = Drawn.of(
            rollouts,
            rewards,
            num_samples,
            scaled=config.loss.name != "dr_grpo",
            mask_truncated=config.rollouts.mask_truncated,
        )
        assert self._policy is not None
        if self._policy.exact:
            return drawn
        return drawn.corrected(engine, config.rollouts.temperature, **self._layout)

    def _laid_out(self, drawn: Drawn) -> list[MicroBatch]:
        """Return the micro-batches of a draw, with reference log-probabilities if the loss asks."""
        engine = self._engine
        assert engine is not None
        batch = drawn.batch(**self._layout)
        if "reference" not in engine.loss.extra_names:
            return batch
        temperature = self._config.rollouts.temperature
        known = engine.logprobs(batch, reference=True, temperature=temperature)
        return [micro.with_extra(reference=one) for micro, one in zip(batch, known, strict=True)]

    def _answered(
        self, prompts: Sequence[Prompt], num_samples: int, seed: int
    ) -> tuple[list[Rollout], list[str], Rewards]:
        """Return answers by the weights of now, their texts and their rewards."""
        engine, home = self._engine, self._home
        assert engine is not None
        assert home is not None
        if self._policy is None:
            self._policy = open_policy(self._config)
        policy = self._policy
        policy.update(engine, home, self._num_taken)
        ends, most = end_tokens(self._tokenizer, home), self._config.rollouts.max_new_tokens

        def draw(texts: Sequence[Sequence[int]], most: int, turn: int, count: int) -> list[Rollout]:
            return policy.draw(
                texts,
                max_new_tokens=most,
                num_samples=count,
                temperature=self._config.rollouts.temperature,
                seed=seed if turn == 0 else draw_seed(seed, turn, 0, 0) >> 33,
                end_tokens=ends,
            )

        rollouts = draw([one.tokens for one in prompts], most, 0, num_samples)
        rows = [prompts[number // num_samples].row for number in range(len(rollouts))]
        returned: list[float | None] = [None] * len(rollouts)
        turns = TurnTokens(self._tokenizer, self._config.data.template_kwargs, ends)
        if self._config.rollouts.environment is not None:
            self._told(lambda environment: environment.begin(rows))
            rollouts, returned = play(
                rollouts,
                lambda answers: self._told(lambda environment: environment.tell(answers)),
                lambda texts, most, turn: draw(texts, most, turn, 1),
                turns,
                most,
            )
        texts = [turns.text(one.tokens) for one in rollouts]
        rewards = self._rewarded(rows, texts, [one.ended for one in rollouts])
        return rollouts, texts, _with_returned(rewards, returned)

    def _told(self, ask: Callable[[EnvironmentFunction], Any]) -> Any:
        """Return what the environment says to rank 0, on all ranks. Raises RewardError on all."""

        def asked() -> dict[str, Any]:
            if (refused := self._start()) is not None:  # an earlier failure may have ended it
                return {"error": refused}
            assert self._environment is not None
            try:
                return {"told": ask(self._environment)}
            except RewardError as error:
                self._environment = None
                return {"error": str(error)}

        said = self._ranks.decide(asked)
        if "error" in said:
            raise RewardError(said["error"])
        return said["told"]

    @property
    def _num_taken(self) -> int:
        """Steps that were taken before this draw: the version of the weights."""
        draws = self._epoch * math.ceil(self.rows.order.size / self._per_draw)
        draws += self._row // self._per_draw
        return draws * self._config.rollouts.iterations

    def _rewarded(
        self, rows: Sequence[Mapping[str, Any]], texts: Sequence[str], ended: Sequence[bool]
    ) -> Rewards:
        """Return the rewards that rank 0 computes, on all ranks. Raises RewardError on all."""

        def compute() -> dict[str, Any]:
            if (refused := self._start()) is not None:  # an earlier failure may have ended them
                return {"error": refused}
            assert self._functions is not None
            try:
                found = self._functions(rows, texts, ended)
            except RewardError as error:
                self._functions = None
                return {"error": str(error)}
            return {"total": list(found.total), "means": dict(found.means)}

        said = self._ranks.decide(compute)
        if "error" in said:
            raise RewardError(said["error"])
        return Rewards(total=tuple(said["total"]), means=said["means"])


def _with_returned(rewards: Rewards, returned: Sequence[float | None]) -> Rewards:
    """Return rewards with those that an environment has returned; without any they stay."""
    if all(one is None for one in returned):
        return rewards
    own = [one or 0.0 for one in returned]
    return Rewards(
        total=tuple(a + b for a, b in zip(rewards.total, own, strict=True)),
        means={**rewards.means, "environment": sum(own) / len(own)},
    )


def _records(
    tokenizer: Any, prompts: Sequence[Prompt], texts: Sequence[str], rewards: Sequence[float]
) -> list[dict[str, Any]]:
    return [
        {"prompt": str(tokenizer.decode(list(one.tokens))), "text": text, "reward": reward}
        for one, text, reward in zip(prompts, texts, rewards, strict=True)
    ]
