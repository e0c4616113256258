"""GRPO: answers are drawn by the engine that trains, and the first micro-batch makes them for all.

TRL draws the answers of a step, and scores them, when it prepares its first micro-batch; the others
take theirs from a buffer, by a count of micro-batches. So losses begin one by one here, and
each finds the count that it would have had.

The reference is asked when answers are made, while no step is open. So the engine that trains
computes it too: from a copy of the weights, or under adapters from the model without them.

Laws (proofs/trainers, tests/integrations/test_trl.py)
    1. With the same answers, losses are those of the trainer.
    2. Answers come from the weights after the last step, and a resumed run draws the same.
    3. The reference is the model as it began, whatever was trained or resumed since.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.errors import ConfigError
from megatrain.integrations.stand_in import make_stand_in
from megatrain.integrations.trainer import Served, StreamedTrainer, answer
from megatrain.integrations.turns import take_turns
from megatrain.losses.leaves import Wanted
from megatrain.memory.store import copy_of_weights
from megatrain.rewards.generation import generate

_IDLE: Mapping[str, tuple[Any, ...]] = {
    "use_vllm": (False,),
    "use_transformers_continuous_batching": (False,),
    "use_transformers_paged": (False, None),
    "top_k": (0, None),
    "min_p": (0.0, None),
    "repetition_penalty": (1.0,),
    "generation_kwargs": (None,),
    "cache_implementation": (None,),
}
"""Arguments of TRL's own generation, and the values at which they do nothing."""


class StreamedGRPO(StreamedTrainer):
    """A GRPOTrainer through the engine."""

    _honored: ClassVar[Mapping[str, Any]] = {"model_init_kwargs": None, "beta": 0.0}
    _step: int

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.beta = self.args.beta
        if self.beta:
            self.ref_model = self._as_it_began()

    def _as_it_began(self) -> PreTrainedModel:
        """Return the model with the weights that it has now, before the first step."""
        policy, lora = self._served[0], self._choices.lora
        if lora is None or lora.dora or lora.saved:  # else the model without adapters has them
            policy.home = replace(policy.home, reference=copy_of_weights(policy.home.store))
        reference = Served(
            policy.home,
            lambda: policy.engine,
            trains=False,
            most_tokens=self._settings.micro_batch_tokens,
            is_reference=True,
        )
        wanted = Wanted(temperature=self._wanted(self.args).temperature)
        return make_stand_in(reference, str(policy.home.weights), wanted)

    def _check(self, args: Any, given: Mapping[str, Any]) -> None:
        super()._check(args, given)
        faults = [
            f"{name}={getattr(args, name)!r}"
            for name, idle in _IDLE.items()
            if getattr(args, name, idle[0]) not in idle
        ]
        if faults:
            raise ConfigError(
                f"{', '.join(faults)}: the engine draws the answers, by temperature and top_p. "
                "Leave these out, or give a rollout_func that draws them elsewhere."
            )

    def _wanted(self, args: Any) -> Wanted:
        return replace(self._choices.wanted, temperature=args.temperature)

    def _lose(self, tasks: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        first, begun = self._step, time.perf_counter()

        def count(task: int) -> None:
            self._step = first + task

        found = take_turns(tasks, answer, one_by_one=True, before=count)
        self._step = first + len(tasks)
        times = self._metrics["train"]["step_time"]
        if times:  # TRL has added up those of the losses, which wait for each other
            times[-1] = time.perf_counter() - begun
        return found

    def _get_per_token_logps_and_entropies(self, *given: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            named["batch_size"] = None  # the engine cuts the rows, and passes weights once
            given = given[:4]
        return super()._get_per_token_logps_and_entropies(*given, **named)

    def _generate_single_turn(
        self, prompt_ids: Sequence[Sequence[int]], images: Any, *given: Any, **named: Any
    ) -> tuple[list[list[int]], None]:
        if images:
            raise ConfigError("prompts have images, and the engine draws answers to text alone.")
        found = generate(
            self.engine,
            prompt_ids,
            max_new_tokens=self.max_completion_length,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=(self.args.seed << 32) + 2 * self.state.global_step + (not self.model.training),
            end_tokens=self.eos_token_ids,
        )
        return [list(one.tokens) for one in found], None
