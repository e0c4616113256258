"""The command `chat`: a conversation with a model, or with several side by side.

Answers appear token by token. Several models get the same messages, and each keeps its own answers
as its history: none is judged by the words of another. Input may be a pipe: each line is a message,
and nothing but answers goes to standard output. A message that cannot be answered is reported; in a
pipe it ends the chat.

Ctrl-C ends an answer after the current token, because within a pass it would end the lanes of the
engine; a second one ends the chat. At the prompt it discards the line.

Laws (tests/cli/test_chat.py)
    1. An answer is that of `sample` after the turns so far, in a pipe and in a terminal.
    2. Ctrl-C ends an answer and not the chat; Ctrl-D and /quit end it with exit code 0.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from megatrain.cli.printed import PrintedAnswer
from megatrain.cli.verbs import found_model, read_only
from megatrain.disk.hf.model import read_model_folder
from megatrain.engine.compute.drawing import Drawing
from megatrain.engine.engine import Engine
from megatrain.errors import DataError, Interrupted
from megatrain.ranks.ranks import ALONE
from megatrain.run.evaluation.conversation import (
    Conversation,
    Ending,
    Speaker,
    first_turns,
    has_template,
)
from megatrain.run.evaluation.judging import media_as_trained, prompts_as_trained
from megatrain.run.evaluation.media_prompts import MediaFile, prompt_reader
from megatrain.run.evaluation.samples import end_tokens
from megatrain.run.opening.model import load_tokenizer
from megatrain.run.this_rank import place_of
from megatrain.text import counted, printable

_HELP = """\
/reset  begin a new conversation
/help   show this
/quit   end the chat; so does Ctrl-D
Ctrl-C  end an answer
\\       at the end of a line: the message continues on the next
Arrow keys recall earlier messages."""
_COMMAND = re.compile(r"/[a-z]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Partner:
    """A model in the chat."""

    name: str
    speaker: Speaker
    conversation: Conversation


def chat_with(
    models: Sequence[Path],
    max_new_tokens: int,
    drawing: Drawing,
    *,
    system: str | None,
    device: str,
    best: bool,
    media: Sequence[MediaFile] = (),
) -> None:
    """Answer messages of standard input until it ends. `best` is about the first model.

    The first message of a conversation is about the images and sounds of `media`.
    """
    with ExitStack() as stack:
        partners = [
            _opened(model, drawing, system, device, media, stack, best=best and number == 0)
            for number, model in enumerate(models)
        ]
        _tell("/help shows the commands, Ctrl-D ends.", is_for_terminals=True)
        is_first = True
        for message in _messages():
            if _COMMAND.fullmatch(message):
                if message == "/quit":
                    return
                _obey(message, partners)
                continue
            if not is_first and not _is_terminal():
                print(flush=True)
            is_first = False
            _answer_all(partners, message, max_new_tokens)


def _opened(
    model: Path,
    drawing: Drawing,
    system: str | None,
    device: str,
    media: Sequence[MediaFile],
    stack: ExitStack,
    *,
    best: bool,
) -> _Partner:
    place = place_of(device, ALONE.owner)
    found = found_model(model, best=best, ranks=ALONE)
    read = read_model_folder(found.folder)
    tokenizer = load_tokenizer(read.source)
    kwargs = prompts_as_trained(found, tokenizer)
    first_turns(tokenizer, system)  # refuses a system message before weights are loaded
    reader = None
    if media:
        reader = prompt_reader(media, tokenizer, media_as_trained(found, tokenizer), kwargs)
        reader([{"role": "user", "content": ""}])  # refuses a file before weights are loaded
        read = read_model_folder(found.folder, media="all")
    if not has_template(tokenizer):
        _tell(f"{model} has no chat template: it continues each message, without a history.")
    home = read.load(read_only(read), owner=ALONE.owner)
    engine = stack.enter_context(Engine(home.decoder, home.store, device=place))
    stack.enter_context(engine.staying(engine.cached_tokens, engine.cached_tokens))
    speaker = Speaker(
        engine=engine,
        tokenizer=tokenizer,
        end_tokens=end_tokens(tokenizer, home),
        template_kwargs=kwargs,
        system=system,
        drawing=drawing,
        read_prompt=reader,
    )
    return _Partner(name=str(model), speaker=speaker, conversation=Conversation(speaker))


def _answer_all(partners: Sequence[_Partner], message: str, max_new_tokens: int) -> None:
    for partner in partners:
        if len(partners) > 1:
            print(f"[{printable(partner.name)}]", flush=True)
        try:
            ending = _answer(partner, message, max_new_tokens)
        except DataError as error:
            if not _is_terminal():
                raise  # a script would take the answers behind it for those of other messages
            _tell(str(error))
            continue
        if ending == "stopped":
            break  # of the others too
    if _is_terminal():
        print(flush=True)


def _answer(partner: _Partner, message: str, max_new_tokens: int) -> Ending:
    printed = PrintedAnswer(partner.speaker.tokenizer)
    with _Stop() as stop:

        def take(token: int) -> bool:
            print(printed.add(token), end="", flush=True)
            return not stop.is_asked

        ending = partner.conversation.answer(message, max_new_tokens, take)
    print(printed.end(), flush=True)
    if ending != "ended":
        _tell(_ENDINGS[ending].format(limit=counted(max_new_tokens, "token")))
    return ending


_ENDINGS: dict[Ending, str] = {
    "stopped": "[stopped]",
    "cut": "[cut after {limit}: --max-new-tokens]",
    "full": "[the model has no position left: /reset begins a new conversation]",
}


def _obey(command: str, partners: Sequence[_Partner]) -> None:
    if command == "/reset":
        for partner in partners:
            partner.conversation.reset()
        _tell("a new conversation begins", is_for_terminals=True)
    elif command == "/help":
        _tell(_HELP)
    else:
        _tell(f"no command {command}: /help lists them. To send it, put a space before it.")


def _messages() -> Iterator[str]:
    """Yield the messages of standard input. Lines that end with a backslash continue."""
    if _is_terminal():
        with suppress(ImportError):  # a Python without readline can still read lines
            import readline  # noqa: F401  (input() edits lines and recalls them by it)
    lines: list[str] = []
    while True:
        try:
            line = _line("... " if lines else "> ")
        except EOFError:
            if lines:
                yield "\n".join(lines)
            return
        except KeyboardInterrupt:
            if not _is_terminal():
                raise Interrupted("Ctrl-C: the chat ended") from None
            lines = []
            _tell("\nCtrl-D or /quit ends the chat.")
            continue
        if line.endswith("\\"):
            lines.append(line.removesuffix("\\"))
            continue
        message = "\n".join([*lines, line])
        lines = []
        if message.strip():
            yield message


def _line(prompt: str) -> str:
    """Return a line of standard input. Raises EOFError at its end."""
    if _is_terminal():
        try:
            line = input(prompt)
        except EOFError:
            print(flush=True)  # the shell's prompt begins a line
            raise
    else:
        line = sys.stdin.readline()
        if not line:
            raise EOFError
    # Bytes that are no text come as halves of pairs, which no tokenizer takes.
    return line.rstrip("\r\n").encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _tell(text: str, *, is_for_terminals: bool = False) -> None:
    """Print a line that is no answer."""
    if _is_terminal() or not is_for_terminals:
        print(printable(text), file=sys.stderr, flush=True)


class _Stop:
    """Ctrl-C while a model answers."""

    def __enter__(self) -> Self:
        self.is_asked = False
        self._before = signal.signal(signal.SIGINT, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            raise Interrupted("Ctrl-C twice: the chat ended within an answer")
        self.is_asked = True

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)
