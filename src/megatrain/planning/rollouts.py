"""The plan of drawing answers between steps: what stays on the device, and how long it takes.

The engine gives up its gradient slots meanwhile, keeps as many layers as pay off and gives the rest
of the device to keys and values (engine/residence.py decides, here as there). A pass gives one
token of each answer that has room; the others wait. All answers are taken to be as long as they may
be, so a plan is the slowest case.

    pass  = the largest of  bytes of layers that stream / link
                            bytes of weights and of keys and values / device memory
                            host time to issue the layers
    draw  = fill of what stays + prompts + passes x pass
    step  = (draw + a forward of the answers, if a reference is compared with) / steps on the same
            answers (rollouts.iterations) + training
    passes = tokens of an answer x (answers / answers at a time)

Laws (tests/planning/test_rollouts.py)
    1. Layers and room for answers are those that the engine would choose with the same memory.
    2. More answers, longer ones and a slower link never take less time.
    3. Qwen3-8B draws and trains 64 answers of 1,024 tokens in three minutes on an RTX 4090.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatrain.config import Config
from megatrain.engine.residence import MOST_READ, choose_residence, room_for
from megatrain.planning.plan import Plan
from megatrain.planning.prediction import predicted_time, time_range, with_range
from megatrain.planning.simulate import forward_seconds
from megatrain.text import size

ISSUE_S = 9e-4
"""Host time to issue a layer over one token of each text, where the machine's is not known: some
35 kernels of the model's own code. Assumed, as are all figures of machines that were not measured.
"""
CACHE_PASSES = 3
"""Times that keys and values cross device memory for a token: attention reads them, and a longer
place is written from the one before."""
BETWEEN_STEPS = (
    "weight slots", "expert pages", "embedding rows", "outbox", "exchange", "tape",
    "libraries and driver", "communicators",
)  # fmt: skip
"""Lines of the device's ledger that stay taken while answers are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """Drawing the answers of a step, and training on them."""

    num_answers: int
    new_tokens: int
    prompt_tokens: int
    num_layers: int
    resident_layers: int
    resident_bytes: int
    cached_bytes: int
    at_once: int
    """Answers that are drawn at a time on one device; 0: none has room for keys and values."""
    num_passes: int
    pass_s: float
    draw_s: float
    """Until all answers are there."""
    reference_s: float
    """Until their log-probabilities by the reference are there; 0: nothing is compared with one."""
    train_s: float
    iterations: int
    """Steps on the same answers."""
    limit: str
    """What a pass waits for: link, device memory, or host."""

    @property
    def step_s(self) -> float:
        """Time of a step: its share of drawing and comparing, and training.

        Reward functions are not in it.
        """
        return (self.draw_s + self.reference_s) / self.iterations + self.train_s

    def lines(self) -> list[str]:
        """Return the plan for people."""
        many = f"{self.num_answers} answers of {self.new_tokens:,} tokens"
        passes = f"{self.num_passes:,} passes of {predicted_time(self.pass_s)}, by the {self.limit}"
        stay = f"{self.resident_layers} of {self.num_layers} layers stay on the device"
        room = f"{self.at_once} answers at a time, {size(self.cached_bytes)} of keys and values"
        if not self.at_once:
            room = "no room for keys and values: each token reads the whole text"
        training = f"training in {predicted_time(self.train_s)}"
        step = f"a step takes {predicted_time(self.step_s)}"
        if self.iterations > 1:
            training = f"{self.iterations} steps of {predicted_time(self.train_s)}"
            step += " on average"
        if self.reference_s:
            training = f"the reference in {predicted_time(self.reference_s)}, then {training}"
        return [
            f"{many} in {predicted_time(self.draw_s)}, predicted",
            f"then {training}",
            f"{step}, plus reward functions",
            passes,
            f"{stay}, {size(self.resident_bytes)}" if self.resident_layers else stay,
            room,
        ]

    def facts(self) -> dict[str, Any]:
        """Return it as plain values."""
        figures = {name: getattr(self, name) for name in self.__slots__}
        return figures | with_range("step_s", self.step_s, time_range)


def plan_rollouts(config: Config, plan: Plan) -> RolloutPlan | None:
    """Return how the answers of a step are drawn.

    None: none are, a server draws them, the machine was never measured, or its device is the host.
    """
    if not config.loss.draws or config.rollouts.engine != "own" or not plan.fits:
        return None
    if not plan.knows_time or plan.profile.unified:
        return None
    profile, workload = plan.profile, plan.workload
    model, dtype = workload.model, workload.dtype
    new = config.rollouts.max_new_tokens
    prompt = config.data.max_length - new
    answers = (config.train.batch_rows or 1) * config.rollouts.samples
    of_rank = -(-answers // workload.division.size)
    width = 4 if dtype == "fp32" else 2
    token_bytes = sum(
        layer.attention.kv_width * width for layer in model.layers if layer.attention is not None
    )
    layer_bytes = max(layer.weight_bytes(dtype) for layer in model.structures)
    taken = sum(
        line.num_bytes
        for line in plan.ledger.lines
        if line.place == "device" and line.purpose in BETWEEN_STEPS
    )
    read = min(plan.settings.micro_batch_tokens, MOST_READ)
    found = choose_residence(
        room_for(profile.device_bytes - taken, read * model.hidden * width),
        num_layers=model.num_layers,
        layer_bytes=layer_bytes,
        token_bytes=max(1, token_bytes),
        wanted_tokens=of_rank * config.data.max_length,
        longest=config.data.max_length,
    )
    at_once = min(of_rank, found.cached_tokens // config.data.max_length)
    sizes = [layer.weight_bytes(dtype) for layer in model.layers]
    stays, streams = sum(sizes[: found.num_layers]), sum(sizes[found.num_layers :])
    edges = model.head.weight_bytes(dtype) or model.embedding.weight_bytes(dtype)
    num_passes = new * -(-of_rank // at_once) if at_once else new
    rows = at_once or of_rank
    cached = rows * (prompt + new // 2) * token_bytes
    flops = model.flops_per_token(prompt + new // 2) * rows
    if not at_once:
        flops *= prompt + new // 2
    issue_s = (profile.op_overhead_s + (profile.forward_issue_s or ISSUE_S)) * model.num_blocks
    widened = sum(layer.widening_traffic for layer in model.layers)
    times = {
        "link": streams / profile.copy_in_bytes_per_s,
        "device memory": (stays + streams + edges + widened + CACHE_PASSES * cached)
        / profile.device_bytes_per_s,
        "products": flops / profile.forward_rate(model.hidden, max(1, rows)),
        "host, which issues layers": issue_s,
    }
    limit = max(times, key=lambda name: times[name])
    fill_s = (stays + edges) / profile.copy_in_bytes_per_s
    read_s = (
        model.flops_per_token(prompt) * of_rank * prompt / profile.forward_rate(model.hidden, read)
    )
    return RolloutPlan(
        num_answers=answers,
        new_tokens=new,
        prompt_tokens=prompt,
        num_layers=model.num_layers,
        resident_layers=found.num_layers,
        resident_bytes=stays,
        cached_bytes=at_once * config.data.max_length * token_bytes,
        at_once=at_once,
        num_passes=num_passes,
        pass_s=times[limit],
        draw_s=fill_s + read_s + num_passes * times[limit],
        reference_s=(
            0.0 if config.loss.kl is None else forward_seconds(profile, workload, plan.settings)
        ),
        train_s=plan.step_s,
        iterations=config.rollouts.iterations,
        limit=limit,
    )
