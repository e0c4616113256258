"""Attention, the one place where tokens of a row meet, answered by us in place of transformers.

Models ask transformers' AttentionInterface for their attention by name, `sdpa` or `eager`. For the
time of a `with` block another function has all names; names and models stay as they are, so
code that compares names is not misled, and outside the block transformers is untouched. As with
stand-ins for layers: one caller at a time.

Laws (tests/models/test_attention.py)
    1. Attention that is passed on to transformers gives the bits of the model without us.
    2. A replacement sees every call of a layer's attention, and nothing else runs in its place.
    3. Inside a block, another one receives what the first would have received, and may pass it on.
    4. After the block, failed or not, transformers has its own functions again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

AttentionOutput = tuple[Tensor, Tensor | None]
"""(rows, length, heads, width), and the weights of attention, if they are wanted."""
Answer = Callable[..., AttentionOutput]
"""Gets what transformers' functions get: module, query, key, value, mask, and options by name."""
ReceiveAttention = Callable[..., AttentionOutput]
"""Like Answer, with the function of transformers before the other arguments."""


@contextmanager
def attention_replaced(receive: ReceiveAttention) -> Iterator[None]:
    """Let `receive` be the attention of every layer called meanwhile.

    It gets the function that transformers would have called, and that function's arguments.
    """
    with _answered_by(lambda own: _redirected(receive, own)):
        yield


@contextmanager
def attention_is(answer: Answer) -> Iterator[None]:
    """Let `answer` itself have all names: a graph is guarded by the function it has called."""
    with _answered_by(lambda own: answer):
        yield


@contextmanager
def _answered_by(instead: Callable[[Answer | None], Answer]) -> Iterator[None]:
    names: dict[str, Any] = AttentionInterface._global_mapping
    before = dict(names)
    for name in ("eager", *before):
        names[name] = instead(before.get(name))
    try:
        yield
    finally:
        names.clear()
        names.update(before)


def _redirected(receive: ReceiveAttention, own: Answer | None) -> Answer:
    # As in transformers: some models give the mask by its name.
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **options: Any,
    ) -> AttentionOutput:
        function = own or _own_attention(module)
        return receive(function, module, query, key, value, attention_mask, **options)

    return attend


def _own_attention(module: nn.Module) -> Answer:
    """Return the eager attention of the model's own code, which it hands over as a default."""
    found: Answer = sys.modules[type(module).__module__].eager_attention_forward
    return found


@contextmanager
def attention_on_host() -> Iterator[None]:
    """Let attention that only a device has, flash attention, be sdpa without a mask."""
    sdpa: Answer = AttentionInterface._global_mapping["sdpa"]

    def receive(own: Answer, *args: Any, **options: Any) -> AttentionOutput:
        if not own.__module__.startswith("transformers.integrations.flash"):  # not mimo_v2_flash
            return own(*args, **options)
        module, query, key, value, _mask = args
        return sdpa(module, query, key, value, None)

    with attention_replaced(receive):
        yield
