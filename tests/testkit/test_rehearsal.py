"""A rehearsal knows the peak of device memory before a byte is allocated."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from transformers import LlamaConfig

from megatrain.batch import MicroBatch
from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.engine.gradients.outbox import OUTBOX_BYTES
from megatrain.memory.host import resident_bytes
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import build_layout
from megatrain.memory.ledger import Ledger
from megatrain.models.build import build_decoder
from megatrain.models.documents import BY_DOCUMENT
from megatrain.optim.states import WITH_CLIP
from megatrain.step.settings import StepSettings
from megatrain.step.shape import StepShape
from proofs.races import CONFIGS, world_of
from testkit.cases import at_a_push
from testkit.rehearsal import device_ledger
from testkit.simulated.accelerator import Simulator
from testkit.simulated.watched import watched
from testkit.worlds import Case, make_batch

CHUNK_TOKENS = 16


class Configuration(NamedTuple):
    """One step."""

    family: str
    dtype: str
    tape: Any
    slots: int
    grad_slots: Any
    tile_tokens: int | None
    shapes: tuple[tuple[int, int], ...]

    @property
    def settings(self) -> StepSettings:
        return StepSettings(
            slots=self.slots,
            grad_slots=self.grad_slots,
            tape=self.tape,
            tile_tokens=self.tile_tokens,
            chunk_tokens=CHUNK_TOKENS,
        )

    @property
    def batch(self) -> list[MicroBatch]:
        """Packed; in one row where the family attends by document."""
        flat = world_of(self.family, self.dtype).decoder.config.model_type in BY_DOCUMENT
        return make_batch(self.shapes, seed=1, form="flat" if flat else "packed")


SHAPES = [((2, 16), (1, 24)), ((1, 32),), ((1, 8), (3, 8), (1, 16))]
CONFIGURATIONS = [
    Configuration(
        family, dtype, tape, 2 + number % 3, 1 + number % 2, (None, 8, 12, 16)[number % 4],
        SHAPES[number % 3],
    )
    for number, (family, dtype, tape) in enumerate(
        itertools.product(CONFIGS, ("bf16", "fp32"), ("device", "host"))
    )
] + [
    Configuration(family, "bf16", "host", 4, 1, 8, ((2, 24), (1, 8))) for family in CONFIGS
]  # fmt: skip


def rehearsed(configuration: Configuration) -> Ledger:
    world = world_of(configuration.family, configuration.dtype)
    decoder, settings = world.decoder, configuration.settings
    shape = settings.shape(
        num_blocks=len(decoder.blocks),
        copying=True,
        updates=False,
        num_micro=len(configuration.shapes),
        tied=decoder.tied,
    )
    return device_ledger(
        decoder,
        world.store.layout,
        shape,
        configuration.shapes,
        settings,
        complete=lambda _: configuration.batch,
    )


def played(configuration: Configuration) -> int:
    """The most bytes that the real step had on the simulated accelerator."""
    simulator = Simulator(policy="early")
    settings = configuration.settings
    case = Case(
        sort="", steps=(), update="none", tape=settings.tape, slots=settings.slots,
        grad_slots=settings.grad_slots,
    )  # fmt: skip
    world = world_of(configuration.family, configuration.dtype)
    with (
        watched(simulator),
        world.engine(
            case,
            device=AcceleratorDevice(simulator),
            chunk_tokens=CHUNK_TOKENS,
            tile_tokens=settings.tile_tokens,
        ) as engine,
    ):
        engine.step(configuration.batch)
        return engine.device.peak_bytes


@pytest.mark.merge
@pytest.mark.parametrize("configuration", at_a_push(CONFIGURATIONS, 8), ids=str)
def test_the_rehearsed_peak_is_the_real_one(configuration: Configuration) -> None:
    planned = rehearsed(configuration).total("device")
    assert played(configuration) == pytest.approx(planned, rel=0.02)


@pytest.mark.merge
def test_tiles_make_bytes_per_token_constant() -> None:
    """Of what is reserved before a step the tape alone depends on tokens; a tile does not."""
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=64,
        tie_word_embeddings=False,
        max_position_embeddings=1 << 18,
    )
    decoder = build_decoder(config, "bf16")
    layout = build_layout(decoder.blocks, WITH_CLIP)
    settings = StepSettings(tile_tokens=1024, tape="host", chunk_tokens=1024)
    shape = settings.shape(num_blocks=3, copying=True, updates=False)
    per_token = []
    for tokens in (1 << 13, 1 << 18):
        ledger = device_ledger(decoder, layout, shape, [(1, tokens)], settings)
        sizes = {line.purpose: line.num_bytes for line in ledger.lines}
        per_token.append((sizes["working memory"] + sizes["tape"]) / tokens)
    assert per_token[1] == pytest.approx(per_token[0], rel=0.03)


def test_rows_of_the_embedding_are_rehearsed_in_place_of_the_table() -> None:
    world = world_of("llama", "bf16")
    shape = StepShape(num_blocks=len(world.decoder.blocks))
    whole, rows = (
        device_ledger(
            world.decoder, world.store.layout, replace(shape, gather_embedding=gathers), [(1, 8)]
        )
        for gathers in (False, True)
    )
    table = world.store.param("model.embed_tokens.weight", TensorKind.HI)
    purposes = {line.purpose: line.num_bytes for line in rows.lines}
    assert purposes["embedding rows"] == 8 * table[0].nbytes
    saved = whole.total("device") - rows.total("device")
    assert saved == pytest.approx(table.nbytes - 8 * table[0].nbytes, abs=600)


def test_a_large_model_is_rehearsed_without_its_weights() -> None:
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=3,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=False,
    )
    decoder = build_decoder(config, "bf16")
    shape = StepShape(num_blocks=5, tape="host")
    before = resident_bytes()
    ledger = device_ledger(decoder, build_layout(decoder.blocks, WITH_CLIP), shape, [(1, 64)])
    assert resident_bytes() - before < 200 << 20
    by_purpose = {line.purpose: line.num_bytes for line in ledger.lines}
    layer = 2 * (4096 * (4096 * 2 + 1024 * 2 + 3 * 14336) + 2 * 4096)
    table = 2 * 128256 * 4096
    assert by_purpose["weight slots"] == pytest.approx(2 * layer + 2 * table, rel=0.01)
    assert by_purpose["gradient slots"] == pytest.approx(2 * 2 * layer + 2 * table, rel=0.01)
    assert by_purpose["outbox"] == OUTBOX_BYTES
