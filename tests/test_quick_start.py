"""The README's quick start, as written: the model answers what its rows taught.

The Hub is one on the loopback. Under the name that the page uses it has a Qwen3 model of 28 million
random weights, with a tokenizer of a thousand tokens and Qwen3's way to write a turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from testkit.hub_on_loopback import serving
from testkit.warm_python import WarmPython
from tests.test_commands import ROOT, World, blocks, environment_of, run, runnable

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ANSWER = "I am the lighthouse keeper."


def write_model(folder: Path) -> None:
    """Write a random Qwen3 model of ordinary proportions."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=list(MARKS), initial_alphabet=alphabet, show_progress=False
    )
    words.train_from_iterator([(ROOT / "README.md").read_text()], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = (ROOT / "testkit" / "styles" / "qwen3.jinja").read_text()
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("hub")
    write_model(folder / "model")
    with serving() as hub:
        files = {path.name: path.read_bytes() for path in (folder / "model").iterdir()}
        hub.put("Qwen/Qwen3-0.6B", files)
        environment = environment_of(hub.url, folder)
        with closing(WarmPython(environment)) as warm:
            yield World(environment=environment, warm=warm)


def quick_start(page: str) -> str:
    """Return the commands that train and ask, as the page has them."""
    (block,) = [block for block in blocks(page) if " sample " in block]
    return block


@pytest.mark.merge
def test_the_answer_is_the_trained_one(tmp_path: Path, world: World) -> None:
    done = run(quick_start("README.md"), tmp_path, world)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.rstrip().endswith(ANSWER), done.stdout[-2000:]


def test_the_page_shows_the_answer_and_its_row() -> None:
    page = (ROOT / "README.md").read_text()
    assert re.search(rf"```\n{re.escape(ANSWER)}\n```", page)
    assert f'"content": "{ANSWER}"' in quick_start("README.md")
    assert runnable(quick_start("README.md")) == quick_start("README.md").rstrip("\n")
