"""Tiny models at home, cases of steps to play on them, and lanes that dawdle."""

from __future__ import annotations

import functools
import random
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from megatrain.batch import MicroBatch
from megatrain.devices.device import CpuDevice
from megatrain.engine.engine import Engine
from megatrain.lanes.lane import Lane
from megatrain.memory.arena import aligned_buffer
from megatrain.memory.kinds import TensorKind, kinds_on_disk, store_kinds
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.memory.tier.scratch_file import Tier, TierRegions
from megatrain.models.build import build_decoder
from megatrain.models.decoder import COMPUTE_DTYPES
from megatrain.optim.adamw import AdamW
from megatrain.optim.muon import Muon
from megatrain.step.ops import LANES, Op
from megatrain.step.shape import Update
from testkit.engines import make_engine
from testkit.slow_lane import SlowLane

VOCABULARY = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAX_GRAD_NORM = 5.0
"""Below the norm of some steps here and above that of others."""

Shapes = tuple[tuple[int, int], ...]
"""Rows and length of each micro-batch of a step."""
Form = Literal["plain", "padded", "packed", "flat"]
Tiered = Literal["none", "states"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sort:
    """A tiny model, described."""

    config: Callable[[], PreTrainedConfig]
    dtype: Literal["bf16", "fp32"] = "bf16"
    frozen: tuple[str, ...] = ()
    optimizer: str = "adamw"


OPTIMIZERS: Mapping[str, type[AdamW]] = {"adamw": AdamW, "muon": Muon}


def _llama(num_layers: int) -> PreTrainedConfig:
    return LlamaConfig(**SIZES, num_hidden_layers=num_layers, tie_word_embeddings=False)


def _gpt2() -> PreTrainedConfig:
    return GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2, n_inner=32,
        bos_token_id=1, eos_token_id=2, resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2,
    )  # fmt: skip


