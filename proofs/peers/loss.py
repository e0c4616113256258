"""Loss of peers against synchronous training, at equal tokens, on real text.

    python -m proofs.peers.loss --json
    python -m proofs.peers.loss --svg docs/peers.svg

The text is the source of Python's own library, byte by byte; every tenth file is held out. The
model is a small decoder in plain torch whose weights have one more dimension, the peer, so that all
peers take a step in one call. All runs begin from weights after WARM synchronous steps and see as
many tokens: `synchronous` takes AdamW steps on the batches of all peers together; the others take
rounds of H steps with the differences and the outer step of megatrain/peers. Ends with 1 if the
loss of rounds is more than 2 % above that of synchronous training, or 3 % with sparse differences,
or if these have not 100 times fewer bytes than bf16 gradients of every step.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from megatrain.peers.anchor import OuterStep
from megatrain.peers.compression import Compression, Plain, Sparse
from proofs.peers.picture import picture

NUM_PEERS, INNER_STEPS, NUM_ROUNDS, WARM = 8, 30, 10, 120
WIDTH, LAYERS, HEADS, LENGTH, ROWS = 32, 1, 2, 64, 16
RATE, OUTER_RATE, MOMENTUM, DENSITY = 2e-3, 1.0, 0.7, 1 / 4
LIMITS = {"rounds": 1.02, "sparse": 1.03}


def texts() -> tuple[Tensor, Tensor]:
    """Return the bytes of Python's library, to train on and held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, path in enumerate(files):
        parts[number % 10 == 9].append(path.read_bytes())
    found = [np.frombuffer(b"\n".join(part), np.uint8).astype(np.int64) for part in parts]
    return torch.from_numpy(found[0]), torch.from_numpy(found[1])


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the params of the model."""
    found: dict[str, tuple[int, ...]] = {"embed": (256, WIDTH), "place": (LENGTH, WIDTH)}
    for layer in range(LAYERS):
        found[f"{layer}.qkv"] = (WIDTH, 3 * WIDTH)
        found[f"{layer}.out"] = (WIDTH, WIDTH)
        found[f"{layer}.up"] = (WIDTH, 4 * WIDTH)
        found[f"{layer}.down"] = (4 * WIDTH, WIDTH)
    return found | {"head": (WIDTH, 256)}


def unflat(flat: Tensor) -> dict[str, Tensor]:
    """Return the params in flat weights. (peers, elements)"""
    found, start = {}, 0
    for name, shape in shapes().items():
        size = math.prod(shape)
        found[name] = flat[:, start : start + size].view(len(flat), *shape)
        start += size
    return found


def loss_of(flat: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean loss of each peer on its own rows. (peers, rows, length + 1) -> (peers,)"""
    params, peers = unflat(flat), len(flat)
    inputs, targets = tokens[:, :, :-1], tokens[:, :, 1:]
    rows = inputs.shape[1]
    index = torch.arange(peers)[:, None, None]
    hidden = params["embed"][index, inputs] + params["place"][:, None]
    for layer in range(LAYERS):
        normed = functional.rms_norm(hidden, (WIDTH,)).flatten(1, 2)
        mixed = torch.bmm(normed, params[f"{layer}.qkv"])
        q, k, v = (
            one.view(peers * rows, LENGTH, HEADS, -1).transpose(1, 2)
            for one in mixed.chunk(3, dim=-1)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        joined = seen.transpose(1, 2).reshape(peers, rows * LENGTH, WIDTH)
        hidden = hidden + torch.bmm(joined, params[f"{layer}.out"]).view_as(hidden)
        normed = functional.rms_norm(hidden, (WIDTH,)).flatten(1, 2)
        wide = functional.silu(torch.bmm(normed, params[f"{layer}.up"]))
        hidden = hidden + torch.bmm(wide, params[f"{layer}.down"]).view_as(hidden)
    last = functional.rms_norm(hidden, (WIDTH,)).flatten(1, 2)
    logits = torch.bmm(last, params["head"])
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.reshape(-1), reduction="none")
    return losses.view(peers, -1).mean(dim=1)


