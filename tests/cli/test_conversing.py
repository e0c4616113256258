"""A conversation with a model, as a user types it: in a pipe and in a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from typer.testing import CliRunner, Result

from megatrain.cli.app import app
from megatrain.cli.demo import byte_tokenizer
from megatrain.errors import DataError
from megatrain.text import printable
from testkit.patience import HANG_S, eventually
from testkit.warm_python import warm_python

LONGEST = 6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a model that never ends an answer."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=96,
        tie_word_embeddings=False, initializer_range=0.3, eos_token_id=1, pad_token_id=0,
        bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[:4] = 0  # special tokens are never the likeliest
    model.save_pretrained(tmp_path)
    return tmp_path


def words(folder: Path, *more: str) -> list[str]:
    return ["sample", str(folder), "--device", "cpu", "--max-new-tokens", str(LONGEST), *more]


def piped(folder: Path, text: str, *more: str) -> Result:
    return CliRunner().invoke(app, words(folder, *more), input=text)


def generated(folder: Path, messages: Sequence[str]) -> list[str]:
    """Return the answers of transformers to messages, one after another, as they are printed."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    turns: list[dict[str, str]] = []
    for message in messages:
        turns.append({"role": "user", "content": message})
        text = message
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt").input_ids
        found = model.generate(ids, max_new_tokens=LONGEST, do_sample=False)[0, ids.shape[1] :]
        turns.append({"role": "assistant", "content": tokenizer.decode(found).strip("\n")})
    return [printable(turn["content"]) for turn in turns if turn["role"] == "assistant"]


def test_answers_in_a_pipe_are_those_of_transformers(folder: Path) -> None:
    done = piped(folder, "hi\n\nand so\n")
    first, second = generated(folder, ["hi", "and so"])
    assert done.exit_code == 0
    assert done.stdout == f"{first}\n\n{second}\n\n"
    assert f"[cut after {LONGEST} tokens; --max-new-tokens allows more]" in done.stderr
    (alone,) = generated(folder, ["and so"])
    assert second != alone, "the history changes nothing: the test could not notice its loss"


def test_a_conversation_that_is_too_long_for_the_model_ends_with_an_error(folder: Path) -> None:
    done = piped(folder, "hi\n" + "o" * 90)
    assert done.stdout == f"{generated(folder, ['hi'])[0]}\n\n"
    assert isinstance(done.exception, DataError)
    assert "and the model 96 positions. Begin a new one." in str(done.exception)


def test_a_model_without_a_template_continues_each_message_alone(folder: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    done = piped(folder, "hi\nhi")
    (answer,) = generated(folder, ["hi"])
    assert done.stdout == f"{answer}\n\n{answer}\n\n"
    assert "no chat template: each message is continued alone" in done.stderr


def test_a_message_that_the_template_refuses_ends_with_an_error(folder: Path) -> None:
    path = folder / "chat_template.jinja"
    refusal = "{% if messages|length > 2 %}{{ raise_exception('one turn each') }}{% endif %}"
    path.write_text(refusal + path.read_text())
    done = piped(folder, "hi\nand so\n")
    assert done.stdout == f"{generated(folder, ['hi'])[0]}\n\n"
    assert isinstance(done.exception, DataError)
    assert "refuses the turns: one turn each" in str(done.exception)


@pytest.mark.merge
def test_ctrl_d_ends_a_conversation_in_a_terminal(folder: Path) -> None:
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    process = subprocess.Popen(
        [*warm_python().command, "-m", "megatrain", *words(folder)],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "dumb"},
    )  # fmt: skip
    os.close(theirs)
    text = ""

    def has_come(wanted: str) -> bool:
        nonlocal text
        with suppress(OSError):  # nothing there yet, or no more
            text += os.read(ours, 1 << 16).decode("utf-8", "replace")
        return wanted in text

    try:
        assert eventually(lambda: has_come("Ctrl-D ends the conversation.\r\n> ")), text
        os.write(ours, b"hi\n")
        (answer,) = generated(folder, ["hi"])
        shown = f"{answer}\n\n".replace("\n", "\r\n")
        assert eventually(lambda: has_come(shown) and text.endswith("> ")), text
        os.write(ours, b"\x04")
        assert process.wait(HANG_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert "Traceback" not in text
