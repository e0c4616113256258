"""Parts of the planner are those of the layout, to the byte, and slots those of a rehearsal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.engine import exchange
from megatrain.memory.layout import build_layout
from megatrain.memory.ledger import Ledger
from megatrain.memory.store import store_ledger
from megatrain.optim.states import WITH_CLIP
from megatrain.planning.memory.device import device_lines
from megatrain.planning.memory.kernels import Kernels
from megatrain.planning.memory.predicted import predicted_ledger, store_lines
from megatrain.planning.model.skeleton import shape_of
from megatrain.planning.ranks import collectives
from megatrain.planning.ranks.division import Division
from megatrain.planning.ranks.sharing import as_rank
from megatrain.planning.simulate import step_shape
from megatrain.planning.workload import Workload
from megatrain.ranks.ownership import Owner
from megatrain.step.settings import StepSettings
from testkit.machines import EIGHT, PROCESSOR, SERVER
from testkit.rank_threads import Together
from testkit.rehearsal import device_ledger
from testkit.rehearsed import decoder_of

FAMILIES = ("llama", "gemma2", "gpt_oss")


def test_numbers_of_modules_that_need_torch() -> None:
    assert collectives.PLANNED_EXCHANGE_BYTES == exchange.EXCHANGE_BYTES


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_store_of_the_first_rank_to_the_byte(family: str, size: int) -> None:
    for dtype in ("bf16", "fp32"):
        decoder = decoder_of(family, dtype)
        workload = Workload(
            model=shape_of(decoder),
            step_tokens=1,
            dtype=dtype,
            division=Division(per_host=size),
        )
        layout = build_layout(decoder.blocks, WITH_CLIP, Owner(0, size))
        lines = Ledger(store_lines(workload, StepSettings())).lines
        assert lines == store_ledger(layout).lines
        undivided = Ledger(store_lines(replace(workload, division=Division()), StepSettings()))
        assert lines != undivided.lines


@pytest.mark.merge
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_slots_and_buffers_of_a_rank_to_the_byte(family: str, size: int) -> None:
    decoder = decoder_of(family, "bf16")
    workload = Workload(
        model=shape_of(decoder),
        step_tokens=4 * size * 64,
        sequence=64,
        packed=True,
        division=Division(per_host=size),
    )
    settings = StepSettings(micro_batch_tokens=128)
    shape = replace(step_shape(settings, workload, unified=False), update="none")
    assert (shape.divided, shape.num_micro) == (True, 2)
    layout = build_layout(decoder.blocks, WITH_CLIP, Owner(0, size))
    ranks = Together(size).ranks[0]
    real = device_ledger(decoder, layout, shape, [(2, 64)] * 2 * size, settings, ranks=ranks)
    found = Ledger(device_lines(workload, settings, Kernels(), unified=False))
    exact = {line.purpose: line.num_bytes for line in real.lines}
    for line in found.lines:
        if line.purpose != "working memory":
            assert line.num_bytes == exact[line.purpose], line.purpose
    assert {"exchange", "weight slots"} <= exact.keys()


def test_a_host_has_the_shares_of_its_ranks() -> None:
    alone = Workload(model=EIGHT, step_tokens=32768)
    settings = StepSettings(micro_batch_tokens=4096, tape="device")
    whole = Ledger(store_lines(alone, settings)).total("host")
    ways = (Division(per_host=8), Division(num_hosts=8), Division(num_hosts=4, per_host=2))
    for division in ways:
        workload = replace(alone, division=division)
        share = Ledger(store_lines(workload, settings)).total("host")
        assert share == pytest.approx(whole / 8, rel=1e-3)
        profile = as_rank(SERVER.changed(base_bytes=1 << 30), division)
        found = predicted_ledger(profile, workload, settings)
        own = [line for line in found.lines if line.place == "host"]
        base, saves = 1 << 30, 64 << 20
        assert sum(line.num_bytes for line in own) == division.per_host * (share + base + saves)
        checkpoints = next(line for line in found.lines if line.purpose == "checkpoints")
        assert checkpoints in predicted_ledger(SERVER, alone, settings).lines


def test_ranks_on_a_processor_have_their_slots_in_host_memory() -> None:
    workload = Workload(model=EIGHT, step_tokens=8192, division=Division(per_host=2))
    found = predicted_ledger(as_rank(PROCESSOR, workload.division), workload, StepSettings())
    assert {line.place for line in found.lines} == {"host", "disk"}
    purposes = {line.purpose for line in found.lines}
    assert {"weight slots", "gradient slots", "exchange"} <= purposes
    assert "outbox" not in purposes


def test_a_rank_has_its_share_of_the_micro_batches() -> None:
    workload = Workload(model=EIGHT, step_tokens=10, sequence=1, division=Division(per_host=3))
    assert workload.micro_sizes(2) == [2, 2]  # of five
    assert workload.num_micro(2) == 2
    assert workload.even_tokens == 4
    assert replace(workload, division=Division(per_host=8)).micro_sizes(4) == [4]
