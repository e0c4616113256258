"""Why masters matter: continued training of a bf16 model at a small learning rate, three ways.

    python -m benchmarks.masters --json [--picture docs/masters.png]

A small Llama learns to count in strange steps until its loss is low, and is saved in bf16. Training
then goes on from those weights with new data at learning rate 1e-5, with the same batches, as

    ours       bf16 weights with split fp32 masters, through the engine
    fp32       the resident model in fp32, torch.optim.AdamW
    no master  the resident model in bf16, torch.optim.AdamW on the bf16 weights

and the figures say how far each ends from where fp32 ends:

    moved_share          weights that differ from the start, of all (fp32: nearly all)
    distance             |weights - start| over that of fp32: how much of the way was gone
    direction            cosine between the way gone and that of fp32
    loss                 on held-out data, at the end

`ours` is read as the masters, `no master` as its bf16 weights.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import megatrain as mt

RATE, VOCAB = 1e-5, 512
Losses = list[float]


def main() -> None:
    """Run the comparison and print one JSON object, or a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--picture", type=Path, default=None, help="draw the loss curves here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        figures, curves = compare(Path(scratch), options.steps)
    if options.picture is not None:
        draw(curves, options.picture)
    if options.json:
        print(json.dumps(figures))
    else:
        for name, row in figures.items():
            print(f"{name:10}", "  ".join(f"{key} {value:.4g}" for key, value in row.items()))


def compare(scratch: Path, num_steps: int) -> tuple[dict[str, dict[str, float]], dict[str, Losses]]:
    """Return the figures and the held-out loss along the way, for each of the three."""
    start = scratch / "start"
    _pretrain(start)
    first = _weights(AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32))
    runs = {"fp32": _plain(torch.float32), "ours": _ours, "no master": _plain(torch.bfloat16)}
    ends: dict[str, Tensor] = {}
    curves: dict[str, Losses] = {}
    for name, run in runs.items():
        ends[name], curves[name] = run(start, num_steps)
    way = ends["fp32"] - first
    figures = {}
    for name, end in ends.items():
        gone = end - first
        figures[name] = {
            "moved_share": float((gone != 0).double().mean()),
            "distance": float(gone.norm() / way.norm()),
            "direction": float(F.cosine_similarity(gone, way, dim=0)),
            "loss": curves[name][-1],
        }
    return figures, curves


def make_batch(seed: int, step_size: int) -> Tensor:
    """Return rows that count in `step_size` from a random number, modulo the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, VOCAB, (8, 1), generator=generator)
    return (first + step_size * torch.arange(32)) % VOCAB


def _pretrain(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=352, num_hidden_layers=4, vocab_size=VOCAB,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(400):
        torch.autograd.backward(_loss(model, make_batch(step, 1)))
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(folder)


def _loss(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def _weights(model: PreTrainedModel) -> Tensor:
    return torch.cat([p.detach().float().flatten() for _, p in sorted(model.named_parameters())])


def _plain(dtype: torch.dtype) -> Callable[[Path, int], tuple[Tensor, Losses]]:
    def run(start: Path, num_steps: int) -> tuple[Tensor, Losses]:
        model = AutoModelForCausalLM.from_pretrained(start, dtype=dtype).train()
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0
        )
        losses = []
        for step in range(num_steps):
            if step % 10 == 0:
                losses.append(_held_out(model))
            torch.autograd.backward(_loss(model, make_batch(10_000 + step, 3)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(_held_out(model))
        return _weights(model), losses

    return run


def _held_out(model: PreTrainedModel) -> float:
    with torch.no_grad():
        return float(_loss(model, make_batch(1, 3)))


def _ours(start: Path, num_steps: int) -> tuple[Tensor, Losses]:
    home = mt.load_model(start, dtype="bf16")
    optimizer = mt.AdamW(learning_rate=RATE)
    losses = []

    def held_out() -> float:
        ids = make_batch(1, 3)
        total, count = engine.evaluate([mt.MicroBatch(input_ids=ids, labels=ids)])
        return total / count

    settings = mt.StepSettings(update="in_backward")
    with mt.Engine(home.decoder, home.store, optimizer=optimizer, settings=settings) as engine:
        for step in range(num_steps):
            if step % 10 == 0:
                losses.append(held_out())
            ids = make_batch(10_000 + step, 3)
            engine.step([mt.MicroBatch(input_ids=ids, labels=ids)])
        losses.append(held_out())
    names = sorted(home.store.layout.places)
    return torch.cat([home.store.master(name).flatten() for name in names]), losses


def draw(curves: dict[str, Losses], path: Path) -> None:
    """Draw the held-out losses along the way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    styles = {"fp32": ("black", "-", 4), "ours": ("tab:orange", "--", 2)}
    for name, losses in curves.items():
        color, line, width = styles.get(name, ("tab:blue", "-", 2))
        steps = [10 * index for index in range(len(losses))]
        axes.plot(steps, losses, line, color=color, linewidth=width, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss per token")
    axes.set_title("Continued training from bf16 weights, learning rate 1e-5")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
