"""Training on rewards against TRL's GRPOTrainer: the loss, and the whole loop, in fp32.

    python -m proofs.policy_gradient --json

TRL is an oracle that is not ours, and no dependency: run this in its own environment, which has
`trl` from PyPI beside MegaTrain's requirements. Two parts:

    steps   for each of five names, with and without KL, ten steps of two micro-batches: rollouts
            drawn by `generate`, old log-probabilities that are a little off, so that some ratios
            are clipped. TRL computes loss and gradients by its own `_compute_loss`, with the
            weights that our step began with; then ours takes the step. A loss, a gradient as a
            share of its largest element, and the norm of all as a share of itself may differ by
            1e-5. Each name is also compared at temperature 0.7.
    loops   for each name, 20 steps of `mt.Trainer` on rewards, from prompts to updated weights, and
            20 of GRPOTrainer.train, which is given the answers that ours has drawn, and computes
            rewards, advantages, masks, losses, gradients and updates by itself. Masks must be
            equal, advantages may differ by 1e-5, losses by 1e-4 and norms of gradients by 1e-5 of
            them: where each answer is drawn by the weights that are trained, ratios are 1 and a
            loss says little. With KL each side has a reference of its own, a second model; how far
            it went from it (`kl`) must be ten tolerances at least.

Ends with 1 if anything differs by more.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import megatrain as mt
from proofs.side_by_side import quiet_arguments
from testkit.families import save_tiny
from testkit.runs import write_model

NUM_STEPS, MOST_TOKENS = 10, 12
NAMES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo")
CASES = [
    (name, kl, kl_ratio, temperature)
    for name in NAMES
    for kl, kl_ratio, temperature in (
        (0.0, True, 1.0), (0.1, True, 1.0), (0.1, False, 1.0), (0.1, True, 0.7),
    )
]  # fmt: skip
CLIPS = {"gspo": (0.01, 0.02), "cispo": (0.2, 1.1)}
"""Clips below and above that some ratios reach; (0.1, 0.2) for the others."""
OURS: dict[str, Any] = {
    "grpo": ("grpo", "token"),
    "dr_grpo": ("dr_grpo", "token"),
    "dapo": ("dapo", "token"),
    "gspo": ("grpo", "sequence"),
    "cispo": ("dapo", "cispo"),
}
"""Aggregation and ratio of each name."""
LOOPS = [
    *((name, 1, 0.0, 1.0) for name in NAMES),
    ("grpo", 2, 0.0, 1.0), ("grpo", 2, 0.5, 1.0), ("dapo", 1, 0.5, 1.0), ("grpo", 2, 0.5, 0.7),
]  # fmt: skip
"""Names, steps on the same answers, weights of the KL to the model as it began, temperatures."""
LOOP_STEPS, NUM_PROMPTS, NUM_SAMPLES, RATE = 20, 4, 4, 1e-3
TOLERANCE, LOOP_TOLERANCE, NORM_TOLERANCE = 1e-5, 1e-4, 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        sys.exit("trl is not installed: pip install trl, in its own environment")
    steps = [_kept(compare, case, options.json) for case in CASES]
    loops = [_kept(compare_loops, case, options.json) for case in LOOPS]
    wrong = [one for one in steps if max(one["loss"], one["gradient"], one["norm"]) > TOLERANCE]
    wrong += [
        one
        for one in loops
        if one["loss"] > LOOP_TOLERANCE
        or one["norm"] > NORM_TOLERANCE
        or one["advantage"] > TOLERANCE
        or not one["same_masks"]
        or (one["weight"] > 0 and one["kl"] < 10 * LOOP_TOLERANCE)
    ]
    if options.json:
        found = {"cases": len(steps) + len(loops), "wrong": len(wrong)}
        worst = {name: max(one[name] for one in steps) for name in ("loss", "gradient", "norm")}
        for name in ("loss", "norm", "advantage"):
            worst[f"loop_{name}"] = max(one[name] for one in loops)
        print(json.dumps(found | worst | {"steps": steps, "loops": loops}))
    sys.exit(bool(wrong))


def _kept(measure: Callable[..., dict[str, Any]], case: Sequence[Any], quiet: bool) -> Any:
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        found = measure(Path(folder), *case)
    if not quiet:
        print(found, flush=True)
    return found


def compare(
    folder: Path,
    name: str,
    kl: float,
    kl_ratio: bool,
    temperature: float,
    *,
    loss_temperature: float | None = None,
) -> dict[str, Any]:
    """Return the largest differences of a case over all steps.

    With `loss_temperature` our loss has another than the answers and TRL: the comparison must show.
    """
    save_tiny(folder / "model", "llama")
    trainer = _their_trainer(folder, name, kl, kl_ratio, temperature)
    home = mt.load_model(folder / "model", dtype="fp32")
    clip, high = CLIPS.get(name, (0.1, 0.2))
    loss = mt.PolicyGradient(
        clip=clip,
        clip_high=high,
        kl=kl,
        kl_ratio=kl_ratio,
        aggregation=OURS[name][0],
        max_tokens=MOST_TOKENS if name == "dr_grpo" else None,
        ratio=OURS[name][1],
        temperature=loss_temperature or temperature,
    )
    found: dict[str, Any] = {"name": name, "kl": kl, "kl_ratio": kl_ratio}
    found |= {"temperature": temperature, "steps": 0, "clipped": 0.0}
    worst_loss = worst_gradient = worst_norm = 0.0
    optimizer = mt.AdamW(learning_rate=1e-3)
    names = [param.name for param in home.decoder.params]
    with mt.Engine(home.decoder, home.store, optimizer=optimizer, loss=loss) as engine:
        for step in range(NUM_STEPS):
            batch = _rollouts(engine, step, kl, temperature)
            their_loss, theirs = _their_step(trainer, home, batch)
            result = engine.step(batch)
            ours = {name: home.store.param(name, mt.Kind.GRAD) for name in names}
            worst_loss = max(worst_loss, abs(result.loss - their_loss))
            worst_gradient = max(worst_gradient, *(_apart(ours[n], theirs[n]) for n in names))
            norm = float(torch.stack([theirs[n].norm() for n in names]).norm())
            assert result.grad_norm is not None
            worst_norm = max(worst_norm, abs(result.grad_norm - norm) / norm)
            found["steps"] += 1
            found["clipped"] = max(found["clipped"], result.figures["clip_fraction"])
    return found | {"loss": worst_loss, "gradient": worst_gradient, "norm": worst_norm}


def _rollouts(engine: mt.Engine, step: int, kl: float, temperature: float) -> list[mt.MicroBatch]:
    """Return two micro-batches of four rows; prompts are equally long, as TRL pads them left."""
    draw = torch.Generator().manual_seed(step)
    prompts = torch.randint(3, 300, (4, 5), generator=draw).tolist()
    ends = range(3, 40)
    rollouts = mt.generate(
        engine,
        prompts,
        max_new_tokens=MOST_TOKENS,
        num_samples=2,
        temperature=temperature,
        seed=step,
        end_tokens=ends,
    )
    advantages = torch.randn(8, generator=draw).tolist()
    batch: list[mt.MicroBatch] = []
    for half in (slice(4), slice(4, 8)):
        (micro,) = mt.rollout_batch(rollouts[half], advantages[half])
        shape = micro.labels.shape
        old = micro.extra["old_logprobs"] + 0.15 * torch.randn(shape, generator=draw)
        micro = micro.with_extra(old_logprobs=old.clamp(max=0.0))
        if kl:
            reference = micro.extra["old_logprobs"] - torch.rand(shape, generator=draw)
            micro = micro.with_extra(reference=reference)
        batch.append(micro)
    return batch


def _their_trainer(folder: Path, name: str, kl: float, kl_ratio: bool, temperature: float) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    from megatrain.cli.demo import byte_tokenizer

    tokenizer: PreTrainedTokenizerFast = byte_tokenizer()
    low, high = CLIPS.get(name, (0.1, 0.2))
    settings = GRPOConfig(
        **quiet_arguments(folder / "theirs"),
        loss_type="grpo" if name == "gspo" else name,
        importance_sampling_level="sequence" if name == "gspo" else "token",
        beta=kl,
        use_bias_correction_kl=kl_ratio,
        temperature=temperature,
        epsilon=low,
        epsilon_high=high,
        max_completion_length=MOST_TOKENS,
        num_generations=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 8),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.train()
    return trainer


def _their_step(
    trainer: Any, home: mt.HostModel, batch: Sequence[mt.MicroBatch]
) -> tuple[float, dict[str, Tensor]]:
    """Return TRL's loss and gradients with the weights that are at home now."""
    model = trainer.model
    with torch.no_grad():
        for param in home.decoder.params:
            model.get_parameter(param.name).copy_(home.store.param(param.name, mt.Kind.HI))
    model.zero_grad(set_to_none=True)
    num_items = torch.tensor(float(sum(micro.num_trained for micro in batch)))
    total = 0.0
    for micro in batch:
        begin = 5
        mask = micro.attention_mask
        mask = torch.ones_like(micro.input_ids) if mask is None else mask
        inputs = {
            "prompt_ids": micro.input_ids[:, :begin],
            "prompt_mask": mask[:, :begin],
            "completion_ids": micro.input_ids[:, begin:],
            "completion_mask": mask[:, begin:],
            "advantages": micro.extra["advantages"][:, begin - 1],
            "old_per_token_logps": micro.extra["old_logprobs"][:, begin - 1 : -1],
            "num_items_in_batch": num_items,
        }
        if "reference" in micro.extra:
            inputs["ref_per_token_logps"] = micro.extra["reference"][:, begin - 1 : -1]
        loss = trainer._compute_loss(model, inputs)
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total, {name: param.grad for name, param in model.named_parameters()}


