"""A server with the routes of a plain vLLM's that weights and answers go through.

It stands in for vLLM where vLLM is not installed: weights come from the folder that
`reload_weights` names, and our own `generate` answers from them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import megatrain as mt
from testkit.completions_on_loopback import answered_by, choice
from testkit.listening import listening


@dataclass(slots=True, kw_only=True)
class PlainVllm:
    """A server, and what happens in it."""

    dtype: Any = "fp32"
    address: str = ""
    engine: mt.Engine | None = None
    version: str = "base"
    calls: list[str] = field(default_factory=list)
    is_tempered: bool = True
    """Whether it was started with --logprobs-mode processed_logprobs."""
    ignores_weights: bool = False
    """Whether it goes on with the weights that it has: answers are then of stale ones."""
    before: Callable[[str], None] = lambda name: None
    """Is called with the name of each request, before it is answered."""
    _home: mt.HostModel | None = None
    _turn: Any = field(default_factory=threading.RLock)
    """Requests come at once, and weights change between them."""

    def reload(self, folder: str | Path) -> None:
        """Load the weights of a folder, as `reload_weights` does."""
        self.close()
        self._home = mt.load_model(folder, dtype=self.dtype, kinds=(mt.TensorKind.HI,))
        self.engine = mt.Engine(self._home.decoder, self._home.store)

    def close(self) -> None:
        if self.engine is not None:
            assert self._home is not None
            self.engine.close()
            self._home.store.close()
            self.engine = None

    def answer(self, path: str, request: dict[str, Any]) -> tuple[int, Any]:
        name = path.split("?")[0].lstrip("/")
        self.calls.append(request.get("method", name))
        self.before(self.calls[-1])
        if name == "collective_rpc":
            assert request["method"] == "reload_weights"
            if not self.ignores_weights:
                with self._turn:
                    self.reload(request["kwargs"]["weights_path"])
            return 200, {"results": [None]}
        if name == "update_weight_version":
            self.version = request["new_version"]
        elif name == "weight_info":
            return 200, {"weight_version": self.version}
        elif name == "v1/models":
            return 200, {"data": [{"id": "policy"}]}
        elif name == "v1/completions":
            return self._complete(request)
        elif name == "reset_prefix_cache":
            return 200, {"success": True}
        elif name not in ("pause", "resume", "health"):
            return 404, {"error": f"no route {name}"}
        return 200, {}

    def _complete(self, request: dict[str, Any]) -> tuple[int, Any]:
        if (allowed := request.get("allowed_token_ids")) is not None:
            logprobs = (0.0 if self.is_tempered else -5.0,)
            one = mt.Rollout(prompt=(1,), tokens=tuple(allowed), logprobs=logprobs, ended=False)
            return 200, {"choices": [choice(0, one)]}
        with self._turn:
            assert self.engine is not None
            status, body = answered_by(self.engine)(request)
        return status, json.loads(body)


@contextmanager
def plain_vllm(folder: Path, **settings: Any) -> Iterator[PlainVllm]:
    """Serve the model of a folder on a free port of the loopback."""
    vllm = PlainVllm(**settings)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def do_GET(self) -> None:
            self._answer({})

        def _answer(self, request: dict[str, Any]) -> None:
            status, found = vllm.answer(self.path, request)
            body = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    vllm.reload(folder)
    try:
        with listening(Handler) as address:
            vllm.address = address
            yield vllm
    finally:
        vllm.close()
