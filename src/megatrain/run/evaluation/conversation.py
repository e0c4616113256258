"""A conversation with a model at home: its turns, and the keys and values of what was read.

Each message is added to the turns so far, the chat template writes them as one text, and the model
continues that. Keys and values stay between answers: a turn reads only the tokens that the model
has not read in the same place. A template may write earlier turns differently later, as those of
thinking models drop thoughts; the text is then read again from the first difference, or from its
beginning in models with sliding windows, which have forgotten it.

Laws (tests/run/evaluation/test_conversation.py)
    1. Greedy answers are those of transformers' `generate` after the text of all turns so far.
    2. A message that the model cannot answer leaves the conversation as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatrain.batch import MicroBatch
from megatrain.data.chat.template import open_text
from megatrain.engine.compute.drawing import GREEDY, Drawing
from megatrain.engine.engine import Engine
from megatrain.engine.sampling import chosen_token, with_media
from megatrain.errors import ConfigError, DataError
from megatrain.media import TextMedia
from megatrain.models.key_values import TextCache, drop_last
from megatrain.models.multimodal import text_part
from megatrain.models.rope import num_positions

Turn = dict[str, str]
Ending = Literal["ended", "stopped", "cut", "full"]
"""The model ended its answer, the caller stopped it, it reached its longest length, or no position
is left."""


def prompt_tokens(
    tokenizer: Any, turns: Sequence[Turn], template_kwargs: Mapping[str, Any]
) -> list[int]:
    """Return the text before an answer, as tokens: without a template the last turn alone.

    Raises DataError if the template refuses the turns.
    """
    if not has_template(tokenizer):
        return open_text(tokenizer, turns[-1]["content"])
    text = prompt_text(tokenizer, turns, template_kwargs)
    return list(tokenizer.encode(text, add_special_tokens=False))


def prompt_text(
    tokenizer: Any, turns: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]
) -> str:
    """Return the text before an answer. Raises DataError if the template refuses the turns."""
    try:
        text = tokenizer.apply_chat_template(
            list(turns), tokenize=False, add_generation_prompt=True, **template_kwargs
        )
    except Exception as error:  # templates raise any exception, on purpose and by mistake
        raise DataError(f"the chat template refuses the turns: {str(error)[:300]}") from error
    return str(text)


def first_turns(tokenizer: Any, system: str | None) -> list[Turn]:
    """Return the turns before the first message. Raises ConfigError without a template for them."""
    if system is None:
        return []
    if not has_template(tokenizer):
        raise ConfigError("--system: the tokenizer has no chat template to hold it")
    return [{"role": "system", "content": system}]


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that `skip_special_tokens` leaves out of a text."""
    return frozenset(t for t, added in tokenizer.added_tokens_decoder.items() if added.special)