class Inner:
    """AdamW on flat weights, for each peer alone."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat.clone().requires_grad_()
        self._optimizer = torch.optim.AdamW([self.flat], lr=RATE, betas=(0.9, 0.95))

    def step(self, tokens: Tensor, rate: float) -> None:
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.zero_grad()
        torch.autograd.backward(loss_of(self.flat, tokens).sum())
        with torch.no_grad():  # each peer clips its own gradient
            assert self.flat.grad is not None
            norm = self.flat.grad.norm(dim=1, keepdim=True)
            self.flat.grad *= (1.0 / norm).clamp(max=1.0)
        self._optimizer.step()


def batch(text: Tensor, step: int) -> Tensor:
    """Return the rows of a step for all peers. (peers, rows, length + 1)"""
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH - 1, (NUM_PEERS, ROWS, 1), generator=draw)
    return text[starts + torch.arange(LENGTH + 1)]


def held_out_loss(flat: Tensor, text: Tensor) -> float:
    """Return the loss of one set of weights on held-out rows, the same ones each time."""
    draw = torch.Generator().manual_seed(10**6)
    starts = torch.randint(len(text) - LENGTH - 1, (1, 256, 1), generator=draw)
    with torch.no_grad():
        return float(loss_of(flat[:1], text[starts + torch.arange(LENGTH + 1)]))


def synchronous(start: Tensor, first: int, num_steps: int, texts: tuple[Tensor, Tensor]) -> Any:
    """Return weights and the curve of steps on the batches of all peers together."""
    inner, curve = Inner(start), []
    for step in range(num_steps):
        tokens = batch(texts[0], first + step).view(1, NUM_PEERS * ROWS, -1)
        inner.step(tokens, rate_at(first + step))
        if (step + 1) % INNER_STEPS == 0:
            curve.append((step + 1, held_out_loss(inner.flat.detach(), texts[1])))
    return inner.flat.detach().clone(), curve


def in_rounds(
    start: Tensor, first: int, form: Compression, texts: tuple[Tensor, Tensor]
) -> dict[str, Any]:
    """Return the curve of rounds, and their bytes."""
    anchor = start[0].numpy().copy()
    buffer = np.zeros_like(anchor)
    errors: list[Any] = [None] * NUM_PEERS
    outer = OuterStep(rate=OUTER_RATE, momentum=MOMENTUM)
    inner, curve, num_bytes = Inner(start.repeat(NUM_PEERS, 1)), [], 0
    for number in range(NUM_ROUNDS):
        for step in range(INNER_STEPS):
            at = first + number * INNER_STEPS + step
            inner.step(batch(texts[0], at), rate_at(at))
        made = [
            form.encode(anchor, weights.numpy(), errors[peer])
            for peer, weights in enumerate(inner.flat.detach())
        ]
        errors = [one.error for one in made]
        num_bytes += sum(len(one.data) for one in made)
        sent = [form.decode(memoryview(one.data), len(anchor)) for one in made]
        moved, kept = outer(anchor, buffer, sent)
        assert kept is not None
        anchor, buffer = moved, kept
        with torch.no_grad():
            inner.flat.copy_(torch.from_numpy(anchor))
        flat = torch.from_numpy(anchor)[None]
        curve.append(((number + 1) * INNER_STEPS, held_out_loss(flat, texts[1])))
    return {"curve": curve, "loss": curve[-1][1], "bytes": num_bytes}


def rate_at(step: int) -> float:
    """Return the learning rate: a warm-up, then a cosine to a tenth over the whole run."""
    whole = WARM + NUM_ROUNDS * INNER_STEPS
    return RATE * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / whole))


def measured() -> dict[str, Any]:
    torch.set_num_threads(1)
    began, read = time.monotonic(), texts()
    draw = torch.Generator().manual_seed(0)
    size = sum(math.prod(shape) for shape in shapes().values())
    start = 0.02 * torch.randn(1, size, generator=draw)
    warm, _ = synchronous(start, 0, WARM, read)
    num_steps = NUM_ROUNDS * INNER_STEPS
    _, curve = synchronous(warm, WARM, num_steps, read)
    found: dict[str, Any] = {
        "peers": NUM_PEERS, "inner_steps": INNER_STEPS, "steps": num_steps, "params": size,
        "tokens": num_steps * NUM_PEERS * ROWS * LENGTH,
        "synchronous": {"curve": curve, "loss": curve[-1][1]},
        "rounds": in_rounds(warm, WARM, Plain(), read),
        "sparse": in_rounds(warm, WARM, Sparse(density=DENSITY, bits=4), read),
    }  # fmt: skip
    gradients = 2 * size * num_steps * NUM_PEERS
    for name in ("rounds", "sparse"):
        found[name]["of_synchronous"] = found[name]["loss"] / curve[-1][1]
        found[name]["times_fewer_bytes"] = gradients / found[name]["bytes"]
    return found | {"seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--svg", type=Path, help="picture of the curves to write")
    options = parser.parse_args()
    found = measured()
    if options.svg is not None:
        options.svg.write_text(picture(found))
    if options.json:
        print(json.dumps(found))
    else:
        for name in ("synchronous", "rounds", "sparse"):
            print(f"{name:12} {found[name]['loss']:.4f}", end="  ")
            print(f"{found[name].get('of_synchronous', 1.0):.4f} of synchronous")
    failed = [name for name, limit in LIMITS.items() if found[name]["of_synchronous"] > limit]
    if found["sparse"]["times_fewer_bytes"] < 100:
        failed.append("bytes")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
