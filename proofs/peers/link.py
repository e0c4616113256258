"""Peers on links of 20 Mbit/s and 50 ms: exchanges take at most 5 % of their time.

    python -m proofs.peers.link --json
    python -m proofs.peers.link --rounds 1 --scale 20 --json

Three peers meet in a bucket (moto's S3), each behind a link of its own (testkit/shaped_link.py):
20 Mbit/s both ways and a round trip of 50 ms. Seconds of compute and bytes of a difference are what
`megatrain estimate Qwen/Qwen3-8B --gpu 4090 --peers 16 --uplink 20Mbit` has for a round, both
divided by SCALE, so that the link is busy for as large a share of a round as with 8B: 83 of 439
seconds up, and twice as many down, 57 % together. With 16 peers and 200 Mbit/s down it is 47 %.
Round trips are not divided, and are SCALE times as dear. Steps wait for as long as they would
compute. What is exposed is the time between two steps.

`streaming` has parts and late steps. `waiting` has neither, and must be noticed: the same bytes
then take a large share of the time. Host work is not in proportion: differences have 32 bits per
parameter, so the model has fewer params than an 8B model divided by SCALE. Ends with 1 if a link is
not what it should be, if more than 5 % is exposed, or if waiting is not noticed. Needs root,
obstore and moto[server].
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import mean
from typing import Any

from megatrain.config.sections import PeerSettings
from megatrain.planning.estimate import estimate
from megatrain.planning.peers import bits_per_param
from testkit.printed import print_figures
from testkit.proof_calls import ROOT
from testkit.shaped_link import ShapedLink, missing, shaped_links

RATE_MBIT, ROUND_TRIP_S = 20.0, 0.05
NUM_PEERS, SCALE, NUM_ROUNDS = 3, 8.0, 2
LIMIT = 0.05
FORM: dict[str, Any] = {"compression": "none", "wait": 120.0}
STREAMING = {**FORM, "inner_steps": 30, "parts": 2, "late": 15}
WAITING = {**FORM, "inner_steps": 30}
_PORT = 5555


def exposed(
    links: Sequence[ShapedLink], settings: dict[str, Any], num_rounds: int, scale: float
) -> dict[str, Any]:
    """Let peers take rounds; return which share of their time was exposed."""
    planned = estimate(
        "Qwen/Qwen3-8B", gpu="4090", ram="128GB", batch_tokens="32k", peers=16, uplink="20Mbit"
    ).peers
    assert planned is not None
    steps = settings["inner_steps"]
    step_s = planned.round_s / planned.inner_steps / scale
    bits = bits_per_param(PeerSettings(**FORM))
    asked = {
        "at": "s3://proof/meeting", "settings": settings, "step_s": step_s, "poll_s": 1 / scale,
        "num_params": round(8 * planned.difference_bytes / scale / bits),
        "num_steps": steps * (num_rounds + 1),
    }  # fmt: skip
    with ExitStack() as stack:
        began = [_started(stack, links[0].at_hub, ["bucket", str(_PORT)])]
        _wait_for(began)
        peers = [
            _started(
                stack, link.there, ["peer", json.dumps({**asked, "name": f"p{number}"})],
                AWS_ENDPOINT_URL=f"http://{link.hub}:{_PORT}",
            )
            for number, link in enumerate(links)
        ]  # fmt: skip
        _wait_for(peers)
        for one in peers:
            assert one.stdin is not None
            one.stdin.write("\n")
            one.stdin.flush()
        found = [json.loads(one.stdout.read()) for one in peers if one.stdout is not None]
    shares, used = zip(*(_of_window(one["times"], steps, step_s) for one in found), strict=True)
    return {
        "exposed_share": mean(shares),
        "largest_exposed_share": max(shares),
        "utilization": mean(used),
        "round_s": steps * step_s,
        "exchanges": found[0]["exchanges"],
        "entered": sum(found[0]["entered"]) / max(1, len(found[0]["entered"])),
        "difference_bytes": round(planned.difference_bytes / scale),
    }


def _of_window(
    times: Sequence[tuple[float, float]], steps: int, step_s: float
) -> tuple[float, float]:
    """Return the exposed share and the utilization from the end of the first round on."""
    within = times[steps - 1 :]
    whole = within[-1][0] - within[0][0]
    gaps = sum(after - before for before, after in within[:-1])
    return gaps / whole, step_s * (len(within) - 1) / whole


def _started(
    stack: ExitStack, where: list[str], words: list[str], **env: str
) -> subprocess.Popen[str]:
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_REGION": "us-east-1"}
    command = [*where, sys.executable, "-m", "proofs.peers.link_ends", *words]
    one = stack.enter_context(
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, **keys, **env},
        )
    )  # fmt: skip
    stack.callback(one.terminate)
    return one


def _wait_for(processes: Sequence[subprocess.Popen[str]]) -> None:
    for one in processes:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n", "a process has ended before it was ready"


def run(num_rounds: int, scale: float) -> dict[str, Any]:
    """Measure the links, and both ways to exchange over them."""
    began = time.monotonic()
    with shaped_links(NUM_PEERS, rate_mbit=RATE_MBIT, round_trip_s=ROUND_TRIP_S) as links:
        link = links[0].measured()
        found = {
            "streaming": exposed(links, STREAMING, num_rounds, scale),
            "waiting": exposed(links, WAITING, num_rounds, scale),
        }
    is_shaped = (
        min(link["up_mbit"], link["down_mbit"]) > 0.8 * RATE_MBIT
        and max(link["up_mbit"], link["down_mbit"]) < RATE_MBIT
        and 0 <= link["round_trip_ms"] - 1000 * ROUND_TRIP_S < 20
    )
    share = found["streaming"]["exposed_share"]
    failures = [
        *([] if is_shaped else [f"the link is not of {RATE_MBIT} Mbit/s and {ROUND_TRIP_S} s"]),
        *([] if share <= LIMIT else [f"{share:.1%} of the time is exposed"]),
        *([] if found["waiting"]["exposed_share"] > LIMIT else ["waiting was not noticed"]),
    ]
    return {
        "exposed_share": share,
        "utilization": found["streaming"]["utilization"],
        "exposed_share_waiting": found["waiting"]["exposed_share"],
        "peers": NUM_PEERS,
        "scale": scale,
        "link": link,
        **found,
        "seconds": round(time.monotonic() - began, 1),
        "failures": failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="rounds to measure")
    parser.add_argument(
        "--scale", type=float, default=SCALE, help="how many times less than 8B a round has"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    if (lack := missing()) is not None:
        sys.exit(f"proofs.peers.link: {lack}")
    result = run(options.rounds, options.scale)
    print_figures(result, as_json=options.json)
    sys.exit(bool(result["failures"]))


if __name__ == "__main__":
    main()
