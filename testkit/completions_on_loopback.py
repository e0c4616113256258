"""A server with the part of OpenAI's completions API that vLLM's answers rollouts with.

Our own `generate` is behind it. Other answers can be put in its place, to see what becomes of them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from megatrain.engine.engine import Engine
from megatrain.rewards.completions import seed_of
from megatrain.rewards.generation import generate
from megatrain.rewards.rollouts import Rollout
from testkit.listening import listening

_TURN = threading.Lock()
"""Requests come at once, and an engine has one caller."""


@dataclass(slots=True, kw_only=True)
class Completions:
    """What the server answers with."""

    answer: Callable[[dict[str, Any]], tuple[int, bytes]]
    """From a request to status and body."""
    url: str = ""
    asked: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    """Path, headers and JSON of each request so far."""


def answered_by(engine: Engine) -> Callable[[dict[str, Any]], tuple[int, bytes]]:
    """Return the answers of a server that has the engine's model."""

    def answer(request: dict[str, Any]) -> tuple[int, bytes]:
        with _TURN:
            made = generate(
                engine,
                request["prompt"],
                max_new_tokens=request["max_tokens"],
                num_samples=request["n"],
                temperature=request["temperature"],
                top_p=request["top_p"],
                seed=request["seed"],
                eos_token_ids=request["stop_token_ids"],
            )
        choices = [choice(number, one) for number, one in enumerate(made)]
        return 200, json.dumps({"object": "text_completion", "choices": choices[::-1]}).encode()

    return answer


def drawn_apart(
    engine: Engine, prompts: Sequence[Sequence[int]], *, seed: int = 0, **asked: Any
) -> list[Rollout]:
    """Return what `generate` gives for each prompt alone, by the seed that a server is asked by."""
    alone = (
        generate(engine, [prompt], seed=seed_of(seed, number), **asked)
        for number, prompt in enumerate(prompts)
    )
    return [one for some in alone for one in some]


def choice(number: int, rollout: Rollout) -> dict[str, Any]:
    """Return an answer as vLLM writes it."""
    return {
        "index": number,
        "text": "",
        "finish_reason": "stop" if rollout.ended else "length",
        "logprobs": {
            "tokens": [f"token_id:{token}" for token in rollout.tokens],
            "token_logprobs": list(rollout.logprobs),
            "top_logprobs": [{} for _ in rollout.tokens],
        },
    }


@contextmanager
def serving(completions: Completions) -> Iterator[Completions]:
    """Serve on a free port of the loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            request = json.loads(self.rfile.read(length))
            completions.asked.append((self.path, dict(self.headers), request))
            status, body = completions.answer(request)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with listening(Handler) as address:
        completions.url = f"{address}/v1"
        yield completions
