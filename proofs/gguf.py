"""A GGUF of an export, run by llama.cpp: its greedy tokens against transformers' `generate`.

    python -m proofs.gguf llama.cpp --json
    python -m proofs.gguf llama.cpp --spoiled --json     (must end with 1)

`llama.cpp` is a clone of its repository. Run this in an environment of its own that has `xllamacpp`
(llama.cpp as a wheel), `sentencepiece` and `protobuf` from PyPI beside MegaTrain's requirements. No
network is asked.

Two tiny random models, in the shapes of Llama and Qwen3, are trained for a few steps on chats,
written in fp32 by `megatrain export` as a folder and with --gguf as a file, and served by
llama.cpp. Ends with 1 if llama.cpp writes the chat template otherwise, reads other tokens (of
Llama), or continues them by other greedy tokens. `--spoiled` swaps two rows of one matrix of the
folder before the file is made of it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from megatrain.cli.exporting import export_gguf, export_model
from megatrain.cli.gguf import VARIABLE
from megatrain.config import Config
from megatrain.run.trainer import Trainer

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
PLACES = ("the lamp", "a gull", "the sea", "some rope", "an old boat", "the north wind")
VERBS = ("sees", "keeps", "paints", "mends", "hears", "forgets")
LONGEST = 32


def sentences() -> Iterator[str]:
    for one in PLACES:
        for verb in VERBS:
            for other in PLACES:
                yield f"{one} {verb} {other}."


def write_tokenizer(folder: Path) -> Any:
    """Train a SentencePiece model, and return it as transformers reads it."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences(), model_writer=model, model_type="bpe", vocab_size=400,
        byte_fallback=True, add_dummy_prefix=False, control_symbols=list(ROLES),
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    settings = {
        "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>",
        "unk_token": "<unk>", "pad_token": "<unk>", "add_bos_token": False,
        "add_eos_token": False, "add_prefix_space": False, "chat_template": TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def configs(vocab_size: int) -> dict[str, PreTrainedConfig]:
    shape = {
        "vocab_size": vocab_size, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 256, "initializer_range": 0.2, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    return {"llama": LlamaConfig(**shape), "qwen3": Qwen3Config(**shape)}


def trained(folder: Path, config: PreTrainedConfig) -> Path:
    """Train a new model on chats for a few steps; return its export."""
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    rows = [
        {"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": other}]}
        for one, other in zip(sentences(), reversed(list(sentences())), strict=True)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = Config.model_validate(
        {
            "model": {"name_or_path": str(folder / "model"), "dtype": "fp32"},
            "data": {"train": str(folder / "rows.jsonl"), "max_length": 128},
            "train": {"steps": 6, "batch_tokens": 512},
            "optim": {"learning_rate": 1e-3},
            "memory": {"device": "cpu"},
            "save": {"dir": str(folder / "run")},
        }
    )
    with Trainer(settings) as trainer:
        trainer.train()
    export_model(folder / "run", folder / "export", dtype="fp32")
    return folder / "export"


def spoil(export: Path) -> None:
    """Swap the first two rows of one matrix."""
    (path,) = export.glob("*.safetensors")
    tensors = load_file(path)
    weight = tensors["model.layers.1.mlp.gate_proj.weight"]
    weight[[0, 1]] = weight[[1, 0]]
    save_file(tensors, path, metadata={"format": "pt"})


@contextmanager
def served(gguf: Path) -> Iterator[str]:
    """Serve a file by llama.cpp with keys and values in fp32; yield the address."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_ctx = 256
    params.n_parallel = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    disabled = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.flash_attn_type = disabled
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup = False
    server = xllamacpp.Server(params)
    yield server.listening_address
    del server


def asked(address: str, path: str, **body: Any) -> Any:
    data = json.dumps(body).encode()
    request = Request(f"{address}/{path}", data, {"Content-Type": "application/json"})
    with urlopen(request) as response:
        return json.load(response)


class Pair:
    """An export in transformers, and its GGUF in llama.cpp."""

    def __init__(self, export: Path, address: str, *, reads_prompts: bool) -> None:
        self._reads_prompts = reads_prompts
        self._tokenizer = AutoTokenizer.from_pretrained(export)
        self._model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
        self._address = address

    def greedy(self, ids: list[int]) -> list[int]:
        """Return the answer of transformers, with its end token if one came."""
        prompt = torch.tensor([ids])
        made = self._model.generate(prompt, max_new_tokens=LONGEST, do_sample=False)
        new: list[int] = made[0, len(ids) :].tolist()
        return new

    def compared(self, message: str) -> tuple[list[int], list[str]]:
        """Return the answer to a message, and what llama.cpp does otherwise."""
        turns = [{"role": "user", "content": message}]
        text = self._tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True
        )
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        answer = self.greedy(ids)
        written = asked(self._address, "apply-template", messages=turns)["prompt"]
        read = asked(
            self._address, "tokenize", content=text, add_special=False, parse_special=True
        )["tokens"]
        made = asked(
            self._address, "completion", prompt=ids, n_predict=LONGEST, temperature=0,
            return_tokens=True, cache_prompt=False,
        )["tokens"]  # fmt: skip
        pairs = {"template": (written, text), "answer": (made, answer)}
        if self._reads_prompts:
            pairs["prompt"] = (read, ids)
        faults = [
            f"{message} {what}: {theirs!r} by llama.cpp, {ours!r} by transformers"
            for what, (theirs, ours) in pairs.items()
            if theirs != ours
        ]
        return answer, faults


def prove(name: str, folder: Path, config: PreTrainedConfig, *, spoils: bool) -> dict[str, Any]:
    export = trained(folder, config)
    source, gguf = export, folder / "model.gguf"
    if spoils:
        source = folder / "spoiled"
        shutil.copytree(export, source)
        spoil(source)
    export_gguf(source, gguf, dtype="fp32")
    messages = list(sentences())[::12]
    with served(gguf) as address:
        # The converter drops `add_prefix_space` of a Qwen, whose own tokenizers are byte-level.
        pair = Pair(export, address, reads_prompts=name == "llama")
        found = [pair.compared(message) for message in messages]
    faults = [fault for _, each in found for fault in each]
    answers = [answer for answer, _ in found]
    num_different = len({tuple(answer) for answer in answers})
    if num_different < 5:
        faults.append("the answers are all alike")
    return {
        "model": name, "prompts": len(messages), "tokens": sum(map(len, answers)),
        "different_answers": num_different, "faults": len(faults), "first": faults[:3],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("llama_cpp", type=Path, help="a clone of llama.cpp's repository")
    parser.add_argument("--spoiled", action="store_true", help="spoil the export; must end with 1")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", VARIABLE: str(options.llama_cpp.resolve())}
    torch.set_num_threads(1)
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="megatrain-gguf-") as path,
        redirect_stdout(sys.stderr),
    ):
        for name in ("llama", "qwen3"):
            folder = Path(path) / name
            tokenizer = write_tokenizer(folder / "model")
            config = configs(len(tokenizer))[name]
            found.append(prove(name, folder, config, spoils=options.spoiled))
    passed = not any(one["faults"] for one in found)
    if options.json:
        print(json.dumps({"passed": passed, "models": found}))
    else:
        print(*found, f"passed: {passed}", sep="\n")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
