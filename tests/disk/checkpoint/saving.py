"""A tiny model in the middle of training, and ways to save it and look at what was saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatrain import AdamW, Engine, HostModel, load_model
from megatrain.disk.checkpoint.manifest import read_manifest
from megatrain.disk.checkpoint.parts import Parts, checkpoint_parts
from megatrain.disk.checkpoint.restore import restore
from megatrain.disk.checkpoint.save import write_checkpoint
from megatrain.memory.kinds import TensorKind
from megatrain.optim.states import M, V
from testkit.engines import make_engine
from testkit.families import save_tiny
from testkit.plain import make_batch

KINDS = (TensorKind.HI, TensorKind.LO, M, V)
BATCHES = [make_batch([(1, 6), (1, 5)], seed=seed) for seed in range(6)]
State = dict[tuple[str, TensorKind], torch.Tensor]


def tiny_model(folder: Path, family: str = "llama", **settings: Any) -> HostModel:
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32}
    save_tiny(folder, family, torch.bfloat16, **sizes, head_dim=8)
    (folder / "tokenizer.json").write_text("{}")
    return load_model(folder, **settings)


@contextmanager
def training(home: HostModel, update: str = "late") -> Iterator[Engine]:
    optimizer = AdamW(learning_rate=0.01, max_grad_norm=1.0)
    with make_engine(home.decoder, home.store, optimizer=optimizer, update=update) as engine:
        yield engine


def train(engine: Engine, first: int, last: int) -> None:
    for batch in BATCHES[first:last]:
        engine.step(batch)
    engine.synchronize()


def state_of(home: HostModel) -> State:
    places = home.store.layout.places.items()
    return {
        (name, kind): home.store.param(name, kind).clone()
        for name, place in places
        for kind in KINDS
        if place.has(kind)
    }


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[key].view(torch.uint8), b[key].view(torch.uint8)) for key in a
    )


def save(engine: Engine, parts: Parts, parent: Path, **training: Any) -> Path:
    return write_checkpoint(parent, parts, engine.snapshot(), training)


def restored(folder: Path, home: HostModel) -> State:
    """Return what a checkpoint gives a store that held something else."""
    for kind in KINDS:
        home.store.arena(kind).fill_(0xAB)
    restore(folder, read_manifest(folder), checkpoint_parts(home))
    return state_of(home)
