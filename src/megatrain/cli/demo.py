"""The demo: a tiny model learns sums and passes every stage that a large model passes.

It needs no network and only reads files that it wrote: a random Llama, a byte tokenizer with a chat
template, and rows of one-digit sums. First the streamed engine is compared with the resident model;
at the end a second run, stopped by a signal and resumed, is compared with the first.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from megatrain.batch import MicroBatch
from megatrain.config import load_config
from megatrain.config.load import write_yaml
from megatrain.disk.checkpoint.manifest import read_manifest
from megatrain.disk.hf.model import load_model
from megatrain.doctor.resident import resident_gradients
from megatrain.engine.engine import Engine
from megatrain.errors import Interrupted
from megatrain.files import make_folder, write_file
from megatrain.memory.kinds import TensorKind
from megatrain.run.interrupts import Interrupts
from megatrain.run.trainer import Trainer

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}<|assistant|>"
    "{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}<|user|>{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
CONFIG = """\
model: {{name_or_path: {model}, dtype: fp32}}
data: {{train: {rows}, eval: 0.05, max_length: 64}}
train: {{steps: {steps}, batch_tokens: 512, micro_batch_tokens: 256}}
optim: {{learning_rate: 3e-3, schedule: cosine, warmup: 0.05}}
memory: {{device: cpu}}
eval: {{every: {every}, samples: 4}}
save: {{dir: {run}}}
log: {{every: 10}}
"""


def write_demo(folder: Path, *, num_steps: int = 120) -> Path:
    """Write model, tokenizer, rows and config into a folder; return the config's path."""
    folder = folder.resolve()  # the config works from anywhere
    make_folder(folder)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
            folder / "model"
        )
    rows = [_row(a, b) for _ in range(8) for a in range(10) for b in range(10)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    write_file(folder / "rows.jsonl", text.encode())
    path = folder / "demo.yaml"
    places = {"model": folder / "model", "rows": folder / "rows.jsonl", "run": folder / "run"}
    written = {name: write_yaml(str(place)) for name, place in places.items()}
    config_text = CONFIG.format(**written, steps=num_steps, every=num_steps // 2)
    write_file(path, config_text.encode())
    return path


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *alphabet))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[^\n]*\n?"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    pad, end, *others = SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=pad, eos_token=end, additional_special_tokens=others
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def streamed_equals_resident(folder: Path) -> int:
    """Compare one step of the engine with the resident model; return the number of equal tensors.

    Raises AssertionError, naming the tensor, at the first bit that differs.
    """
    home = load_model(folder, dtype="fp32")
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 200, (2, 24), generator=generator)
    micro = MicroBatch(input_ids=ids, labels=ids)
    resident = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    (loss,), gradients = resident_gradients(resident, [micro])
    with Engine(home.decoder, home.store) as engine:
        result = engine.step([micro])
    assert result.loss == loss, f"loss: streamed {result.loss}, resident {loss}"
    for name, gradient in gradients.items():
        assert torch.equal(home.store.param(name, TensorKind.GRAD), gradient), f"gradient of {name}"
    return 1 + len(gradients)


def resumed_equals_uninterrupted(config: Path, run: Path, num_steps: int) -> int:
    """Train again, stopped by a signal and resumed; return the number of equal files.

    Raises AssertionError, naming the files, unless both runs end in the same bits.
    """
    stopped = run.with_name("stopped-and-resumed")
    quiet = ["save.every=null", "eval.samples=0", "eval.every=null", f"log.every={num_steps}"]
    settings = load_config(config, [f"save.dir={write_yaml(str(stopped))}", *quiet])
    interruption = threading.Thread(
        target=_signal_when, args=(stopped / "metrics.jsonl", num_steps // 3), daemon=True
    )
    interruption.start()
    with Interrupts() as interrupts, suppress(Interrupted):
        with Trainer(settings, interrupts=interrupts) as trainer:
            trainer.train()
        raise AssertionError("the run was not interrupted")
    with Trainer(settings) as trainer:
        trainer.train(resume_from_checkpoint=True)
    whole, resumed = (read_manifest((path / "last").resolve()).files for path in (run, stopped))
    differing = [name for name in whole if whole[name] != resumed.get(name)]
    assert not differing, f"resumed and uninterrupted differ in {differing}"
    return len(whole)


def _signal_when(metrics: Path, num_lines: int) -> None:
    """Send this process SIGTERM once a run has written so many lines."""
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < num_lines:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def _row(first: int, second: int) -> dict[str, object]:
    return {
        "messages": [
            {"role": "user", "content": f"{first} + {second}"},
            {"role": "assistant", "content": str(first + second)},
        ]
    }
