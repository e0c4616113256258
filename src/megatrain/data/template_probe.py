"""The first use of a chat template, in a child process with a limit of time and memory.

A template is a program from a foreign folder. The sandbox it runs in lets it loop for ever and
build strings without end; here that costs a child process and not the run.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any

from megatrain.data.chat_template import ChatTemplate
from megatrain.data.rows import Message
from megatrain.data.skipped import BadRow
from megatrain.errors import DataError

LIMIT_S = 30.0
_START_LIMIT_S = 300.0
_LIMIT_BYTES = 8 * 2**30


def probe_template(tokenizer: Any, messages: Sequence[Message], limit_s: float = LIMIT_S) -> None:
    """Render one conversation in a child; it is killed `limit_s` after it began.

    Waits for the child. A template that raises is no failure here: its rows are counted later.
    Raises DataError if the child did not end by itself.
    """
    context = multiprocessing.get_context("spawn")
    begun, begins = context.Pipe(duplex=False)
    child = context.Process(target=_render_once, args=(tokenizer, list(messages), begins))
    child.start()
    # On a busy machine a process may take longer to begin than a template to end.
    connection.wait([begun, child.sentinel], _START_LIMIT_S)
    child.join(limit_s)
    if child.exitcode is None:
        child.kill()
        child.join()
        raise DataError(
            f"the chat template did not finish one conversation in {limit_s:g} s; it may loop for "
            "ever. Look at it, or set another."
        )
    if child.exitcode != 0:
        raise DataError(
            f"the chat template ended its process with code {child.exitcode} on one conversation "
            f"(memory is limited to {_LIMIT_BYTES >> 30} GiB there). Look at it, or set another."
        )


def _render_once(tokenizer: Any, messages: list[Message], begins: connection.Connection) -> None:
    begins.send_bytes(b"begun")
    resource.setrlimit(resource.RLIMIT_AS, (_LIMIT_BYTES, _LIMIT_BYTES))
    try:
        ChatTemplate(tokenizer).render(messages)
    except BadRow as bad:
        if isinstance(bad.__cause__, MemoryError):
            raise SystemExit(3) from None
