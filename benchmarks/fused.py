"""Element-wise work of a layer, counted: the model's own code against fused kernels.

    python -m benchmarks.fused [--json]

One layer of Qwen3-8B and of Qwen2.5-7B in bf16 runs forward and backward on the meta device, on a
flat row of TOKENS tokens. Every operation that reaches torch's dispatcher is counted: a launch, and
the bytes that it reads and writes, each tensor once. Products and attention are launches whose
bytes are not element-wise; views are neither. A fused kernel is one launch that reads its inputs
and writes its results: those of Liger, which `train.kernels: auto` takes. Modules with the reads
and writes of its kernels stand in for them; `--package` has the package itself instead, where it is
installed: its code runs, and what it launches is counted in place of the launch.

    element_wise_kb          kB per token that forward of a layer of Qwen3-8B moves, fused
    element_wise_kb_before   the same by the model's own code
    launches_per_layer       of that forward; launches_per_layer_before likewise
    padding_flops            FLOPs on padding per FLOP on tokens, of rows not packed, laid flat
    padding_flops_before     the same for padded rows
    models                   both models, both ways: forward and backward (recompute not counted)

Counted, not measured: what the bytes cost on a card, `megatrain gpu-check` shows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config, Qwen3Config

from megatrain.batch import MicroBatch
from megatrain.data.steps.micro_batches import micro_batches
from megatrain.devices.device import CpuDevice
from megatrain.engine.compute.fused import use_liger
from megatrain.models.attention import attention_replaced
from megatrain.models.probing.dispatch import Operation, intercepted

TOKENS = 4096
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
FREE = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "detach", "_unsafe_view"})
"""Operations that move nothing, beside views."""
ROWS, LONGEST, MICRO_TOKENS = 512, 2048, 8192
"""Of the rows whose padding is counted."""


def qwen3_8b() -> PreTrainedConfig:
    return Qwen3Config(
        vocab_size=8, hidden_size=4096, intermediate_size=12288, num_hidden_layers=1,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    )  # fmt: skip


def qwen2_7b() -> PreTrainedConfig:
    return Qwen2Config(
        vocab_size=8, hidden_size=3584, intermediate_size=18944, num_hidden_layers=1,
        num_attention_heads=28, num_key_value_heads=4,
    )  # fmt: skip


Fusing = Callable[[nn.Module, "Counter"], AbstractContextManager[None]]
"""Gives the model fused kernels that the counter counts."""
MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "Qwen3-8B": qwen3_8b,
    "Qwen2.5-7B": qwen2_7b,
}


@dataclass(slots=True)
class Counted:
    """Launches and bytes, by what launches them."""

    launches: int = 0
    num_bytes: float = 0.0
    by_name: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, num_bytes: float) -> None:
        """Count one element-wise launch."""
        self.launches += 1
        self.num_bytes += num_bytes
        self.by_name[name] = self.by_name.get(name, 0.0) + num_bytes

    def facts(self, num_tokens: int) -> dict[str, Any]:
        """Return launches and kB per token."""
        largest = sorted(self.by_name.items(), key=lambda item: -item[1])
        return {
            "launches": self.launches,
            "element_wise_kb": round(self.num_bytes / num_tokens / 1e3, 1),
            "by_kernel_kb": {name: round(b / num_tokens / 1e3, 1) for name, b in largest},
        }


class Counter:
    """Handles every operation: counts it, and lets it run."""

    def __init__(self) -> None:
        self.counted = Counted()

    def __call__(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operation(*args, **kwargs)
        name = operation.overloadpacket.__name__
        if name in PRODUCTS:
            self.counted.launches += 1
        elif not (operation.is_view or name in FREE):
            read = {id(tensor): tensor for tensor in _tensors((args, kwargs))}
            written = _tensors(result)
            self.counted.add(name, sum(map(moved_bytes, [*read.values(), *written])))
        return result

    def kernel(self, name: str, *tensors: Tensor | None) -> None:
        """Count a fused kernel that reads or writes each of these tensors once."""
        self.counted.add(name, sum(moved_bytes(t) for t in tensors if t is not None))

    def attention(self) -> None:
        """Count a launch whose bytes are attention's."""
        self.counted.launches += 1


