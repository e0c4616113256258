"""The ledger from sizes alone is the layout's, and the rehearsal's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan.configurations import Configuration
from benchmarks.plan.memory import GIVING_BACK, MEMORY_TARGETS, measure_memory
from megatrain import load_model
from megatrain.config.sections import LoraSettings
from megatrain.engine.residence import WORKING_HIDDEN
from megatrain.features.registry import places_of
from megatrain.memory.kinds import TensorKind, divides_matrices, kinds_on_disk, store_kinds
from megatrain.memory.layout import build_layout
from megatrain.memory.ledger import Ledger
from megatrain.memory.store import Store, store_ledger
from megatrain.memory.tier.ring import TierRing
from megatrain.memory.tier.scratch_file import Tier, TierRegions
from megatrain.models.adapters.lora import LoraConfig
from megatrain.models.decoder import Decoder
from megatrain.optim.states import ADAMW, MUON_8BIT, MUON_BF16, WITH_CLIP
from megatrain.planning.catalog.asked_models import find_shape
from megatrain.planning.memory.predicted import (
    PLANNED_WORKING,
    SERVED,
    TEACHER,
    predicted_ledger,
    store_lines,
)
from megatrain.planning.model.partly_trained import with_adapters
from megatrain.planning.model.shapes import MediaShape, ModelShape
from megatrain.planning.model.skeleton import shape_of
from megatrain.planning.simulate import step_shape
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings
from testkit.families import save_tiny
from testkit.lion import EIGHT_BIT, LION
from testkit.machines import DESKTOP, EIGHT, PROCESSOR
from testkit.rehearsed import SMALL, decoder_of


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("family", SMALL)
def test_the_store_to_the_byte(family: str, dtype: str) -> None:
    _check_store(decoder_of(family, dtype), dtype)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_the_store_of_adapters_over_a_frozen_base_to_the_byte(family: str) -> None:
    decoder = decoder_of(family, lora=LoraConfig(rank=8, alpha=16.0))
    _check_store(decoder, "bf16")
    model = shape_of(decoder)
    lines = Ledger(store_lines(Workload(model=model, step_tokens=1), StepSettings()))
    base = model.params - model.trained_params
    assert lines.total("host") == pytest.approx(2 * base + 14 * model.trained_params, rel=0.01)


MEDIA_SHAPE = MediaShape(
    densest=((4096, 2048),),
    sent_bytes=2000.0,
    item_tokens=256,
    held_bytes=(0, 0, 0),
    forward_flops=0.0,
    backward_flops=0.0,
)


def planned_with(media: MediaShape | None) -> Ledger:
    model = find_shape("Qwen3-0.6B")
    workload = Workload(model=replace(model, media=media), step_tokens=4096, sequence=4096)
    return predicted_ledger(DESKTOP, workload, StepSettings(micro_batch_tokens=4096))


def added_by(media: MediaShape, place: str) -> int:
    return planned_with(media).total(place) - planned_with(None).total(place)


def test_media_of_a_step_and_what_its_first_block_holds_of_them_count() -> None:
    assert added_by(MEDIA_SHAPE, "device") == 2048 * 2000
    assert added_by(MEDIA_SHAPE, "host") == 3 * 2048 * 2000, "this step, the next, on its way"
    assert added_by(MEDIA_SHAPE, "disk") == 0
    trained = replace(MEDIA_SHAPE, held_bytes=(4 << 30, 6 << 30, 7 << 30))
    assert added_by(trained, "device") > 10 << 30, "12 GiB of eight images, in place of the rest"


def test_masks_by_the_places_of_media_count() -> None:
    masked = replace(MEDIA_SHAPE, masked=True)
    assert added_by(masked, "device") >= 2048 * 2000 + 4096**2


def test_a_teacher_counts_as_far_as_it_is_larger_than_the_run() -> None:
    small, large = (find_shape(name) for name in ("Qwen3-0.6B", "Qwen3-32B"))
    settings = StepSettings(micro_batch_tokens=4096)

    def planned(model: ModelShape, teacher: ModelShape | None) -> Ledger:
        workload = Workload(model=replace(model, teacher=teacher), step_tokens=4096, sequence=4096)
        return predicted_ledger(DESKTOP, workload, settings)

    def of_teacher(ledger: Ledger) -> dict[str, int]:
        return {line.place: line.num_bytes for line in ledger.lines if line.purpose == TEACHER}

    alone, taught = planned(small, None), planned(small, large)
    assert of_teacher(alone) == {}
    weights, base = 2 * large.params, DESKTOP.base_bytes
    assert taught.total("host") == pytest.approx(weights + base, rel=1e-3)
    assert taught.total("host") - alone.total("host") == of_teacher(taught)["host"]
    slots = 2 * large.structures[0].params * 2
    assert slots < taught.total("device") == alone.total("device") + of_teacher(taught)["device"]
    assert of_teacher(planned(large, small)) == {}, "the run is the larger"
    assert PLANNED_WORKING == WORKING_HIDDEN


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_reference_is_the_arena_of_the_weights_to_the_byte(optimizer: str) -> None:
    decoder = decoder_of("gpt_oss", "bf16")
    states = {"adamw": ADAMW, "muon": MUON_BF16}[optimizer]
    model = shape_of(decoder)
    model = model.with_matrices_apart() if divides_matrices(states) else model
    workload = Workload(model=model, step_tokens=64, sequence=64, states={"fp32": states})
    settings = StepSettings(micro_batch_tokens=64)
    layout = build_layout(decoder.blocks, store_kinds(states, waits=True))
    without = predicted_ledger(DESKTOP, workload, settings)
    found = predicted_ledger(DESKTOP, replace(workload, keeps_reference=True), settings)
    for place in ("host", "pinned"):
        assert found.total(place) - without.total(place) == layout.kind_bytes[TensorKind.HI]
    assert found.total("device") == without.total("device")


@pytest.mark.parametrize(
    ("family", "lora"),
    [("llama", None), ("qwen3_moe", None), ("gpt_oss", LoraConfig(rank=8, alpha=16))],
)
def test_weights_for_a_server_are_those_of_an_export(
    tmp_path: Path, family: str, lora: LoraConfig | None
) -> None:
    home = load_model(save_tiny(tmp_path, family), lora=lora)
    home.export(tmp_path / "out", merge=lora is not None)
    exported = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    workload = Workload(model=shape_of(home.decoder), step_tokens=64, sequence=64)
    settings = StepSettings(micro_batch_tokens=64)
    without = predicted_ledger(DESKTOP, workload, settings)
    found = predicted_ledger(DESKTOP, replace(workload, serves_weights=True), settings)
    planned = found.total("host") - without.total("host")
    assert [x.num_bytes for x in found.lines if x.purpose == SERVED] == [planned]
    assert 0 <= exported - planned < 1 << 16, "headers of the files are beside"


def _check_store(decoder: Decoder, dtype: Any) -> None:
    workload = Workload(model=shape_of(decoder), step_tokens=1, dtype=dtype)
    for states in (ADAMW, LION, EIGHT_BIT, MUON_BF16, MUON_8BIT):
        planned = replace(workload, states={"fp32": states})
        if divides_matrices(states):
            planned = replace(planned, model=workload.model.with_matrices_apart())
        for update in ("late", "in_backward"):
            kinds = store_kinds(states, waits=update == "late")
            layout = build_layout(decoder.blocks, kinds)
            for tier in ("none", "states"):
                settings = StepSettings(update=update, tier=tier)
                on_disk = kinds_on_disk(kinds, tier)
                regions = TierRegions(layout, on_disk) if on_disk else None
                lines = Ledger(store_lines(planned, settings))
                assert lines.lines == store_ledger(layout, regions).lines
                assert lines.total("tier") == (0 if regions is None else regions.num_bytes)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_the_ring_of_the_tier_to_the_byte(tmp_path: Path, family: str) -> None:
    decoder = decoder_of(family, "bf16")
    workload = Workload(model=shape_of(decoder), step_tokens=64, sequence=64)
    settings = StepSettings(micro_batch_tokens=64, tier="states")
    layout = build_layout(decoder.blocks, WITH_CLIP)
    on_disk = Tier(tmp_path, TierRegions(layout, kinds_on_disk(WITH_CLIP, "states")))
    store = Store(layout, on_disk)
    try:
        places = places_of(step_shape(settings, workload, unified=False))
        slots = {int(of[1]): at[1] for of, at in places.items() if at[0] == "tier_slot"}
        ring = TierRing(store, slots)
        lines = predicted_ledger(DESKTOP, workload, settings).lines
        (planned,) = (line for line in lines if line.purpose == "tier ring")
        assert planned.num_bytes == ring.num_bytes
    finally:
        store.close()


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        (StepSettings(micro_batch_tokens=2048), StepSettings(micro_batch_tokens=8192)),
        (
            StepSettings(micro_batch_tokens=8192, slots=2),
            StepSettings(micro_batch_tokens=8192, slots=3),
        ),
        (
            StepSettings(micro_batch_tokens=8192, tape="host"),
            StepSettings(micro_batch_tokens=8192, tape="device"),
        ),
        (
            StepSettings(micro_batch_tokens=4096, chunk_tokens=512),
            StepSettings(micro_batch_tokens=4096),
        ),
        (
            StepSettings(micro_batch_tokens=8192, gather_embedding=True),
            StepSettings(micro_batch_tokens=8192),
        ),
    ],
    ids=["tokens", "slots", "tape", "chunk", "rows"],
)
def test_more_of_anything_needs_more(smaller: StepSettings, larger: StepSettings) -> None:
    workload = Workload(model=EIGHT, step_tokens=32768)
    less, more = (predicted_ledger(DESKTOP, workload, way) for way in (smaller, larger))
    assert less.total("device") < more.total("device")


def test_what_clipping_costs() -> None:
    workload = Workload(model=EIGHT, step_tokens=8192)
    settings = StepSettings(micro_batch_tokens=8192)
    late = predicted_ledger(DESKTOP, workload, settings)
    early = predicted_ledger(DESKTOP, workload, settings.changed(update="in_backward"))
    rings = [line.num_bytes for line in early.lines if line.purpose == "gradient rings"]
    saved = late.total("host") - early.total("host") + sum(rings)
    assert saved == pytest.approx(2 * EIGHT.params, rel=1e-3)
    assert late.total("pinned") == pytest.approx(4 * EIGHT.params, rel=1e-3)


def test_checkpoints_and_export_of_adapters_have_the_adapters_alone() -> None:
    adapted = with_adapters(EIGHT, LoraSettings(rank=16))
    ledger = predicted_ledger(
        DESKTOP, Workload(model=adapted, step_tokens=8192), StepSettings(micro_batch_tokens=8192)
    )
    sizes = {line.purpose: line.num_bytes for line in ledger.lines if line.place == "disk"}
    assert sizes["exported model"] == pytest.approx(2 * adapted.trained_params, rel=0.01)
    assert sizes["checkpoints"] == pytest.approx(3 * 12 * adapted.trained_params, rel=0.01)


def test_where_the_device_is_the_host_its_memory_is_the_hosts() -> None:
    workload = Workload(model=EIGHT, step_tokens=8192)
    found = predicted_ledger(PROCESSOR, workload, StepSettings(micro_batch_tokens=8192))
    assert {line.place for line in found.lines} == {"host", "disk"}
    assert "working memory" in {line.purpose for line in found.lines}


@pytest.mark.merge
def test_the_host_against_a_real_run() -> None:
    """The short form of `python -m benchmarks.plan --memory`."""
    figures = measure_memory(
        [
            Configuration(hidden=256, inner=768, layers=4, rows=2, length=128),
            Configuration(
                hidden=256, inner=768, layers=4, device="copies", tape="host", state="bf16"
            ),
            Configuration(hidden=512, inner=1408, layers=8, rank=16),
        ],
        GIVING_BACK,
    )
    assert float(str(figures["worst"])) <= MEMORY_TARGETS["worst"], figures


@pytest.mark.parametrize(("state", "exact"), [("fp32", 8), ("bf16", 4), ("8bit", 2 + 1 / 32)])
def test_the_bytes_of_a_parameter_by_state_and_tier(state: Any, exact: float) -> None:
    """Weights 2, remainders 2, gradients that wait 2, and the states."""
    workload = Workload(model=EIGHT, step_tokens=8192)
    for tier, on_disk in (("none", 0.0), ("states", 2 + exact)):
        settings = StepSettings(state=state, tier=tier)  # type: ignore[arg-type]
        lines = Ledger(store_lines(workload, settings))
        assert lines.total("tier") == pytest.approx(on_disk * EIGHT.params, rel=1e-3)
        assert lines.total("host") == pytest.approx((6 + exact - on_disk) * EIGHT.params, rel=1e-3)
        whole = predicted_ledger(DESKTOP, workload, settings)
        saved = next(line for line in whole.lines if line.purpose == "checkpoints")
        assert saved.num_bytes == pytest.approx(3 * (4 + exact) * EIGHT.params, rel=1e-3)
