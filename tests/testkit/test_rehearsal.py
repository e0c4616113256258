"""A rehearsal knows the peak of device memory before a byte is allocated."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from transformers import LlamaConfig

from megatrain.devices.accelerator import Accelerator
from megatrain.engine.gradients import OUTBOX_BYTES
from megatrain.memory.host import resident_bytes
from megatrain.memory.kinds import Kind
from megatrain.memory.layout import build_layout
from megatrain.memory.ledger import Ledger
from megatrain.models.decoder import build_decoder
from megatrain.optim.states import WITH_CLIP
from megatrain.step.shape import StepShape
from proofs.races import CONFIGS, world_of
from testkit.cases import of_the_day
from testkit.rehearsal import device_ledger
from testkit.simulated.accelerator import Simulator
from testkit.simulated.watched import watched
from testkit.worlds import Case, make_batch

CHUNK_TOKENS = 16
CONFIGURATIONS = [
    (family, dtype, tape, slots, shapes)
    for number, (family, dtype, tape) in enumerate(
        itertools.product(CONFIGS, ("bf16", "fp32"), ("device", "host"))
    )
    for slots, shapes in [
        (2 + number % 3, [((2, 16), (1, 24)), ((1, 32),), ((1, 8), (3, 8), (1, 16))][number % 3])
    ]
] + [(family, "bf16", "host", 4, ((2, 24), (1, 8))) for family in CONFIGS]


def rehearsed(family: str, dtype: str, tape: str, slots: int, shapes: object) -> Ledger:
    world = world_of(family, dtype)
    shape = StepShape(
        num_blocks=len(world.decoder.blocks),
        num_micro=len(shapes),  # type: ignore[arg-type]
        slots=slots,
        tape=tape,  # type: ignore[arg-type]
        tied=world.decoder.tied,
    )
    return device_ledger(world.decoder, world.store.layout, shape, shapes, CHUNK_TOKENS)  # type: ignore[arg-type]


def played(family: str, dtype: str, tape: str, slots: int, shapes: object) -> int:
    """The most bytes that the real step had on the simulated accelerator."""
    simulator = Simulator(policy="early")
    case = Case(sort="", steps=(), update="none", tape=tape, slots=slots)  # type: ignore[arg-type]
    world = world_of(family, dtype)
    with (
        watched(simulator),
        world.engine(case, device=Accelerator(simulator), chunk_tokens=CHUNK_TOKENS) as engine,
    ):
        engine.step(make_batch(shapes, seed=1, form="packed"))  # type: ignore[arg-type]
        return engine.device.peak_bytes


def test_there_are_thirty() -> None:
    assert len(CONFIGURATIONS) >= 30


@pytest.mark.parametrize("configuration", of_the_day(CONFIGURATIONS, 8), ids=str)
def test_the_rehearsed_peak_is_the_real_one(configuration: tuple[object, ...]) -> None:
    planned = rehearsed(*configuration).total("device")  # type: ignore[arg-type]
    assert played(*configuration) == pytest.approx(planned, rel=0.02)  # type: ignore[arg-type]


def test_another_plan_would_be_noticed() -> None:
    family, dtype, tape, slots, shapes = CONFIGURATIONS[0]
    planned = rehearsed(family, dtype, tape, slots + 1, shapes).total("device")
    assert played(family, dtype, tape, slots, shapes) != pytest.approx(planned, rel=0.02)


def test_rows_of_the_embedding_are_rehearsed_in_place_of_the_table() -> None:
    world = world_of("llama", "bf16")
    shape = StepShape(num_blocks=len(world.decoder.blocks))
    whole, rows = (
        device_ledger(
            world.decoder, world.store.layout, replace(shape, gather_embedding=gathers), [(1, 8)]
        )
        for gathers in (False, True)
    )
    table = world.store.param("model.embed_tokens.weight", Kind.HI)
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