REWARD = """
def letters(rows, texts):
    return [len(set(text)) / 8 + text.count(row["prompt"][0]) for row, text in zip(rows, texts)]
"""


def compare_loops(
    folder: Path, name: str, iterations: int, kl: float, temperature: float
) -> dict[str, Any]:
    """Return how far the losses of both loops are apart, given the same answers."""
    write_model(folder / "model", 0.0)
    rows = [{"prompt": f"{n} + {n * 7 % 13}"} for n in range(32)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    draws: list[tuple[list[mt.Rollout], list[float], list[str]]] = []
    how = (name, iterations, kl, temperature)
    ours, farthest = _our_loop(folder, *how, draws)
    theirs, advantages, masks = _their_loop(folder, *how, draws)
    assert len(ours) == len(theirs) == LOOP_STEPS
    losses = [(mine[0], found[0]) for mine, found in zip(ours, theirs, strict=True)]
    norms = [(mine[1], found[1]) for mine, found in zip(ours, theirs, strict=True)]
    scaled = name != "dr_grpo"
    own = [mt.group_advantages(given, NUM_SAMPLES, scaled=scaled) for _, given, _ in draws]
    return {
        "name": name,
        "iterations": iterations,
        "weight": kl,
        "temperature": temperature,
        "kl": farthest,
        "steps": len(ours),
        "loss": max(abs(a - b) for a, b in losses),
        "largest_loss": max(abs(found) for _, found in losses),
        "norm": max(abs(a - b) / b for a, b in norms),
        "reward": [sum(given) / len(given) for _, given, _ in (draws[0], draws[-1])],
        "advantage": max(
            abs(a - b)
            for mine, found in zip(own, advantages, strict=True)
            for a, b in zip(mine, found, strict=True)
        ),
        "same_masks": masks == [[len(one.tokens) for one in rollouts] for rollouts, _, _ in draws],
    }


def _our_loop(
    folder: Path, name: str, iterations: int, kl: float, temperature: float, draws: list[Any]
) -> tuple[list[tuple[float, float]], float]:
    """Train a run on rewards; note its draws, and return losses, norms of gradients, largest KL."""
    train = {"steps": LOOP_STEPS, "batch_rows": NUM_PROMPTS, "max_grad_norm": 1.0}
    config = mt.Config(
        model={"name_or_path": str(folder / "model"), "dtype": "fp32"},
        data={"train": str(folder / "rows.jsonl"), "max_length": 64, "shuffle": False},
        loss={"name": name, "kl": kl or None},
        rewards=f"{folder / 'reward.py'}:letters",
        rollouts={
            "samples": NUM_SAMPLES,
            "max_new_tokens": MOST_TOKENS,
            "iterations": iterations,
            "temperature": temperature,
        },
        train=train,
        optim={
            "learning_rate": RATE,
            "betas": (0.9, 0.999),
            "schedule": "constant",
            "warmup": 0,
        },
        eval={"samples": 0},
        memory={"device": "cpu"},
        save={"dir": str(folder / "run"), "every": None},
    )
    with mt.Trainer(config) as trainer:
        data: Any = trainer.data
        answered = data._answered

        def noted(*asked: Any) -> Any:
            rollouts, texts, rewards = answered(*asked)
            draws.append((rollouts, list(rewards.total), texts))
            return rollouts, texts, rewards

        data._answered = noted
        trainer.train()
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "loss" in line]
    farthest = max(line.get("kl", 0.0) for line in steps)
    return [(line["loss"], line["grad_norm"]) for line in steps], farthest


