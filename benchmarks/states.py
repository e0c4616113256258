"""Moments in bf16 and 8 bits against fp32: where training ends, and how far weights move.

    python -m benchmarks.states --json [--seeds 3] [--steps 200] [--picture docs/states.png]

A small Llama on bytes learns the sources of Python's standard library, through the engine, in fp32
so that a processor without bf16 is as fast. From one start and with the same batches it trains with
moments in fp32, bf16 and 8 bits; beside them stand both rounded to nearest (testkit/nearest.py),
the 8-bit AdamW of torchao and of bitsandbytes where they are installed (comparison only), and fp32
with other batches, which is the noise that any change of the data makes.

    NAME_loss_ratio       evaluation loss after the last step, over that of fp32 moments
    NAME_distance_ratio   |weights - start| over that of fp32 moments, from trained weights at
                          learning rate 1e-5, with new moments
    NAME_falling_ratio    the same after 3000 updates by noise whose size falls tenfold, with
                          beta2 = 0.999: v must follow it down

NAME is bf16, int8, bf16_nearest, int8_nearest, torchao, bitsandbytes or other_batches. A ratio is
the mean over seeds, and NAME_..._spread is the largest minus the smallest.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import megatrain as mt
from megatrain.memory.kinds import store_kinds
from megatrain.optim.views import Treatment, Views
from testkit.nearest import NearestKernel

RATE, SMALL_RATE, WARM_UP = 5e-4, 1e-5, 20
ROWS, LENGTH, EVALUATION_ROWS = 8, 64, 128
FALLING_UPDATES, FALLING_ELEMENTS = 3000, 4096
MODEL = LlamaConfig(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, vocab_size=256,
    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=LENGTH,
    tie_word_embeddings=False, dtype="float32",
)  # fmt: skip

TARGETS = {
    "bf16_loss_ratio": (0.0, 1.002),
    "int8_loss_ratio": (0.0, 1.005),
    "bf16_distance_ratio": (0.98, 1.02),
    "int8_distance_ratio": (0.98, 1.02),
}
RIVALS = {"torchao": "torchao.optim", "bitsandbytes": "bitsandbytes.optim"}
"""Modules with an AdamW8bit."""

Curves = dict[str, list[float]]
Rate = Callable[[int], float]
"""By step, counted from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """How an AdamW of ours keeps its moments."""

    state: str
    nearest: bool = False

    def adamw(self, rate: Rate | float, seed: int = 0, beta2: float = 0.95) -> mt.AdamW:
        """Return the optimizer; `seed` is that of stochastic rounding."""
        adamw = mt.AdamW(learning_rate=rate, betas=(0.9, beta2), state=self.state, seed=seed)
        return replace(adamw, kernel=NearestKernel("to nearest")) if self.nearest else adamw


