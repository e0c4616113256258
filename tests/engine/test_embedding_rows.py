"""Rows in place of the whole embedding: same bits, less device memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.batch import MicroBatch
from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.devices.device import CpuDevice
from megatrain.engine import embedding_rows
from megatrain.engine.embedding_rows import SelectedRows, TokenRows
from megatrain.errors import ConfigError
from megatrain.memory.kinds import TensorKind
from megatrain.step.shape import StepShape
from proofs.races import CONFIGS, Run, play, reference, simulator_of, world_of
from testkit.cases import at_a_push
from testkit.engines import make_engine
from testkit.schedule_laws import check_schedules
from testkit.schedules import build_step
from testkit.simulated.accelerator import Simulator
from testkit.simulated.watched import watched
from testkit.worlds import SIZES, SORTS, Case, Sort, World, make_batch

CASE = Case(sort="", steps=(((1, 4), (2, 5)), ((2, 6),)), update="late", evaluates_after=(0,))
TABLE = "model.embed_tokens.weight"
RUN = Run(family="llama", dtype="bf16", case=CASE, policy="late", seed=0)


def faults(run: Run) -> list[str]:
    simulator = simulator_of(run)
    found = play(run, simulator, gather_embedding=True)
    return [*found.differences(reference(run)), *simulator.races, *map(repr, simulator.failures)]


@pytest.mark.merge
@pytest.mark.parametrize("update", ["none", "in_backward", "late"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("form", at_a_push(["padded", "packed"], 1))
def test_bits_are_those_of_the_whole_table(family: str, update: Any, form: Any) -> None:
    case = replace(CASE, update=update, form=form, tape="host" if form == "padded" else "device")
    policy: Any = "late" if form == "padded" else "random"
    dtype = "fp32" if family == "mixtral" else "bf16"
    assert faults(replace(RUN, family=family, dtype=dtype, case=case, policy=policy)) == []


def test_rows_in_the_wrong_place_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_rows, "spread_rows", lambda target, rows, ids: target.zero_())
    assert faults(RUN) != []


@pytest.mark.merge
def test_a_gather_before_the_update_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are read when the fetch is played, behind the update of the last step."""
    reserve = embedding_rows.EmbeddingRows.reserve

    def gather_early(self: embedding_rows.EmbeddingRows, batch: Any) -> None:
        reserve(self, batch)
        self.fetch = lambda block, slot: 0  # type: ignore[method-assign]
        embedding_rows.EmbeddingRows.fetch(self, 0, "embedding")

    monkeypatch.setattr(embedding_rows.EmbeddingRows, "reserve", gather_early)
    assert faults(replace(RUN, case=replace(CASE, evaluates_after=()))) != []


# Where compute shares the host's memory.


def rows_of(tokens: list[list[int]], padding: int | None = None) -> tuple[SelectedRows, Tensor]:
    """The rows of tokens of a small table, and the gradient of a sum in which each row counts."""
    world = world_of("llama", "bf16")
    table = world.store.param(TABLE, TensorKind.HI).detach().requires_grad_()
    token_rows = TokenRows(world.decoder, CpuDevice())
    token_rows._padding = padding
    selected = token_rows.select({TABLE: table}, torch.tensor(tokens))
    found = torch.nn.functional.embedding(selected.places, selected.leaves[TABLE])
    assert torch.equal(found, table[torch.tensor(tokens)])
    (grad,) = torch.autograd.grad(found.sum(), selected.leaves[TABLE])
    return selected, token_rows.trained(selected.ids, grad)


def test_a_gradient_has_the_rows_of_the_micro_batchs_tokens() -> None:
    selected, grad = rows_of([[7, 2, 7], [3, 2, 7]])
    assert selected.ids.tolist() == [2, 3, 7]
    assert grad[:, 0].tolist() == [2, 1, 3]


def test_the_padding_token_has_no_gradient() -> None:
    _, grad = rows_of([[7, 2, 7], [3, 2, 7]], padding=7)
    assert grad[:, 0].tolist() == [2, 1, 0]


