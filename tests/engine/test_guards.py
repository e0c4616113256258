"""L6: no gradient that is not finite ever reaches a weight, and the fault is found."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain import AdamW, Engine, HostModel, load_model
from megatrain.batch import MicroBatch
from megatrain.devices.device import CpuDevice
from megatrain.engine.gradients.home_sums import HomeSums
from megatrain.errors import NonFiniteStep
from megatrain.memory.kinds import TensorKind
from megatrain.optim.states import M, V
from testkit.engines import make_engine
from testkit.families import save_tiny
from testkit.plain import make_batch

BATCH = make_batch([(1, 6), (1, 5), (1, 5)])
NUM_BLOCKS = 4


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> HostModel:
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32}
    folder = tmp_path_factory.mktemp("model")
    return load_model(save_tiny(folder, "llama", torch.bfloat16, **sizes, head_dim=8))


def _state(home: HostModel) -> dict[tuple[str, TensorKind], torch.Tensor]:
    kinds = (TensorKind.HI, TensorKind.LO, M, V)
    return {(n, k): home.store.param(n, k).clone() for n in home.store.layout.places for k in kinds}


def _changed_blocks(
    home: HostModel, before: dict[tuple[str, TensorKind], torch.Tensor]
) -> set[int]:
    return {
        home.store.layout.places[name].segment.block
        for (name, kind), value in before.items()
        if not torch.equal(home.store.param(name, kind).view(torch.uint8), value.view(torch.uint8))
    }


Poison = Callable[[int, int, float, int], None]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[Poison]:
    """Give `poison(block, nth part of that block, value, how many times)`: spoils one element."""
    plan: dict[str, Any] = {}
    add, add_rows = HomeSums.add, HomeSums.add_rows

    def spoil(block: int, grad: Tensor | None) -> None:
        if plan.get("block") == block and plan["times"] > 0 and grad is not None:
            plan["skip"] -= 1
            if plan["skip"] < 0:
                grad.view(-1)[plan["element"]] = plan["value"]
                plan["times"] -= 1

    def spoiling_add(
        self: HomeSums, slot: Any, tenant: int, grads: Any, first_row: int | None = None
    ) -> None:
        spoil(tenant, next((grad for grad in grads.values() if grad is not None), None))
        add(self, slot, tenant, grads, first_row)

    def spoiling_add_rows(
        self: HomeSums, slot: Any, tenant: int, name: str, ids: Tensor, grad: Tensor
    ) -> None:
        spoil(tenant, grad)
        add_rows(self, slot, tenant, name, ids, grad)

    monkeypatch.setattr(HomeSums, "add", spoiling_add)
    monkeypatch.setattr(HomeSums, "add_rows", spoiling_add_rows)

    def arm(block: int, skip: int, value: float, times: int, element: int = 0) -> None:
        plan.update(block=block, skip=skip, value=value, times=times, element=element)

    yield arm
    plan.clear()


def _engine(home: HostModel, update: str, on_nonfinite: str = "skip", **changes: Any) -> Engine:
    optimizer = AdamW(learning_rate=1e-3, max_grad_norm=1.0)
    return make_engine(
        home.decoder, home.store, optimizer=optimizer, update=update, reference=True,
        on_nonfinite=on_nonfinite, **changes,
    )  # fmt: skip


def _inject(home: HostModel, poison: Poison, count: int) -> None:
    """Inject `count` faults at random places; none may reach a weight, all must be attributed."""
    draw = random.Random(count)
    with _engine(home, "late") as late, _engine(home, "in_backward") as at_once:
        for _ in range(count):
            block, skip = draw.randrange(NUM_BLOCKS), draw.randrange(3)
            value = draw.choice([float("nan"), float("inf"), -float("inf")])
            before = _state(home)
            poison(block, skip, value, 10**6, draw.randrange(32))  # type: ignore[call-arg]
            if draw.random() < 0.5:
                result = late.step(BATCH)
                late.synchronize()
                assert not result.applied
                assert _changed_blocks(home, before) == set()
            else:
                result = at_once.step(BATCH)
                at_once.synchronize()
                assert _changed_blocks(home, before) == set(range(NUM_BLOCKS)) - {block}
            assert result.nonfinite is not None
            assert result.nonfinite.blocks == (block,)
            for name in home.store.layout.places:
                assert home.store.param(name, TensorKind.HI).isfinite().all()


@pytest.mark.merge
def test_no_injected_fault_reaches_a_weight(home: HostModel, poison: Poison) -> None:
    _inject(home, poison, 100)


def test_a_fault_that_is_gone_when_run_again_is_the_hardwares(
    home: HostModel, poison: Poison
) -> None:
    before = _state(home)
    poison(2, 0, float("nan"), 1)
    with _engine(home, "late", "stop") as engine:
        result = engine.step(BATCH)
        assert result.applied
        assert str(result.nonfinite) == (
            "not finite in blocks 2; finite when run again: suspect the hardware"
        )
    assert _changed_blocks(home, before) == set(range(NUM_BLOCKS))


@pytest.mark.parametrize(
    ("copying", "tape", "flat"),
    [
        (False, "device", False),
        (True, "host", False),
        (False, "host", True),
        (True, "device", True),
    ],
)
def test_the_documents_at_fault_are_named(
    tmp_path: Path, copying: bool, tape: str, flat: bool
) -> None:
    """Also in a micro-batch larger than the first, whose place it takes on the tape."""
    home = load_model(save_tiny(tmp_path, "llama"))
    batch = make_batch([(2, 9), (3, 8)])
    spoilt = 17
    for row in batch[1].input_ids[0:1], batch[0].input_ids, batch[1].input_ids[2:]:
        row[row == spoilt] = 18
    batch[1].input_ids[1, 4] = spoilt
    if flat:
        places = torch.arange(8).repeat(3, 1)
        packed = MicroBatch(
            input_ids=batch[1].input_ids, labels=batch[1].labels, position_ids=places
        )
        batch[1] = packed.mapped(lambda tensor: tensor.view(1, -1))
    home.store.param("model.embed_tokens.weight", TensorKind.HI)[spoilt] = float("nan")
    before = _state(home)
    with (
        _engine(home, "late", "stop", device=CpuDevice(copying=copying), tape=tape) as engine,
        pytest.raises(NonFiniteStep, match=r"1: .* blocks 0, 1, .*; micro-batch 1, documents 1$"),
    ):
        engine.step(batch)
    assert _changed_blocks(home, before) == set()


def test_training_goes_on_after_a_skipped_step(home: HostModel, poison: Poison) -> None:
    with _engine(home, "late") as engine:
        poison(1, 0, float("inf"), 10**6)
        assert not engine.step(BATCH).applied
        poison(-1, 0, 0.0, 0)
        before = _state(home)
        assert engine.step(BATCH).applied
    assert _changed_blocks(home, before) == set(range(NUM_BLOCKS))