ReadPrompt = Callable[[Sequence[Turn]], tuple[list[int], TextMedia | None]]
"""Returns the text before an answer to turns, in tokens, and its media. Raises DataError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """A model that answers."""

    engine: Engine
    tokenizer: Any
    end_tokens: frozenset[int]
    template_kwargs: Mapping[str, Any]
    system: str | None = None
    drawing: Drawing = GREEDY
    read_prompt: ReadPrompt | None = None
    """For turns about images or sounds; None: they are text alone."""

    def prompt(self, turns: Sequence[Turn]) -> tuple[list[int], TextMedia | None]:
        """Return the text before an answer, in tokens, and its media. Raises DataError."""
        if self.read_prompt is not None:
            return self.read_prompt(turns)
        return prompt_tokens(self.tokenizer, turns, self.template_kwargs), None


class Conversation:
    """Turns of one model. Without a chat template it has none: each message is continued alone."""

    def __init__(self, speaker: Speaker) -> None:
        self._speaker = speaker
        self._text = _ReadText(speaker.engine)
        self._special = special_tokens(speaker.tokenizer)
        self.reset()

    def reset(self) -> None:
        """Forget all turns, and draw as in the beginning."""
        speaker = self._speaker
        self.turns = first_turns(speaker.tokenizer, speaker.system)
        self._num_drawn = 0

    def answer(
        self, message: str, max_new_tokens: int, take: Callable[[int], bool] = lambda _: True
    ) -> Ending:
        """Answer a message; both then are turns, and so is an answer that was stopped.

        `take` gets each token as it is chosen, the end token excepted, and returns whether to
        continue. Raises DataError if the template refuses the turns, or if no position is left.
        """
        speaker = self._speaker
        asked: list[Turn] = [*self.turns, {"role": "user", "content": message}]
        try:
            text, media = speaker.prompt(asked)
            room = self._room(len(text))
        except DataError as error:
            if not self._has_history():
                raise
            raise DataError(f"{error}. /reset begins a new conversation") from error
        longest = min(max_new_tokens, room)
        new: list[int] = []
        ending: Ending = "cut" if longest == max_new_tokens else "full"
        while len(new) < longest:
            logits = self._text.logits([*text, *new], len(text) + longest, media)
            token = chosen_token(logits, speaker.drawing, self._num_drawn)
            self._num_drawn += 1
            if token in speaker.end_tokens:
                ending = "ended"
                break
            new.append(token)
            if not take(token):
                ending = "stopped"
                break
        if has_template(speaker.tokenizer):
            self.turns = [*asked, {"role": "assistant", "content": self._content(new)}]
        return ending

    def _has_history(self) -> bool:
        return any(turn["role"] == "user" for turn in self.turns)

    def _room(self, num_read: int) -> int:
        """Return how many tokens an answer may have behind so many."""
        positions = num_positions(text_part(self._speaker.engine.model_config))
        if positions is None:
            return 1 << 62
        if num_read >= positions:
            raise DataError(
                f"the text up to this message has {num_read:,} tokens, and the model has "
                f"{positions:,} positions"
            )
        return positions - num_read

    def _content(self, tokens: Sequence[int]) -> str:
        """Return an answer as later prompts have it: the part behind its last special token.

        Such tokens end thoughts and name channels, and templates drop what is before them.
        """
        last = max((place for place, t in enumerate(tokens) if t in self._special), default=-1)
        content = self._decoded(tokens[last + 1 :])
        return content or self._decoded(tokens)

    def _decoded(self, tokens: Sequence[int]) -> str:
        decode = self._speaker.tokenizer.decode
        return str(decode(list(tokens), skip_special_tokens=True)).strip("\n")


class _ReadText:
    """Tokens that a model has read, with their keys and values, if it can keep them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokens: list[int] = []
        self._media: list[str] = []
        """Digests of the media that were read."""
        self._cache: TextCache | None = None

    def logits(self, tokens: list[int], most: int, media: TextMedia | None) -> Tensor:
        """Return the logits behind `tokens`, a text that will have up to `most`. (vocabulary)

        `media` are those of the text; a text of which some were not read is read again.
        """
        digests = [] if media is None else [item.digest for item in media.items]
        num_known = 0
        if most > self._engine.cached_tokens:
            self._cache = None
        else:
            num_known = min(_num_equal(self._tokens, tokens), len(tokens) - 1)
            if self._media != digests or (media is not None and any(media.token_types[num_known:])):
                num_known = 0
            num_other = len(self._tokens) - num_known
            if num_other and self._cache is not None and not drop_last(self._cache, num_other):
                num_known = 0
            if num_known == 0:
                self._cache = self._engine.new_cache()
        ids = torch.tensor([tokens[num_known:]])
        micro = MicroBatch(input_ids=ids, labels=ids)
        if media is not None and num_known == 0:
            micro = with_media(micro, [media])
        self._tokens = []  # a pass that fails leaves the cache half filled
        (found,) = self._engine.predict([micro], [self._cache])
        self._tokens = list(tokens) if self._cache is not None else []
        self._media = digests
        return found[0]


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
