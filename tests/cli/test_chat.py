"""The chat, as a user types in it: in a pipe, and in a terminal with its Ctrl-C and Ctrl-D."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import termios
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from megatrain.cli.chat import _Stop
from megatrain.cli.demo import byte_tokenizer
from megatrain.errors import Interrupted
from megatrain.text import printable
from testkit.patience import HANG_S, eventually
from testkit.warm_python import warm_python

LONGEST = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that never end an answer: `one`, `two`, and `plain`, which has no chat template."""
    path = tmp_path_factory.mktemp("chat")
    for seed, name in enumerate(("one", "two", "plain")):
        tokenizer = byte_tokenizer()
        if name == "plain":
            tokenizer.chat_template = None
        tokenizer.save_pretrained(path / name)
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=1 << 20,
            tie_word_embeddings=False, initializer_range=0.3, eos_token_id=1, pad_token_id=0,
            bos_token_id=None,
        )  # fmt: skip
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            model.lm_head.weight[:4] = 0  # special tokens are never the likeliest
        model.save_pretrained(path / name)
    return path


def command(*words: str) -> list[str]:
    return [*warm_python().command, "-m", "megatrain", "chat", *words, "--device", "cpu"]


def piped(folder: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    words = (*words, "--max-new-tokens", str(LONGEST))
    return subprocess.run(
        command(*words), input=text, capture_output=True, text=True, cwd=folder,
        timeout=HANG_S, check=False,
    )  # fmt: skip


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
    done = piped(folder, "hi\n\nand so\n/reset\nhi\n/foo\n", "one")
    first, second = generated(folder / "one", ["hi", "and so"])
    assert done.stdout == f"{first}\n\n{second}\n\n{first}\n"
    assert done.returncode == 0
    assert f"[cut after {LONGEST} tokens: --max-new-tokens]" in done.stderr
    assert "no command /foo" in done.stderr
    (alone,) = generated(folder / "one", ["and so"])
    assert second != alone, "the history changes nothing: the test could not notice its loss"


def test_each_of_several_models_has_its_own_history(folder: Path) -> None:
    done = piped(folder, "hi\nand \\\nso", "one", "--with", "two")
    answers = {name: generated(folder / name, ["hi", "and \nso"]) for name in ("one", "two")}
    said = [f"[{name}]\n{answers[name][turn]}\n" for turn in (0, 1) for name in ("one", "two")]
    assert done.stdout == "".join(said[:2]) + "\n" + "".join(said[2:])


def test_a_model_without_a_template_continues_each_message(folder: Path) -> None:
    done = piped(folder, "hi\nhi", "plain")
    (answer,) = generated(folder / "plain", ["hi"])
    assert done.stdout == f"{answer}\n\n{answer}\n"
    assert "plain has no chat template: it continues each message" in done.stderr
    refused = piped(folder, "hi", "plain", "--system", "be brief")
    assert refused.returncode == 2
    assert "no chat template to hold it" in refused.stderr


def test_a_message_that_cannot_be_answered_ends_a_chat_in_a_pipe(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "one")
    refusal = "{% if messages|length > 2 %}{{ raise_exception('one turn each') }}{% endif %}"
    (folder / "short").mkdir()
    for path in (folder / "one").iterdir():
        (folder / "short" / path.name).write_bytes(path.read_bytes())
    (folder / "short" / "chat_template.jinja").write_text(refusal + tokenizer.chat_template)
    done = piped(folder, "hi\nand so\n/reset\nhi\n", "short")
    (answer,) = generated(folder / "short", ["hi"])
    assert done.stdout == f"{answer}\n\n"
    assert done.returncode == 4
    assert "refuses the turns: one turn each. /reset begins a new conversation" in done.stderr


class Terminal:
    """A pseudo-terminal and the program that it controls: Ctrl-C is a signal there."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        os.set_blocking(self._ours, False)
        self.process = subprocess.Popen(
            command(*words), stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder,
            env={**os.environ, "TERM": "dumb"}, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)
        self.text = ""
        self._seen = 0

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def _read(self) -> str:
        with suppress(OSError):  # nothing there yet, or no more
            self.text += os.read(self._ours, 1 << 16).decode("utf-8", "replace")
        return self.text[self._seen :]

    def until(self, *wanted: str) -> str:
        """Return the new text up to the first that holds all that is wanted."""
        ended = "the program has ended"

        def has_come() -> bool:
            found = self._read()
            assert self.process.poll() is None or all(w in found for w in wanted), ended + found
            return all(w in found for w in wanted)

        assert eventually(has_come), self.text
        new, self._seen = self.text[self._seen :], len(self.text)
        return new

    def end(self) -> int:
        return self.process.wait(HANG_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.mark.merge
def test_ctrl_c_ends_an_answer_and_ctrl_d_the_chat(folder: Path) -> None:
    (answer,) = generated(folder / "one", ["hi"])
    answer = answer.replace("\n", "\r\n")
    with Terminal(folder, "one", "--max-new-tokens", "500000") as terminal:
        terminal.until("Ctrl-D ends.", "> ")
        terminal.type("hi\n")
        terminal.until(f"hi\r\n{answer}")
        terminal.type("\x03")
        terminal.until("[stopped]", "\n> ")
        terminal.type("half a line\x03")
        terminal.until("/quit ends the chat", "\n> ")
        terminal.type("/reset\n")
        terminal.until("a new conversation begins", "\n> ")
        terminal.type("\x10\x10\n")  # Ctrl-P recalls /reset, and then hi
        terminal.until(f"\r\n{answer}")
        terminal.type("\x03")
        terminal.until("[stopped]", "\n> ")
        terminal.type("\x04")
        assert terminal.end() == 0
    assert "Traceback" not in terminal.text


def test_ctrl_c_twice_ends_the_chat() -> None:
    before = signal.getsignal(signal.SIGINT)
    with _Stop() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.is_asked
        with pytest.raises(Interrupted, match="Ctrl-C twice"):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