def _their_loop(
    folder: Path, name: str, iterations: int, kl: float, temperature: float, draws: Sequence[Any]
) -> tuple[list[tuple[float, float]], list[list[float]], list[list[int]]]:
    """Return losses and norms of GRPOTrainer, and advantages and lengths of masks of each draw."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    usual = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (0.2, 5.0)}
    low, high = usual.get(name, (0.2, 0.2))
    settings = GRPOConfig(
        **quiet_arguments(folder / "theirs"),
        loss_type="grpo" if name == "gspo" else name,
        importance_sampling_level="sequence" if name == "gspo" else "token",
        scale_rewards="none" if name == "dr_grpo" else "group",
        beta=kl,
        use_bias_correction_kl=True,
        temperature=temperature,
        epsilon=low,
        epsilon_high=high,
        max_completion_length=MOST_TOKENS,
        num_generations=NUM_SAMPLES,
        num_iterations=iterations,
        per_device_train_batch_size=NUM_PROMPTS * NUM_SAMPLES,
        gradient_accumulation_steps=1,
        max_steps=LOOP_STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        weight_decay=0.0,
        max_grad_norm=1.0,
    )
    (folder / "given.py").write_text(REWARD)
    scope = runpy.run_path(str(folder / "given.py"))
    prompts = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]

    def reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        return list(scope["letters"]([{"prompt": one} for one in prompts], completions))

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    losses: list[float] = []
    advantages: list[list[float]] = []
    masks: list[list[int]] = []
    waiting = iter(draws)
    score, compute = trainer._generate_and_score_completions, trainer._compute_loss

    def generate(_: Any) -> Any:
        rollouts, _, texts = next(waiting)
        asked = [list(one.prompt) for one in rollouts]
        answers = [list(one.tokens) for one in rollouts]
        return asked, answers, None, texts, None, {}, None, None

    def scored(inputs: Any) -> Any:
        rollouts = draws[len(advantages)][0]
        for number, row in enumerate(inputs):  # the prompts that the answers are to
            row["prompt"] = _prompt_of(trainer.processing_class, rollouts[number].prompt)
        found = score(inputs)
        advantages.append(found["advantages"].tolist())
        masks.append(found["completion_mask"].sum(1).tolist())
        return found

    def computed(model: Any, inputs: Any) -> Tensor:
        loss: Tensor = compute(model, inputs)
        losses.append(float(loss.detach()))
        return loss

    trainer._generate, trainer._generate_and_score_completions = generate, scored
    trainer._compute_loss = computed
    trainer.train()
    norms = [float(line["grad_norm"]) for line in trainer.state.log_history if "grad_norm" in line]
    return list(zip(losses, norms, strict=True)), advantages, masks


def _prompt_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the text of a row's prompt: that of the user's turn."""
    text = str(tokenizer.decode(list(tokens)))
    return str(next(part for part in re.findall(r"\d+ \+ \d+", text)))


def _apart(found: Tensor, expected: Tensor) -> float:
    largest = float(expected.abs().max())
    return float((found.view(expected.shape) - expected).abs().max()) / (largest or 1.0)


if __name__ == "__main__":
    main()