SORTS: Mapping[str, Sort] = {
    "llama of 2 layers": Sort(config=lambda: _llama(2)),
    "llama of 5 layers": Sort(config=lambda: _llama(5)),
    "llama in fp32": Sort(config=lambda: _llama(3), dtype="fp32"),
    "gemma, tied": Sort(config=lambda: GemmaConfig(**SIZES, num_hidden_layers=3)),
    "mixtral": Sort(
        config=lambda: MixtralConfig(
            **SIZES, num_hidden_layers=2, num_local_experts=4, tie_word_embeddings=False
        )
    ),
    "gpt2, tied, with dropout": Sort(config=_gpt2),
    "llama, partly frozen": Sort(
        config=lambda: _llama(4),
        frozen=("model.embed_tokens.*", "model.layers.0.*", "model.layers.2.*", "*mlp.up_proj*"),
    ),
    "gemma, all but two layers frozen": Sort(
        config=lambda: GemmaConfig(**SIZES, num_hidden_layers=3),
        frozen=("model.embed_tokens.*", "model.norm.*", "model.layers.0.*"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All that decides what is computed, and how lanes dawdle."""

    sort: str
    steps: tuple[Shapes, ...]
    update: Update
    slots: int = 2
    grad_slots: int = 2
    kept_layers: int = 0
    tile_tokens: int | None = None
    expert_pages: int = 1
    tape: Literal["device", "host"] = "device"
    tape_slots: int = 2
    copying: bool = True
    tier: Tiered = "none"
    """Used with an optimizer alone."""
    evaluates_after: tuple[int, ...] = ()
    """Numbers of the steps, from 0, that an evaluation follows."""
    form: Form = "plain"
    timing: int = 0
    """The seed of the delays."""


@dataclass(slots=True)
class Outcome:
    """What a case gives: numbers in order, and bytes of the store by what they are."""

    numbers: list[float | None] = field(default_factory=list)
    states: dict[str, Tensor] = field(default_factory=dict)

    def differences(self, other: Outcome) -> list[str]:
        """Return what is not equal to the bit."""
        found = [] if self.numbers == other.numbers else ["losses or norms"]
        assert self.states.keys() == other.states.keys()
        found += [n for n, b in self.states.items() if not torch.equal(b, other.states[n])]
        return found


class World:
    """A tiny model at home, and its first weights to go back to."""

    def __init__(self, sort: Sort) -> None:
        config = sort.config()
        self.decoder = build_decoder(config, sort.dtype, sort.frozen)
        self._optimizer = OPTIMIZERS[sort.optimizer]
        self._kinds = store_kinds(self.optimizer().states, waits=True)
        self._stores: dict[Tiered, Store] = {}
        self.store = self.store_of("none")
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=COMPUTE_DTYPES[sort.dtype])
        with torch.no_grad():
            for param in self.decoder.params:
                self.store.param(param.name, TensorKind.HI).copy_(model.get_parameter(param.name))
        self._first = self.bytes_of(*self.store.kinds)

    def store_of(self, tier: Tiered) -> Store:
        """Return the store that has on disk what `tier` says, made once."""
        if tier not in self._stores:
            layout = build_layout(self.decoder.blocks, self._kinds)
            regions = TierRegions(layout, kinds_on_disk(self._kinds, tier))
            on_disk = Tier(Path(tempfile.gettempdir()), regions) if regions.kinds else None
            self._stores[tier] = Store(layout, on_disk)
        return self._stores[tier]

    def rewind(self, tier: Tiered = "none") -> None:
        """Put the first weights back, moments and gradients of zero."""
        store = self.store_of(tier)
        for kind in store.kinds:
            for block in range(len(self.decoder.blocks)):
                put_block_bytes(store, block, kind, self._first[f"{kind} of block {block}"])

    def bytes_of(
        self, *kinds: TensorKind, tier: Tiered = "none", blocks: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        """Return copies of the store's bytes by kind and block."""
        store = self.store_of(tier)
        return {
            f"{kind} of block {block}": block_bytes(store, block, kind)
            for kind in kinds
            for block in (range(len(self.decoder.blocks)) if blocks is None else blocks)
        }

    def plain(self) -> PreTrainedModel:
        """Return the resident model with the store's weights."""
        config, dtype = self.decoder.config, self.decoder.model.dtype
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with torch.no_grad():
            for param in self.decoder.params:
                model.get_parameter(param.name).copy_(self.store.param(param.name, TensorKind.HI))
        return model

    def optimizer(self, *, max_grad_norm: float | None = MAX_GRAD_NORM) -> AdamW:
        return self._optimizer(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=max_grad_norm)

    def engine(self, case: Case, **changes: Any) -> Engine:
        """Return an engine for `case`, from the first weights."""
        tier: Tiered = "none" if case.update == "none" else case.tier
        self.rewind(tier)
        keywords: dict[str, Any] = {
            "tier": tier,
            "optimizer": None if case.update == "none" else self.optimizer(),
            "update": "late" if case.update == "none" else case.update,
            "device": CpuDevice(copying=case.copying),
            "slots": case.slots,
            "grad_slots": case.grad_slots,
            "kept_layers": case.kept_layers,
            "tile_tokens": case.tile_tokens,
            "expert_pages": case.expert_pages,
            "tape": case.tape,
            "tape_slots": case.tape_slots,
            "seed": 7,
            "deadline_s": 60.0,
            "on_nonfinite": "skip",
            "router_aux_loss": 0.0 if self.decoder.balancing is None else 0.1,
        }
        return make_engine(self.decoder, self.store_of(tier), **keywords | changes)

    def play(self, case: Case, **changes: Any) -> Outcome:
        """Return the outcome of `case`: on lanes, unless `changes` has reference=True."""
        outcome = Outcome()
        with self.engine(case, **{"lanes": dawdling_lanes(case.timing)} | changes) as engine:
            for number, shapes in enumerate(case.steps):
                batch = make_batch(shapes, seed=number, form=case.form)
                result = engine.step(batch)
                outcome.numbers += [*result.micro_losses, result.aux_loss, result.grad_norm]
                if case.update == "none":
                    engine.synchronize()
                    gradients = self.bytes_of(TensorKind.GRAD)
                    outcome.states |= {f"{n}, step {number}": b for n, b in gradients.items()}
                if number in case.evaluates_after:
                    outcome.numbers += [*engine.evaluate(batch), engine.aux_loss]
        tier: Tiered = "none" if case.update == "none" else case.tier
        changed = [kind for kind in self._kinds if kind is not TensorKind.GRAD]
        outcome.states |= self.bytes_of(*changed, tier=tier)
        return outcome


def block_bytes(store: Store, block: int, kind: TensorKind) -> Tensor:
    """Return a copy of a block's bytes in a kind, wherever they are."""
    num_bytes = store.layout.block_extents[block, kind].num_bytes
    if store.tier is None or kind not in store.on_disk:
        return store.block_bytes(block, kind).clone()
    part = store.tier.regions.part(block, kind)
    buffer = aligned_buffer(part.num_bytes)[: part.num_bytes]
    store.tier.read(block, {kind: buffer})
    return buffer[:num_bytes].clone()


def put_block_bytes(store: Store, block: int, kind: TensorKind, data: Tensor) -> None:
    """Set a block's bytes in a kind, wherever they are."""
    if store.tier is None or kind not in store.on_disk:
        store.block_bytes(block, kind).copy_(data)
        return
    part = store.tier.regions.part(block, kind)
    buffer = aligned_buffer(part.num_bytes)[: part.num_bytes]
    buffer[: len(data)] = data
    store.tier.write(block, {kind: buffer})


@functools.cache
def world_of(sort: str) -> World:
    """Return the world of one of SORTS, made once."""
    return World(SORTS[sort])


def make_batch(shapes: Shapes, *, seed: int, form: Form = "plain") -> list[MicroBatch]:
    """Return random micro-batches; the first two tokens of each row are not trained.

    Padded: the first row lacks its last token. Packed: each row holds two documents. Flat: they are
    all in one row.
    """
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for shape in shapes:
        ids = torch.randint(3, VOCABULARY, shape, generator=generator)
        labels = ids.clone()
        labels[:, :2] = -100
        mask = positions = None
        if form == "padded":
            mask = torch.ones_like(ids)
            mask[0, -1], labels[0, -1] = 0, -100
        elif form in ("packed", "flat"):
            first = torch.arange(shape[1] // 2)
            positions = torch.cat([first, torch.arange(shape[1] - len(first))]).repeat(shape[0], 1)
        made = MicroBatch(input_ids=ids, labels=labels, attention_mask=mask, position_ids=positions)
        batch.append(made.mapped(lambda one: one.view(1, -1)) if form == "flat" else made)
    return batch


def dawdling_lanes(timing: int) -> list[Lane]:
    """Return lanes of which each is quick, or pauses now and then, or before each op."""
    source = random.Random(timing)
    return [SlowLane(name, delay=_delay(source.randrange(2**32))) for name in LANES]


def _delay(seed: int) -> Callable[[Op], float]:
    source = random.Random(seed)
    how_often = source.choice([0.0, 0.2, 0.2, 1.0])
    longest_s = source.choice([2e-4, 1e-3])
    return lambda op: source.random() * longest_s if source.random() < how_often else 0.0
