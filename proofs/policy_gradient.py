"""The policy gradient against TRL's GRPOTrainer: loss and gradients of the same rollouts, in fp32.

    python -m proofs.policy_gradient --json

TRL is an oracle that is not ours, and no dependency: run this in its own environment, which has
`trl` from PyPI beside MegaTrain's requirements. For each aggregation, with and without KL, ten
steps of two micro-batches: rollouts drawn by `generate`, old log-probabilities that are a little
off, so that some ratios are clipped. TRL computes loss and gradients by its own `_compute_loss`,
with the weights that our step began with; then ours takes the step. Ends with 1 if a loss, or a
gradient as a share of its largest element, differs by more than 1e-5.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import megatrain as mt
from testkit.families import save_tiny

NUM_STEPS, MOST_TOKENS, CLIP, HIGH = 10, 12, 0.1, 0.2
CASES = [
    (aggregation, kl, kl_ratio)
    for aggregation in ("dapo", "grpo", "dr_grpo")
    for kl, kl_ratio in ((0.0, True), (0.1, True), (0.1, False))
]
TOLERANCE = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        sys.exit("trl is not installed: pip install trl, in its own environment")
    results = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
            results.append(compare(Path(folder), *case))
        if not options.json:
            print(results[-1], flush=True)
    wrong = [one for one in results if max(one["loss"], one["gradient"]) > TOLERANCE]
    if options.json:
        print(json.dumps({"cases": len(results), "wrong": len(wrong), "results": results}))
    sys.exit(bool(wrong))


def compare(folder: Path, aggregation: Any, kl: float, kl_ratio: bool) -> dict[str, Any]:
    """Return the largest differences of a case over all steps."""
    save_tiny(folder / "model", "llama")
    trainer = _their_trainer(folder, aggregation, kl, kl_ratio)
    home = mt.load_model(folder / "model", dtype="fp32")
    loss = mt.PolicyGradient(
        clip=CLIP,
        clip_high=HIGH,
        kl=kl,
        kl_ratio=kl_ratio,
        aggregation=aggregation,
        max_tokens=MOST_TOKENS if aggregation == "dr_grpo" else None,
    )
    found: dict[str, Any] = {"aggregation": aggregation, "kl": kl, "kl_ratio": kl_ratio}
    found |= {"steps": 0, "clipped": 0.0}
    worst_loss = worst_gradient = 0.0
    optimizer = mt.AdamW(learning_rate=1e-3)
    names = [param.name for param in home.decoder.params]
    with mt.Engine(home.decoder, home.store, optimizer=optimizer, loss=loss) as engine:
        for step in range(NUM_STEPS):
            batch = _rollouts(engine, step, kl)
            their_loss, theirs = _their_step(trainer, home, batch)
            result = engine.step(batch)
            ours = {name: home.store.param(name, mt.Kind.GRAD) for name in names}
            worst_loss = max(worst_loss, abs(result.loss - their_loss))
            worst_gradient = max(worst_gradient, *(_apart(ours[n], theirs[n]) for n in names))
            found["steps"] += 1
            found["clipped"] = max(found["clipped"], result.figures["clip_fraction"])
    return found | {"loss": worst_loss, "gradient": worst_gradient}


def _rollouts(engine: mt.Engine, step: int, kl: float) -> list[mt.MicroBatch]:
    """Return two micro-batches of four rows; prompts are equally long, as TRL pads them left."""
    draw = torch.Generator().manual_seed(step)
    prompts = torch.randint(3, 300, (4, 5), generator=draw).tolist()
    ends = range(3, 40)
    rollouts = mt.generate(
        engine, prompts, max_new_tokens=MOST_TOKENS, num_samples=2, seed=step, end_tokens=ends
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


def _their_trainer(folder: Path, aggregation: str, kl: float, kl_ratio: bool) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    from megatrain.cli.demo import byte_tokenizer

    tokenizer: PreTrainedTokenizerFast = byte_tokenizer()
    settings = GRPOConfig(
        output_dir=str(folder / "theirs"),
        loss_type=aggregation,
        beta=kl,
        use_bias_correction_kl=kl_ratio,
        epsilon=CLIP,
        epsilon_high=HIGH,
        max_completion_length=MOST_TOKENS,
        num_generations=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
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


def _apart(found: Tensor, expected: Tensor) -> float:
    largest = float(expected.abs().max())
    return float((found.view(expected.shape) - expected).abs().max()) / (largest or 1.0)


if __name__ == "__main__":
    main()