def moved_bytes(tensor: Tensor) -> int:
    """Return the bytes of the elements that a tensor has; what is repeated is read once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    own = [size for size, stride in sizes if stride != 0]
    return int(np.prod(own, dtype=np.int64)) * tensor.element_size()


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, dict):
        found += [tensor for one in value.values() for tensor in _tensors(one)]
    elif isinstance(value, list | tuple):
        found += [tensor for one in value for tensor in _tensors(one)]
    return found


def counted_layer(config: PreTrainedConfig, fused: Fusing | None) -> dict[str, Any]:
    """Return forward and backward of one layer, by its own code or as `fused` changes it."""
    counter = Counter()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        hidden = torch.empty(1, TOKENS, config.hidden_size, dtype=torch.bfloat16)
        positions = torch.empty(1, TOKENS, dtype=torch.long)
        cos_and_sin = model.model.rotary_emb(hidden, positions)
    hidden.requires_grad_()

    def attend(_own: Any, _module: nn.Module, *given: Any, **_options: Any) -> Any:
        return _apply(_Attention, counter, *given[:3]), None

    facts = {}
    fusing = nullcontext() if fused is None else fused(model, counter)
    with fusing, attention_replaced(attend), intercepted(counter):
        output = model.model.layers[0](hidden, position_embeddings=cos_and_sin, attention_mask=None)
        facts["forward"] = counter.counted.facts(TOKENS)
        counter.counted = Counted()
        torch.autograd.backward(output, torch.empty_like(output))
        facts["backward"] = counter.counted.facts(TOKENS)
    return facts


def _apply(function: type[torch.autograd.Function], *given: Any) -> Any:
    return function.apply(*given)  # type: ignore[no-untyped-call]


class _Attention(torch.autograd.Function):
    """One kernel each way, with the layouts of flash attention: tokens, heads, width."""

    @staticmethod
    def forward(ctx: Any, counter: Counter, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        counter.attention()
        ctx.counter, ctx.like = counter, (query, key, value)
        return torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *_gradient: Tensor) -> Any:
        ctx.counter.attention()
        made = (
            torch.empty_like(t.transpose(1, 2), memory_format=torch.contiguous_format)
            for t in ctx.like
        )
        return None, *(tensor.transpose(1, 2) for tensor in made)


# Liger's kernels: what each reads and writes, once.


class _Norm(torch.autograd.Function):
    """A norm that also writes the inverse root of each row, for backward."""

    @staticmethod
    def forward(ctx: Any, counter: Counter, hidden: Tensor, weight: Tensor) -> Tensor:
        output = torch.empty_like(hidden)
        roots = torch.empty(hidden.shape[:-1], dtype=torch.float32, device="meta")
        counter.kernel("norm", hidden, weight, output, roots)
        ctx.counter, ctx.saved = counter, (hidden, weight, roots)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (d_output,), (hidden, weight, roots) = gradients, ctx.saved
        d_hidden = torch.empty_like(hidden)
        ctx.counter.kernel("norm, back", d_output, hidden, weight, roots, d_hidden, weight)
        return None, d_hidden, torch.empty_like(weight)


class _Gated(torch.autograd.Function):
    """silu(gate) * up; backward writes over both."""

    @staticmethod
    def forward(ctx: Any, counter: Counter, gate: Tensor, up: Tensor) -> Tensor:
        output = torch.empty_like(gate)
        counter.kernel("gated unit", gate, up, output)
        ctx.counter, ctx.saved = counter, (gate, up)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.counter.kernel("gated unit, back", *gradients, *ctx.saved, *ctx.saved)
        return None, *map(torch.empty_like, ctx.saved)


class _Rotated(torch.autograd.Function):
    """Queries and keys, in place."""

    @staticmethod
    def forward(
        ctx: Any, counter: Counter, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        counter.kernel("rotation", query, key, cos, sin, query, key)
        ctx.counter, ctx.saved = counter, (cos, sin)
        return torch.empty_like(query), torch.empty_like(key)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.counter.kernel("rotation, back", *gradients, *ctx.saved, *gradients)
        return None, *map(torch.empty_like, gradients), None, None


@contextmanager
def standing_in(model: nn.Module, counter: Counter) -> Iterator[None]:
    """Let modules count as Liger's kernels do, in the places where Liger puts them."""
    family: Any = sys.modules[type(model).__module__]
    own = family.apply_rotary_pos_emb
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda hidden, m=module: _apply(_Norm, counter, hidden, m.weight)
        if type(module).__name__.endswith("MLP"):
            module.forward = lambda hidden, m=module: m.down_proj(
                _apply(_Gated, counter, m.gate_proj(hidden), m.up_proj(hidden))
            )
    family.apply_rotary_pos_emb = lambda *given: _apply(_Rotated, counter, *given)
    try:
        yield
    finally:
        family.apply_rotary_pos_emb = own


