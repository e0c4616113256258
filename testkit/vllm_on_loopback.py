"""A server with the routes of vLLM's that weights go through, and the worker file of ours in it.

The worker file is the one that vLLM gets; vLLM itself is what stands in for it here: a model that
joins queries, keys and values, pads its vocabulary and packs what it has joined, as vLLM's does on
a CPU. Our own `generate` answers, from the weights that have arrived in that model.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import megatrain as mt
from megatrain.disk.hf.weights_file import folder_tensors
from megatrain.rewards.vllm_server import INSIDE
from testkit.completions_on_loopback import answered_by, choice
from testkit.listening import listening

JOINED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
_PADDED_TO = 64


class Ended(BaseException):
    """The worker has ended its process."""


def worker_file() -> Any:
    """Return the module that runs in vLLM's worker, with what it needs of vLLM."""
    stub = SimpleNamespace(
        initialize_layerwise_reload=lambda model: model.open(),
        finalize_layerwise_reload=lambda model, config: model.pack(),
    )
    name = "vllm.model_executor.model_loader.reload"
    parts = name.split(".")
    stubs = {".".join(parts[: count + 1]): ModuleType(parts[count]) for count in range(len(parts))}
    vars(stubs[name])["layerwise"] = stub
    known = {key: sys.modules[key] for key in stubs if key in sys.modules}
    sys.modules.update(stubs)
    try:
        spec = importlib.util.spec_from_file_location(
            "megatrain_weights", INSIDE / "megatrain_weights.py"
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["megatrain_weights"] = module  # its dataclass looks itself up
        spec.loader.exec_module(module)
    finally:
        for key in (*stubs, "megatrain_weights"):
            sys.modules.pop(key, None)
        sys.modules.update(known)

    def end(code: int) -> None:
        raise Ended

    real = vars(module)["os"]
    vars(module)["os"] = SimpleNamespace(_exit=end, cpu_count=real.cpu_count)
    return module


class _Linear(nn.Module):
    """A layer whose weight is packed after it was loaded."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.output_size_per_partition, self.input_size_per_partition = weight.shape
        self.weight = nn.Parameter(torch.zeros(0, dtype=weight.dtype), requires_grad=False)
        self.packed = torch.zeros_like(weight)

    def cpu_linear(self, rows: Tensor, weight: Tensor, bias: None) -> Tensor:
        return rows @ self.packed.t()


class JoiningModel(nn.Module):
    """Parameters as vLLM keeps those of a Llama."""

    packed_modules_mapping = JOINED

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.arrived: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            owner, _, leaf = name.rpartition(".")
            above, _, module = owner.rpartition(".")
            joined = next((key for key, parts in JOINED.items() if module in parts), None)
            if joined is None:
                parent = self._at(owner)
                padded = tensor.clone()
                if module in ("embed_tokens", "lm_head"):
                    vars(parent)["org_vocab_size"] = len(tensor)
                    rows = -(-len(tensor) // _PADDED_TO) * _PADDED_TO
                    padded = torch.zeros(rows, *tensor.shape[1:], dtype=tensor.dtype)
                parent.register_parameter(leaf, nn.Parameter(padded, requires_grad=False))
            elif module == JOINED[joined][0]:
                parts = [tensors[f"{above}.{part}.{leaf}"] for part in JOINED[joined]]
                self._at(above).add_module(joined, _Linear(torch.cat(parts)))

    def _at(self, path: str) -> nn.Module:
        found: nn.Module = self
        for part in path.split(".") if path else ():
            if part not in found._modules:
                found.add_module(part, nn.Module())
            found = found.get_submodule(part)
        return found

    def open(self) -> None:
        """Forget all weights."""
        self.arrived = {}

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.arrived[name] = tensor.clone()

    def pack(self) -> None:
        """Put what has arrived where the kernels want it."""
        for name, tensor in self.arrived.items():
            owner, _, leaf = name.rpartition(".")
            above, _, module = owner.rpartition(".")
            joined = next((key for key, parts in JOINED.items() if module in parts), None)
            if joined is None:
                self.get_parameter(name)[: len(tensor)] = tensor
                continue
            parts = JOINED[joined]
            before = parts[: parts.index(module)]
            first = sum(self._shapes[f"{above}.{part}.{leaf}"][0] for part in before)
            layer = self.get_submodule(f"{above}.{joined}")
            vars(layer)["packed"][first : first + len(tensor)] = tensor


@dataclass(slots=True, kw_only=True)
class Vllm:
    """A server, and what happens in it."""

    worker: Any
    engine: mt.Engine
    address: str = ""
    paused: bool = False
    ended: bool = False
    resets: bool = True
    """Whether it can forget its caches."""
    tempered: bool = True
    """Whether it was started with --logprobs-mode processed_logprobs."""
    calls: list[str] = field(default_factory=list)
    meanwhile: Callable[[str], None] = lambda path: None
    """Is called with the path of each request, before it is answered."""

    def answer(self, path: str, request: dict[str, Any]) -> tuple[int, Any]:
        name = path.split("?")[0].lstrip("/")
        self.calls.append(request.get("method", name))
        self.meanwhile(self.calls[-1])
        if name in ("pause", "resume"):
            self.paused = name == "pause"
        elif name == "collective_rpc":
            try:
                found = getattr(self.worker, request["method"])(**request["kwargs"])
            except Ended:
                self.ended = True
                raise
            return 200, {"results": [found]}
        elif name == "v1/models":
            return 200, {"data": [{"id": "policy"}]}
        elif name == "v1/completions":
            if self.paused:
                return 503, {"error": "a request would wait for ever"}
            if (allowed := request.get("allowed_token_ids")) is not None:
                logprobs = (0.0 if self.tempered else -5.0,)
                one = mt.Rollout(prompt=(1,), tokens=tuple(allowed), logprobs=logprobs, ended=False)
                return 200, {"choices": [choice(0, one)]}
            status, body = answered_by(self.engine)(request)
            return status, json.loads(body)
        elif name == "reset_prefix_cache":
            return 200, {"success": self.resets}
        elif name != "health":
            return 404, {}
        return 200, {}


@contextmanager
def vllm_on_loopback(folder: Path, dtype: str = "fp32") -> Iterator[Vllm]:
    """Serve the model of a folder, with weights that are all zero."""
    home = mt.load_model(folder, dtype="fp32" if dtype == "fp32" else "bf16", kinds=(mt.Kind.HI,))
    tensors = [tensor for _, tensor in folder_tensors(home.decoder, home.store)]
    model = JoiningModel({one.name: one.values.view(one.shape).clone() for one in tensors})
    weights: Any = worker_file().Weights

    class Worker(weights):  # type: ignore[misc]
        model_config = SimpleNamespace(dtype=home.decoder.model.dtype)
        model_runner = SimpleNamespace(get_model=lambda: model)

        def megatrain_load(self, **arguments: Any) -> Any:
            found = super().megatrain_load(**arguments)
            for tensor in tensors:
                if tensor.name in model.arrived:
                    tensor.values.copy_(model.arrived[tensor.name].reshape(-1))
            return found

    with mt.Engine(home.decoder, home.store) as engine:
        vllm = Vllm(worker=Worker(), engine=engine)
        with _listening(vllm):
            yield vllm


@contextmanager
def _listening(vllm: Vllm) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def do_GET(self) -> None:
            self._answer({})

        def _answer(self, request: dict[str, Any]) -> None:
            with suppress(Ended):  # the connection breaks, as that of a process that ended
                if vllm.ended:
                    return
                status, found = vllm.answer(self.path, request)
                body = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with listening(Handler) as address:
        vllm.address = address
        yield
