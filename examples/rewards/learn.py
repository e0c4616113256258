"""A tiny random model learns a task from reward alone: to write its prompt's letters backwards.

    python examples/rewards/learn.py reverse

Nobody shows it an answer. It draws eight answers to each prompt, `reward` scores them, and the
policy gradient makes those likelier that are better than the mean of the eight. Stop the script at
any time and start it again: it continues from its last checkpoint, and ends with the same bits.
"""

from __future__ import annotations

import argparse
import random
import warnings
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

import megatrain as mt

LETTERS = "abcdefgh"
LENGTH = 3
NUM_PROMPTS = 32
NUM_SAMPLES = 8
"""Answers to each prompt: they are compared with each other."""


def write_model(folder: Path) -> None:
    """Write a random Llama, and a tokenizer whose tokens are letters."""
    vocabulary = {token: number for number, token in enumerate(("<pad>", "<end>", ">", *LETTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<end>"
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=32,
        tie_word_embeddings=False, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder)


def make_prompts(step: int) -> list[str]:
    """Return the prompts of a step: always the same ones."""
    draw = random.Random(step)
    return ["".join(draw.choices(LETTERS, k=LENGTH)) + ">" for _ in range(NUM_PROMPTS)]


def reward(prompt: str, answer: str, *, ended: bool) -> float:
    """Return the share of right letters; 0 for an answer of another length, or without its end."""
    wanted = prompt.removesuffix(">")[::-1]
    if not ended or len(answer) != len(wanted):
        return 0.0
    return sum(given == right for given, right in zip(answer, wanted, strict=True)) / len(wanted)


def train(folder: Path, num_steps: int, save_every: int) -> None:
    """Train until `num_steps` steps are done, those before a stop included."""
    start = folder / "start"
    if not (start / "model.safetensors").exists():
        write_model(start)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(start)
    home = mt.load_model(start, dtype="fp32")
    optimizer = mt.AdamW(learning_rate=1e-3, weight_decay=0.0, max_grad_norm=1.0)
    with mt.Engine(
        home.decoder, home.store, optimizer=optimizer, loss=mt.PolicyGradient()
    ) as engine:
        notes = mt.resume_loop(folder / "checkpoints", home, engine) or {"step": 0}
        for step in range(notes["step"], num_steps):
            prompts = [prompt for prompt in make_prompts(step) for _ in range(NUM_SAMPLES)]
            rollouts = mt.generate(
                engine,
                [tokenizer(prompt)["input_ids"] for prompt in prompts[::NUM_SAMPLES]],
                max_new_tokens=LENGTH + 2,
                num_samples=NUM_SAMPLES,
                seed=step,
            )
            answers = [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in rollouts]
            rewards = [
                reward(prompt, answer, ended=rollout.ended)
                for prompt, answer, rollout in zip(prompts, answers, rollouts, strict=True)
            ]
            result = engine.step(
                mt.rollout_batch(rollouts, mt.group_advantages(rewards, NUM_SAMPLES))
            )
            is_last = step + 1 == num_steps
            if step % 20 == 0 or is_last:
                mean = sum(rewards) / len(rewards)
                sample = f"{prompts[0]}{answers[0]}"
                print(f"step {step:3}  reward {mean:.3f}  norm {result.grad_norm:.2f}  {sample}")
            if (step + 1) % save_every == 0 or is_last:
                mt.save_loop(folder / "checkpoints", home, engine, {"step": step + 1})
    home.export(folder / "model")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="for the model, its checkpoints and the result")
    parser.add_argument("--steps", type=int, default=260)
    parser.add_argument("--save-every", type=int, default=50)
    options = parser.parse_args()
    train(options.folder, options.steps, options.save_every)


if __name__ == "__main__":
    main()
