"""Real text that comes with every Python, and a small model that has learned one part of it.

The first MiB of the standard library's sources (benchmarks/states.py) teaches a model. It is then
fine-tuned on the language reference that `help()` shows (`pydoc_data.topics`). A paragraph of
several topics is taken once, so that held-out text was never trained. Everything follows from the
Python that runs: the same version makes the same tokens and the same model.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, Qwen3Config

import megatrain as mt
from benchmarks.states import sources
from megatrain.memory.kinds import store_kinds
from megatrain.optim.learning_rate import LRSchedule

VOCABULARY, SEQUENCE = 2048, 64
HELD_OUT_SHARE, PRETRAINING_BYTES = 0.1, 1 << 20
RATE, BATCH = 2e-3, 8
"""Of learning the sources."""
MODEL: dict[str, Any] = {
    "hidden_size": 192, "num_hidden_layers": 4, "head_dim": 64,
    "vocab_size": VOCABULARY, "max_position_embeddings": SEQUENCE,
}  # fmt: skip
"""2.1M parameters, 0.4M of them in the tied embedding."""

Rows = NDArray[np.int64]
"""(rows, SEQUENCE); those of a step are (steps, rows, SEQUENCE)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """What is learned first, then fine-tuned on, and never trained."""

    pretraining: str
    training: str
    held_out: str

    @property
    def digest(self) -> str:
        """Of all three: equal where the same Python ships the same text."""
        parts = "\0".join((self.pretraining, self.training, self.held_out))
        return hashlib.sha256(parts.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The same three as rows, in the order in which they are trained."""

    pretraining: Rows
    training: Rows
    held_out: Rows


def read_text() -> Text:
    """Return the text of this Python."""
    reference = without_repeats(topics)
    cut = round(len(reference) * (1 - HELD_OUT_SHARE))
    return Text(
        pretraining=sources()[0][:PRETRAINING_BYTES].numpy().tobytes().decode(errors="replace"),
        training="\n\n".join(reference[:cut]),
        held_out="\n\n".join(reference[cut:]),
    )


def without_repeats(texts: Mapping[str, str]) -> list[str]:
    """Return the paragraphs of texts in the order of their names; white space makes no other."""
    found: dict[str, str] = {}
    for name in sorted(texts):
        for paragraph in texts[name].split("\n\n"):
            found.setdefault(" ".join(paragraph.split()), paragraph.strip("\n"))
    return list(found.values())


def train_tokenizer(text: Text, vocabulary: int = VOCABULARY) -> Tokenizer:
    """Return a byte-level BPE that has not seen the held-out text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text.pretraining, text.training], trainer)
    return tokenizer


def tokenize(text: Text, tokenizer: Tokenizer) -> Tokens:
    """Return each part cut into rows; all but the held-out ones in a seeded random order."""
    generator = np.random.default_rng(0)

    def rows(part: str) -> Rows:
        ids = np.array(tokenizer.encode(part).ids, dtype=np.int64)
        return ids[: len(ids) // SEQUENCE * SEQUENCE].reshape(-1, SEQUENCE)

    return Tokens(
        pretraining=generator.permutation(rows(text.pretraining)),
        training=generator.permutation(rows(text.training)),
        held_out=rows(text.held_out),
    )


def pretrain(folder: Path, rows: Rows, config: Qwen3Config, num_steps: int) -> float:
    """Write a model that has learned from these rows, in bf16; return the loss of its last step."""
    schedule = LRSchedule(peak=RATE, shape="linear", num_steps=num_steps, warmup=0.1)
    adamw, loss = mt.AdamW(learning_rate=schedule.rate), float("nan")
    kinds, settings = (
        store_kinds(adamw.states, waits=False),
        mt.StepSettings(update="in_backward", kept_layers=config.num_hidden_layers),
    )
    with tempfile.TemporaryDirectory() as scratch:
        new, trained = Path(scratch, "new"), Path(scratch, "trained")
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(new)
        home = mt.load_model(new, dtype="fp32", kinds=kinds)
        with mt.Engine(home.decoder, home.store, optimizer=adamw, settings=settings) as engine:
            for batch in steps_of(rows, num_steps, BATCH):
                ids = torch.from_numpy(batch)
                loss = engine.step([mt.MicroBatch(input_ids=ids, labels=ids)]).loss
        home.export(trained)
        AutoModelForCausalLM.from_pretrained(trained, dtype=torch.bfloat16).save_pretrained(folder)
    return loss


def steps_of(rows: Rows, num_steps: int, batch: int) -> Rows:
    """Return (steps, batch, SEQUENCE): the rows in turn, from the first again after the last."""
    return rows[np.arange(num_steps * batch) % len(rows)].reshape(num_steps, batch, -1)