@contextmanager
def launches_caught(model: nn.Module, counter: Counter) -> Iterator[None]:
    """Let the model have the kernels of the installed package; none is launched."""
    kernels: Any = import_module("triton.runtime.jit").JITFunction
    own = kernels.run

    def run(kernel: Any, *args: Any, **_options: Any) -> None:
        also_written = {"_triton_rope": (0, 2), "_swiglu_backward_kernel": (1, 2)}
        places = also_written.get(kernel.__name__, ())
        counter.kernel(kernel.__name__, *_tensors(args), *(args[place] for place in places))

    device: Any = CpuDevice()
    device.has_triton = True
    use_liger(model, device)
    kernels.run = run
    try:
        yield
    finally:
        kernels.run = own


# Padding.


class Rows:
    """Documents of log-normal lengths, as answers of a chat have them."""

    def __init__(self) -> None:
        drawn = np.random.default_rng(0).lognormal(np.log(LONGEST / 6), 0.8, ROWS)
        self.lengths: NDArray[np.int64] = np.clip(drawn.astype(np.int64), 16, LONGEST)
        self.row_starts: NDArray[np.int64] = np.arange(ROWS + 1)

    def tokens(self, document: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        length = int(self.lengths[document])
        return np.full(length, 3, dtype=np.int32), np.ones(length, dtype=np.bool_)


def padding(*, flat: bool) -> float:
    """Return the FLOPs of layers on padding over those on tokens, in rows of one document each.

    Products alone: attention is computed with a mask, or within documents.
    """
    documents = Rows()
    rows = [np.array([number], dtype=np.int64) for number in range(ROWS)]
    batch: list[MicroBatch] = micro_batches(
        rows, documents, micro_batch_tokens=MICRO_TOKENS, packing=False, flat=flat, pad_id=0
    )
    num_tokens = sum(micro.num_tokens for micro in batch)
    assert num_tokens == documents.lengths.sum()
    return sum(micro.input_ids.numel() for micro in batch) / num_tokens - 1.0


def measure(*, package: bool = False) -> dict[str, Any]:
    """Return the figures; with `package` those of Liger's own code."""
    models = {
        name: {
            "before": counted_layer(config(), None),
            "fused": counted_layer(config(), launches_caught if package else standing_in),
        }
        for name, config in MODELS.items()
    }
    before, fused = (models["Qwen3-8B"][side]["forward"] for side in ("before", "fused"))
    return {
        "element_wise_kb": fused["element_wise_kb"],
        "element_wise_kb_before": before["element_wise_kb"],
        "launches_per_layer": fused["launches"],
        "launches_per_layer_before": before["launches"],
        "padding_flops": round(padding(flat=True), 4),
        "padding_flops_before": round(padding(flat=False), 4),
        "tokens": TOKENS,
        "models": models,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fused", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument("--package", action="store_true", help="run the code of liger-kernel")
    options = parser.parse_args()
    found = measure(package=options.package)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for name, sides in found["models"].items():
        for side, ways in sides.items():
            for way, facts in ways.items():
                print(
                    f"{name:12}{side:8}{way:10}{facts['element_wise_kb']:8.1f} kB per token"
                    f"{facts['launches']:6} launches"
                )
    print(f"padding     {found['padding_flops_before']:.1%} before, {found['padding_flops']:.1%}")


if __name__ == "__main__":
    main()