FP32 = Moments(state="fp32")
OURS = {
    "bf16": Moments(state="bf16"),
    "int8": Moments(state="8bit"),
    "bf16_nearest": Moments(state="bf16", nearest=True),
    "int8_nearest": Moments(state="8bit", nearest=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What all contestants do: train the model of a folder on these batches, at these rates."""

    start: Path
    num_steps: int
    seed: int
    """Of the batches."""
    rate: Rate
    every: int = 10**9
    """Steps between evaluations, besides the one at the end."""

    def batches(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.num_steps):
            yield rows_of(sources()[0], ROWS, generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Where a contestant came to."""

    weights: Tensor
    losses: list[float]
    """On the evaluation rows, the last at the end."""


Contestant = Callable[[Task], End]


@cache
def sources() -> tuple[Tensor, Tensor]:
    """Return the bytes of the standard library's modules: to train on, and to evaluate on."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = len(ids) * 19 // 20
    return ids[:cut], ids[cut:]


def rows_of(ids: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return (count, LENGTH) token ids from random places."""
    begins = torch.randint(0, len(ids) - LENGTH, (count,), generator=generator)
    return ids[begins[:, None] + torch.arange(LENGTH)].long()


@cache
def evaluation_rows() -> Tensor:
    return rows_of(sources()[1], EVALUATION_ROWS, torch.Generator().manual_seed(0))


def decaying(num_steps: int) -> Rate:
    """Return a warm-up and a straight line to zero."""
    return lambda step: RATE * min((step + 1) / WARM_UP, (num_steps - step) / num_steps)


def ours(moments: Moments, save: Path | None = None) -> Contestant:
    """Train through the engine. `save` is a folder for the weights of the end."""

    def run(task: Task) -> End:
        adamw = moments.adamw(task.rate, task.seed)
        kinds = store_kinds(adamw.states, waits=False)
        home = mt.load_model(task.start, dtype="fp32", kinds=kinds)
        settings, losses = mt.StepSettings(update="in_backward"), []
        with mt.Engine(home.decoder, home.store, optimizer=adamw, settings=settings) as engine:
            for step, ids in enumerate(task.batches()):
                if step % task.every == 0:
                    losses.append(_evaluate(engine))
                engine.step([mt.MicroBatch(input_ids=ids, labels=ids)])
            losses.append(_evaluate(engine))
        if save is not None:
            home.export(save)
        names = sorted(home.store.layout.places)
        weights = torch.cat([home.store.master(name).flatten() for name in names])
        return End(weights=weights, losses=losses)

    return run


def _evaluate(engine: mt.Engine) -> float:
    ids = evaluation_rows()
    total, count = engine.evaluate([mt.MicroBatch(input_ids=ids, labels=ids)])
    return total / count


def theirs(make: Callable[..., torch.optim.Optimizer]) -> Contestant:
    """Train the resident model with another's optimizer."""

    def run(task: Task) -> End:
        model = AutoModelForCausalLM.from_pretrained(task.start, dtype=torch.float32).train()
        named = dict(sorted(model.named_parameters()))
        optimizer = make(named.values(), lr=task.rate(0), betas=(0.9, 0.95), weight_decay=0.0)
        losses = []
        for step, ids in enumerate(task.batches()):
            if step % task.every == 0:
                losses.append(_loss(model, evaluation_rows()).item())
            _set_rate(optimizer, task.rate(step))
            torch.autograd.backward(_loss(model, ids))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(_loss(model, evaluation_rows()).item())
        weights = torch.cat([weight.detach().flatten() for weight in named.values()])
        return End(weights=weights, losses=losses)

    return run


def _loss(model: torch.nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def rivals() -> tuple[dict[str, Contestant], dict[str, str]]:
    """Return the 8-bit optimizers that are installed, and why the others are left out."""
    found: dict[str, Contestant] = {}
    left_out: dict[str, str] = {}
    for name, module in RIVALS.items():
        try:
            found[name] = theirs(importlib.import_module(module).AdamW8bit)
        except ImportError as error:
            left_out[name] = str(error)
    return found, left_out


def measure_seed(
    folder: Path, seed: int, num_steps: int, contestants: Mapping[str, Contestant]
) -> tuple[dict[str, float], Curves]:
    """Return the ratios for one start, and the evaluation losses along the way."""
    start, trained = folder / "start", folder / "trained"
    torch.manual_seed(seed)
    LlamaForCausalLM(MODEL).save_pretrained(start)
    every = max(1, num_steps // 10)
    task = Task(start=start, num_steps=num_steps, seed=seed, rate=decaying(num_steps), every=every)
    exact = ours(FP32, save=trained)(task)
    ends = {name: run(task) for name, run in contestants.items()}
    ends["other_batches"] = ours(FP32)(replace(task, seed=seed + 1000))
    ratios = {f"{name}_loss_ratio": end.losses[-1] / exact.losses[-1] for name, end in ends.items()}

    small = Task(start=trained, num_steps=num_steps // 2, seed=seed, rate=lambda step: SMALL_RATE)
    way = (ours(FP32)(small).weights - exact.weights).norm()
    for name, run in contestants.items():
        gone = (run(small).weights - exact.weights).norm()
        ratios[f"{name}_distance_ratio"] = float(gone / way)
    return ratios, {"fp32": exact.losses} | {name: end.losses for name, end in ends.items()}


def falling_distances(moments: Moments, num_updates: int) -> list[float]:
    """Return |weights| at each hundredth of the way from zero, by noise that falls tenfold."""
    adamw, generator = moments.adamw(SMALL_RATE, beta2=0.999), torch.Generator().manual_seed(0)
    sizes = 10 ** -(2 * torch.rand(FALLING_ELEMENTS, generator=generator))
    states = tuple(
        torch.zeros(
            FALLING_ELEMENTS // kind.elements_per_number, dtype=getattr(torch, str(kind.fp32))
        )
        for kind in adamw.states
    )
    weight = torch.zeros(FALLING_ELEMENTS)
    views = Views(weight=weight, lo=None, states=states, treatment=Treatment(1.0, 0.0), first=0)
    distances = [0.0]
    for number in range(1, num_updates + 1):
        fallen = 10 ** -min(1.0, 3 * number / num_updates)
        gradient = torch.randn(FALLING_ELEMENTS, generator=generator) * sizes * fallen
        adamw.update(views, gradient, step=number, number=number, scale=1.0)
        if number % (num_updates // 100) == 0:
            distances.append(float(weight.norm()))
    return distances


def measure(
    num_seeds: int, num_steps: int, num_updates: int = FALLING_UPDATES
) -> tuple[dict[str, Any], Curves, Curves]:
    """Return the figures, the losses of the first seed and the distances by falling noise."""
    found, left_out = rivals()
    contestants = {name: ours(moments) for name, moments in OURS.items()} | found
    by_seed: list[dict[str, float]] = []
    losses: Curves = {}
    for seed in range(num_seeds):
        with tempfile.TemporaryDirectory() as scratch:
            ratios, curves = measure_seed(Path(scratch), seed, num_steps, contestants)
        by_seed.append(ratios)
        losses = losses or curves
    distances = {
        name: falling_distances(moments, num_updates)
        for name, moments in {"fp32": FP32, **OURS}.items()
    }
    figures: dict[str, Any] = {"seeds": num_seeds, "steps": num_steps}
    for name in by_seed[0]:
        values = [ratios[name] for ratios in by_seed]
        figures[name] = round(statistics.mean(values), 5)
        figures[f"{name}_spread"] = round(max(values) - min(values), 5)
    for name in OURS:
        ratio = distances[name][-1] / distances["fp32"][-1]
        figures[f"{name}_falling_ratio"] = round(ratio, 5)
    return figures | {"left_out": left_out, "targets": TARGETS}, losses, distances


def draw(losses: Curves, distances: Curves, num_steps: int, path: Path) -> None:
    """Draw the evaluation losses, and the ways gone by falling noise."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    styles = {
        "fp32": ("black", "-", 4), "bf16": ("tab:orange", "-", 2), "int8": ("tab:green", "--", 2),
        "bf16_nearest": ("tab:blue", "-", 2), "int8_nearest": ("tab:blue", ":", 2),
    }  # fmt: skip
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, (color, line, width) in styles.items():
        style: dict[str, Any] = {"color": color, "linestyle": line, "linewidth": width}
        label = name.replace("int8", "8-bit").replace("_", ", to ")
        steps = [num_steps * index / (len(losses[name]) - 1) for index in range(len(losses[name]))]
        left.plot(steps, losses[name], label=label, **style)
        right.plot([distance / SMALL_RATE for distance in distances[name]], label=label, **style)
    left.set(xlabel="step", ylabel="evaluation loss per byte", title="A small Llama, from scratch")
    right.set(
        xlabel="% of 3000 updates", ylabel="distance / learning rate",
        title="Gradients that fall tenfold, beta2 = 0.999",
    )  # fmt: skip
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the comparison and print one JSON object, or a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--picture", type=Path, default=None, help="draw the curves here")
    options = parser.parse_args()
    figures, losses, distances = measure(options.seeds, options.steps)
    if options.picture is not None:
        draw(losses, distances, options.steps, options.picture)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:36} {value}")


if __name__ == "__main__":
    main()
