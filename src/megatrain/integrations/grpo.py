"""GRPO: the engine that trains draws the answers, or a vLLM server that gets its weights.

TRL draws the answers of a step, and scores them, when it prepares its first micro-batch; the others
take theirs from a buffer, by a count of micro-batches. So losses begin one by one here, and
each finds the count that it would have had.

With `use_vllm` the answers come from a plain vLLM server (rewards/vllm.py), which gets the weights
through a folder in memory before the first draw of each step. TRL's own ways, NCCL from parameters
on a CUDA device and vLLM in the same process, need a model on the device. `vllm_mode="server"`
finds the server at its address, `"colocate"` starts one on this host. Its log-probabilities go to
TRL, whose correction for the difference between both implementations stays as it is.

The reference is asked when answers are made, while no step is open. So the engine that trains
computes it too: from a copy of the weights, or under adapters from the model without them.

Laws (proofs/trainers, tests/integrations/test_trl.py)
    1. With the same answers, losses are those of the trainer.
    2. Answers come from the weights after the last step, and a resumed run draws the same.
    3. The reference is the model as it began, whatever was trained or resumed since.
    4. vLLM has the weights after the last step whenever it draws.
"""

from __future__ import annotations

import time
import weakref
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
from megatrain.losses.leaves import TokenOutputSpec
from megatrain.memory.store import clone_weights
from megatrain.rewards.generation import generate
from megatrain.rewards.rollouts import Rollout
from megatrain.rewards.vllm import SHARED_FOLDER, Vllm

_IDLE: Mapping[str, tuple[Any, ...]] = {
    "use_transformers_continuous_batching": (False,),
    "use_transformers_paged": (False, None),
    "top_k": (0, None),
    "min_p": (0.0, None),
    "repetition_penalty": (1.0,),
    "generation_kwargs": (None,),
    "cache_implementation": (None,),
    "vllm_structured_outputs_regex": (None,),
    "vllm_enable_sleep_mode": (False,),
}
"""Arguments of TRL's own generation, and the values at which they do nothing."""


class StreamedGRPO(StreamedTrainer):
    """A GRPOTrainer through the engine."""

    _honored: ClassVar[Mapping[str, Any]] = {
        "model_init_kwargs": None,
        "beta": 0.0,
        "use_vllm": False,
    }
    _step: int

    def __init__(self, *given: Any, **named: Any) -> None:
        self._vllm: Vllm | None = None
        self._vllm_step: int | None = None
        """The step whose weights vLLM has; None: it has none, or others were loaded since."""
        super().__init__(*given, **named)
        self.beta = self.args.beta
        if self.beta:
            self.ref_model = self._as_it_began()
        if self.args.use_vllm:
            self.use_vllm, self.vllm_mode = True, "server"  # of the loss: answers have logprobs
            self._vllm = self._make_vllm()
            weakref.finalize(self, self._vllm.close)

    def _make_vllm(self) -> Vllm:
        args, folder = self.args, self._choices.weights_folder or SHARED_FOLDER
        if args.vllm_mode == "server":
            host = "127.0.0.1" if args.vllm_server_host == "0.0.0.0" else args.vllm_server_host
            url = args.vllm_server_base_url or f"http://{host}:{args.vllm_server_port}"
            return Vllm(url, folder=folder, connect_s=args.vllm_server_timeout)
        dtype = str(self._served[0].home.decoder.model.dtype).removeprefix("torch.")
        words = [
            "--dtype", dtype,
            "--gpu-memory-utilization", str(args.vllm_gpu_memory_utilization),
            "--tensor-parallel-size", str(args.vllm_tensor_parallel_size),
            "--model-impl", args.vllm_model_impl,
        ]  # fmt: skip
        if args.vllm_max_model_length is not None:
            words += ["--max-model-len", str(args.vllm_max_model_length)]
        return Vllm(arguments=words, folder=folder)

    def close(self) -> None:
        if self._vllm is not None:
            self._vllm.close()
        super().close()

    def _as_it_began(self) -> PreTrainedModel:
        """Return the model with the weights that it has now, before the first step."""
        policy, lora = self._served[0], self._choices.lora
        # A run has the reference already; else the model without adapters is one, or a copy.
        if self._choices.opened is None and (lora is None or lora.dora or lora.modules_to_save):
            policy.home = replace(policy.home, reference=clone_weights(policy.home.store))
        reference = Served(
            policy.home,
            lambda: policy.engine,
            trains=False,
            most_tokens=self._settings.micro_batch_tokens,
            is_reference=True,
        )
        wanted = TokenOutputSpec(temperature=self._wanted(self.args).temperature)
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
                f"{', '.join(faults)}: answers are drawn by temperature and top_p alone. "
                "Leave these out, or give a rollout_func that draws them elsewhere."
            )
        if args.use_vllm and given.get("rollout_func") is not None:
            raise ConfigError("use_vllm=True and a rollout_func: both draw. Give one of them.")

    def _wanted(self, args: Any) -> TokenOutputSpec:
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
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        if images:
            raise ConfigError("prompts have images, and answers are drawn to text alone.")
        asked: dict[str, Any] = {
            "max_new_tokens": self.max_completion_length,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": (self.args.seed << 32) + 2 * self.state.global_step + (not self.model.training),
            "eos_token_ids": self.eos_token_ids,
        }
        if self._vllm is None:
            found = generate(self.engine, prompt_ids, **asked)
            return [list(one.tokens) for one in found], None
        found = self._generate_by_vllm(self._vllm, prompt_ids, asked)
        return [list(one.tokens) for one in found], [list(one.logprobs) for one in found]

    def _generate_by_vllm(
        self, vllm: Vllm, prompts: Sequence[Sequence[int]], asked: Mapping[str, Any]
    ) -> list[Rollout]:
        if self._vllm_step != self.state.global_step:
            begun = time.perf_counter()
            self.engine.synchronize()
            self._vllm_step = None
            vllm.load(self._served[0].home)
            self._vllm_step = self.state.global_step
            mode = "train" if self.model.training else "eval"
            self._metrics[mode]["weights_to_vllm_s"].append(time.perf_counter() - begun)
        return vllm.generate(prompts, **asked)

    def _resume(self, checkpoint: str) -> None:
        super()._resume(checkpoint)
        self._vllm_step = None
