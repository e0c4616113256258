"""Programs in the place of the decoder's, each with a fault of its own."""

from __future__ import annotations

import json
import os
import time
from multiprocessing import connection

from megatrain.data.media.decoding import BEGUN


def _begin(pipe: connection.Connection) -> None:
    pipe.recv_bytes()
    pipe.send_bytes(BEGUN)


def hangs(pipe: connection.Connection) -> None:
    """Answer with one pixel, and never if the bytes begin with `!`."""
    _begin(pipe)
    while True:
        pipe.recv_bytes()
        if pipe.recv_bytes().startswith(b"!"):
            time.sleep(3600)
        pipe.send_bytes(json.dumps({"width": 1, "height": 1}).encode())
        pipe.send_bytes(b"rgb")


def dies(pipe: connection.Connection) -> None:
    """End instead of an answer."""
    _begin(pipe)
    pipe.recv_bytes()
    pipe.recv_bytes()
    os._exit(9)


def lies(pipe: connection.Connection) -> None:
    """Answer with the header that it was sent, as a decoder that was taken over might."""
    _begin(pipe)
    while True:
        pipe.recv_bytes()
        answer = pipe.recv_bytes()
        pipe.send_bytes(answer[1:])
        pipe.send_bytes(b"rgb")
