"""Bytes of collectives are the engine's; rates and places in the chain follow from the network."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatrain.batch import MicroBatch
from megatrain.devices.device import CpuDevice
from megatrain.engine.engine import Engine
from megatrain.lanes.player import Player
from megatrain.lanes.trace import Trace
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.optim.states import WITH_CLIP
from megatrain.planning.costs import Cost, Costs
from megatrain.planning.machine.network import Network
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.model.skeleton import shape_of
from megatrain.planning.ranks.division import Division
from megatrain.planning.ranks.sharing import as_rank
from megatrain.planning.roofline import roofline_of
from megatrain.planning.simulate import Simulation, shared_speeds, simulate, steady_step, step_shape
from megatrain.planning.workload import Workload
from megatrain.ranks.ranks import Ranks
from megatrain.step.ops import OpKind
from megatrain.step.settings import StepSettings
from testkit.machines import DESKTOP, EIGHT, PROCESSOR, SMALL
from testkit.rank_threads import ONE_AT_A_TIME, Together, in_turn
from testkit.rehearsed import decoder_of

NETWORK = Network(peer_bytes_per_s=10e9, host_bytes_per_s=3e9, host_latency_s=1e-4)
SETTINGS = StepSettings(micro_batch_tokens=2048)
QUIET = DESKTOP.changed(op_overhead_s=1e-9)


def of_ranks(profile: MachineProfile, division: Division, network: Network = NETWORK) -> Simulation:
    work = Workload(model=SMALL, step_tokens=32768, sequence=2048, division=division)
    return simulate(as_rank(profile.changed(network=network), division), work, SETTINGS)


def seconds_of(simulation: Simulation, kind: OpKind, block: int = 1) -> float:
    found = [one for one in simulation.ops if one.op.kind is kind and one.op.block == block]
    return found[0].cost.seconds


@pytest.mark.parametrize("size", [2, 3])
def test_the_bytes_of_each_collective_are_those_that_the_engine_moves(size: int) -> None:
    def moved(ranks: Ranks) -> dict[tuple[OpKind, int | None], int]:
        with ONE_AT_A_TIME:
            decoder = decoder_of("llama", "bf16")
            store = Store(build_layout(decoder.blocks, WITH_CLIP, ranks.owner))
        ids = torch.ones((1, 8), dtype=torch.int64)
        batch = [MicroBatch(input_ids=ids, labels=ids)] * size
        engine = Engine(
            decoder, store, device=CpuDevice(copying=True), ranks=ranks, settings=settings,
            player=Player(in_turn(), trace=Trace()),
        )  # fmt: skip
        with engine:
            engine.step(batch)
        assert engine.trace is not None
        spans = [span for span in engine.trace.spans if span.awaited is None]
        kinds = (OpKind.FETCH, OpKind.GATHER, OpKind.EXCHANGE, OpKind.DRAIN)
        return {(s.op.kind, s.op.block): s.num_bytes for s in spans if s.op.kind in kinds}

    settings = StepSettings(micro_batch_tokens=8)
    real = Together(size).run(moved)[0]
    decoder = decoder_of("llama", "bf16")
    division = Division(per_host=size)
    work = Workload(model=shape_of(decoder), step_tokens=8 * size, sequence=8, division=division)
    costs = Costs(as_rank(DESKTOP, division), work, settings)
    for op in steady_step(step_shape(settings, work, unified=False)):
        if (op.kind, op.block) in real:
            assert costs.of(op).num_bytes == real[op.kind, op.block], str(op)
    assert len(real) == 4 * len(decoder.blocks)


def test_inside_a_host_a_rank_has_its_own_rate() -> None:
    two, eight = (
        seconds_of(of_ranks(QUIET, Division(per_host=size)), OpKind.GATHER) for size in (2, 8)
    )
    whole = SMALL.structures[0].weight_bytes("bf16")
    assert two == pytest.approx(whole / 2 / 10e9, rel=0.1)
    assert eight == pytest.approx(whole * 7 / 8 / 10e9 + 7 * NETWORK.peer_latency_s, rel=0.1)


def test_between_hosts_a_gather_crosses_once_and_an_exchange_for_each_rank() -> None:
    slow = replace(NETWORK, host_bytes_per_s=1e8, host_latency_s=1e-9)
    one, four = (of_ranks(QUIET, Division(num_hosts=2, per_host=near), slow) for near in (1, 4))
    gathered = seconds_of(four, OpKind.GATHER) / seconds_of(one, OpKind.GATHER)
    exchanged = seconds_of(four, OpKind.EXCHANGE) / seconds_of(one, OpKind.EXCHANGE)
    assert gathered == pytest.approx(1.0, rel=0.05)
    assert exchanged == pytest.approx(4.0, rel=0.05)
    on_cores = of_ranks(PROCESSOR, Division(num_hosts=2, per_host=4), slow)
    for_each = 4 * seconds_of(one, OpKind.GATHER)
    assert seconds_of(on_cores, OpKind.GATHER) == pytest.approx(for_each, rel=0.05)


def test_a_slow_network_is_named_and_a_faster_one_is_never_slower() -> None:
    division = Division(num_hosts=4)
    rates = [1e7 * 4**power for power in range(6)]
    found = [of_ranks(DESKTOP, division, replace(NETWORK, host_bytes_per_s=r)) for r in rates]
    times = [one.step_s for one in found]
    assert times == sorted(times, reverse=True)
    assert (found[0].bottleneck, found[-1].bottleneck) == ("network", "compute")
    names = [roofline_of(one).of(one.tokens) for one in found]
    assert all(least <= step_s for (least, _), step_s in zip(names, times, strict=True))
    assert (names[0][1], names[-1][1]) == ("network", "compute")


def test_larger_steps_hide_the_network() -> None:
    def busy(tokens: int) -> float:
        division = Division(num_hosts=4)
        work = Workload(model=SMALL, step_tokens=tokens, sequence=2048, division=division)
        slow = replace(NETWORK, host_bytes_per_s=3e8)
        profile = as_rank(DESKTOP.changed(network=slow), division)
        return simulate(profile, work, SETTINGS).busy_shares["compute"]

    assert busy(8192) < 0.5
    assert busy(1 << 20) > 0.9


def test_what_devices_send_through_host_memory_takes_their_links() -> None:
    link = DESKTOP.changed(duplex_share=1.0)
    copy, other = Cost(seconds=1, link="in"), Cost(seconds=1, link_share=1.0)
    assert shared_speeds([copy, other], link) == [0.5, 0.5]
    assert shared_speeds([copy, Cost(seconds=1, link_share=0.0)], link) == [1.0, 1.0]
    half = shared_speeds([copy, Cost(seconds=1, link_share=0.5)], link)
    assert half == pytest.approx([2 / 3, 2 / 3])


def test_a_process_alone_has_nothing_on_the_network() -> None:
    work = Workload(model=EIGHT, step_tokens=8192)
    alone = simulate(DESKTOP, work, SETTINGS)
    assert alone.busy_s["comm"] == 0.0
    assert not any(one.op.lane == "comm" for one in alone.ops)
    assert "network" not in alone.chain


def test_all_else_of_a_step_falls_with_the_number_of_ranks() -> None:
    alone = simulate(QUIET, Workload(model=SMALL, step_tokens=32768, sequence=2048), SETTINGS)
    eight = of_ranks(QUIET, Division(num_hosts=8), replace(NETWORK, host_latency_s=1e-9))
    assert eight.tokens == alone.tokens
    for lane in ("compute", "in", "out", "host"):
        whole, share = (
            sum(one.cost.seconds for one in played.ops if one.op.lane == lane)
            for played in (alone, eight)
        )
        assert share == pytest.approx(whole / 8, rel=0.1), lane