SHARED = ("llama of 2 layers", "llama in fp32", "gemma, tied", "gpt2, tied, with dropout")


@pytest.mark.few(8)
@pytest.mark.parametrize("update", ["none", "in_backward", "late"])
@pytest.mark.parametrize("sort", SHARED)
def test_bits_on_the_host_are_those_of_the_whole_table(sort: str, update: Any) -> None:
    world, case = World(SORTS[sort]), replace(CASE, sort=sort, update=update)
    shared = world.play(replace(case, copying=False))
    assert shared.differences(world.play(case)) == []


def test_rows_of_other_tokens_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    select = TokenRows.select

    def shifted(self: TokenRows, leaves: Any, tokens: Tensor) -> SelectedRows:
        found = select(self, leaves, tokens)
        return replace(found, ids=found.ids.roll(1))

    monkeypatch.setattr(TokenRows, "select", shifted)
    world = World(SORTS["gemma, tied"])
    assert world.play(replace(CASE, copying=False)).differences(world.play(CASE)) != []


def peak(**settings: Any) -> int:
    simulator, world = Simulator(policy="early"), world_of("llama", "bf16")
    case = replace(CASE, update="none")
    with (
        watched(simulator),
        world.engine(case, device=AcceleratorDevice(simulator), **settings) as engine,
    ):
        engine.step(make_batch(((1, 3),), seed=1))
        return engine.device.peak_bytes


def test_device_memory_is_that_of_the_rows() -> None:
    table = world_of("llama", "bf16").store.param(TABLE, TensorKind.HI)
    saved = peak() - peak(gather_embedding=True)
    assert saved == pytest.approx(table.nbytes - 3 * table[0].nbytes, abs=600)


@pytest.mark.parametrize("num_rows", [8, 304])
def test_gradients_of_rows_take_the_turn_of_a_layer_where_the_head_has_no_place(
    num_rows: int,
) -> None:
    """Of a frozen head: rows that fit into a layer's slot cost nothing, more of them the rest."""
    sizes = SIZES | {"vocab_size": 512, "num_hidden_layers": 3}
    frozen = ("lm_head.*", "model.norm.*")
    world = World(Sort(config=lambda: CONFIGS["llama"](**sizes), frozen=frozen))
    simulator = Simulator(policy="early")
    ids = torch.arange(num_rows).view(-1, 8)
    with (
        watched(simulator),
        world.engine(
            replace(CASE, update="none"), device=AcceleratorDevice(simulator), gather_embedding=True
        ) as engine,
    ):
        engine.step([MicroBatch(input_ids=ids, labels=ids)])
        slots = engine._machine.gradients._sums._slots.buffers
        found = {slot: buffer.nbytes for slot, buffer in slots.items()}
    layer = 4 * sum(s.num_elements for s in world.store.layout.trained_segments(1))
    assert 8 < layer // (4 * 32) < 304
    assert found == {0: layer, 1: max(layer, 4 * 32 * num_rows)}


def test_a_table_that_the_head_reads_is_refused() -> None:
    world = world_of("gemma2", "bf16")
    with pytest.raises(ConfigError, match="the head of this model reads the embedding's table too"):
        world.engine(CASE, device=AcceleratorDevice(Simulator()), gather_embedding=True)


def test_unified_memory_has_nothing_to_gather_for() -> None:
    world = world_of("llama", "bf16")
    with pytest.raises(ConfigError, match="needs a device with its own memory"):
        make_engine(world.decoder, world.store, gather_embedding=True)


@pytest.mark.parametrize("update", ["none", "in_backward", "late"])
def test_schedules_that_gather_keep_all_laws(update: Any) -> None:
    shape = StepShape(num_blocks=6, num_micro=2, update=update, gather_embedding=True)
    check_schedules(shape, [build_step(shape), build_step(shape, pending=update == "late")])
