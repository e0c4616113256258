"""The two ends of a shaped link: a bucket, and a peer whose steps take a given time.

    python -m proofs.peers.link_ends bucket PORT        # until its input ends
    python -m proofs.peers.link_ends peer '{"name": ...}'

A peer says when it has joined, begins when a line comes in, and prints when each step ended and
when training went on: in between the device has nothing to do.
"""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatrain.peers.compression import Floats
from megatrain.places import open_place
from testkit.toy_peers import ToyPeer, toy_layout

NUM_BLOCKS = 6


def bucket(port: int) -> None:
    """Serve an empty bucket."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it names each request

    moto = ThreadedMotoServer(ip_address="0.0.0.0", port=port, verbose=False)
    moto.start()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("PUT", "/proof")
    connection.getresponse().read()
    print("ready", flush=True)
    sys.stdin.read()
    moto.stop()


def peer(at: str, name: str, num_params: int, step_s: float, num_steps: int, poll_s: float,
         settings: dict[str, Any]) -> None:  # fmt: skip
    """Take steps that only wait, and change the weights of a block each."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="megatrain-link-") as scratch:
        layout = toy_layout(NUM_BLOCKS, num_params // NUM_BLOCKS)
        one = ToyPeer(open_place(at), Path(scratch), name, settings, layout=layout)
        one.rounds.meeting.poll_s = one.rounds.meeting.place.pause_s = poll_s
        one.begin()
        moved = [one.masters.read(piece)[::-1].copy() for piece in one.pieces]
        print("ready", flush=True)
        sys.stdin.readline()
        times = [_step(one, moved, number, step_s) for number in range(num_steps)]
        one.rounds.close()
        bytes_up = {e["number"]: e["num_bytes"] for e in one.events if e["event"] == "exchange"}
        entered = [len(e["entered"]) for e in one.events if e["event"] == "exchange"]
    print(json.dumps({"times": times, "exchanges": len(bytes_up), "entered": entered,
                      "num_bytes": sum(bytes_up.values())}))  # fmt: skip


def _step(one: ToyPeer, moved: list[Floats], number: int, step_s: float) -> tuple[float, float]:
    """Take a step; return when it ended, and when the next one may begin."""
    ends = time.monotonic() + step_s
    piece = one.pieces[number % len(one.pieces)]
    values = one.masters.read(piece)
    values += np.float32(0.01) * moved[piece.number]
    one.masters.write(piece, values)
    time.sleep(max(0.0, ends - time.monotonic()))
    ended = time.monotonic()
    one.rounds.after(number + 1)
    return ended, time.monotonic()


if __name__ == "__main__":
    if sys.argv[1] == "bucket":
        bucket(int(sys.argv[2]))
    else:
        peer(**json.loads(sys.argv[2]))
