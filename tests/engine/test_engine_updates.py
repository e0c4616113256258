"""Updates of the engine: late or in backward, clipped or not, they are the textbook's.

The textbook: all gradients, their norm, the clip factor, all updates, and only then the next
forward. Written by hand on the store, with separate fp32 masters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatrain.batch import MicroBatch
from megatrain.engine.actions import StepActions
from megatrain.engine.gradients.slot_sums import SlotSums
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import build_layout
from megatrain.memory.master import split_into
from megatrain.memory.store import Store
from megatrain.optim.adamw import AdamW
from megatrain.optim.native import load_kernel
from megatrain.optim.states import WITHOUT_CLIP, M, V
from megatrain.optim.torch_kernel import TorchKernel
from megatrain.step.ops import Op, OpKind
from megatrain.step.shape import Update
from testkit.adamw_by_hand import HandAdamW, global_norm, is_matrix
from testkit.engines import make_engine
from testkit.worlds import SORTS, Case, Shapes, World, make_batch, world_of

LR, DECAY = 3e-3, 0.1
SHAPES: tuple[Shapes, ...] = (((1, 4),), ((2, 3), (1, 5)), ((1, 3), (1, 4), (2, 2)))
NUM_STEPS = 20
State = dict[str, Tensor]


def batch_of(step: int) -> list[MicroBatch]:
    return make_batch(SHAPES[step % len(SHAPES)], seed=step)


def trained(world: World) -> list[str]:
    return [param.name for param in world.decoder.params if param.trained]


def state_of(world: World) -> State:
    """Master and moments of each trained param."""
    names = trained(world)
    return (
        {f"{name} master": world.store.master(name) for name in names}
        | {f"{name} m": world.store.param(name, M).clone() for name in names}
        | {f"{name} v": world.store.param(name, V).clone() for name in names}
    )


def differing(first: State, second: State) -> list[str]:
    assert first.keys() == second.keys()
    return [n for n, part in first.items() if not torch.equal(part, second[n])]


def by_engine(
    world: World, update: Update, clip: float | None, num_steps: int = NUM_STEPS, **changes: object
) -> tuple[State, list[float | None]]:
    optimizer = AdamW(learning_rate=LR, weight_decay=DECAY, max_grad_norm=clip)
    case = Case(sort="", steps=(), update=update, tape="host", slots=3)
    with world.engine(case, optimizer=optimizer, **changes) as engine:
        norms = [engine.step(batch_of(step)).grad_norm for step in range(num_steps)]
    return state_of(world), norms


def by_textbook(
    world: World, clip: float | None, *, num_steps: int = NUM_STEPS, stale: bool = False
) -> tuple[State, list[float]]:
    """The same, one thing after the other; `stale`: forward runs before the last update."""
    matrices = {param.name for param in world.decoder.params if is_matrix(param)}
    norms = []
    with world.engine(Case(sort="", steps=(), update="none"), reference=True) as engine:
        masters = {name: world.store.master(name) for name in trained(world)}
        hand = HandAdamW(masters, lr=LR, weight_decay=DECAY, decays=matrices.__contains__)
        gradients: dict[str, Tensor] = {}
        for step in range(num_steps):
            if not (stale and step == num_steps - 1):
                write_weights(world, hand.masters)
            engine.step(batch_of(step))
            gradients = {n: world.store.param(n, TensorKind.GRAD) for n in trained(world)}
            norms.append(global_norm(gradients.values()))
            scale = 1.0 if clip is None else min(1.0, clip / (norms[-1] + 1e-6))
            hand.update(gradients, step + 1, scale)
    return (
        {f"{name} master": master for name, master in hand.masters.items()}
        | {f"{name} m": m for name, m in hand.m.items()}
        | {f"{name} v": v for name, v in hand.v.items()}
    ), norms


def write_weights(world: World, masters: dict[str, Tensor]) -> None:
    for name, master in masters.items():
        weight = world.store.param(name, TensorKind.HI)
        if weight.dtype is torch.float32:
            weight.copy_(master)
        else:
            split_into(master, weight, world.store.param(name, TensorKind.LO))


CLIPPED = ["llama of 2 layers", "llama in fp32", "gemma, tied", "mixtral", "llama, partly frozen"]


@pytest.mark.few(1)
@pytest.mark.parametrize("sort", CLIPPED)
def test_late_updates_with_clipping_are_the_textbooks(sort: str) -> None:
    world = world_of(sort)
    _, unclipped = by_textbook(world, None, num_steps=6)
    clip = sorted(unclipped)[3]
    hand, hand_norms = by_textbook(world, clip)
    assert 2 < sum(norm > clip for norm in hand_norms) < NUM_STEPS
    found, norms = by_engine(world, "late", clip)
    assert differing(found, hand) == []
    assert norms == pytest.approx(hand_norms, rel=1e-12)


def test_a_wrong_order_or_no_clipping_would_be_noticed() -> None:
    world = world_of("llama of 2 layers")
    found, _ = by_engine(world, "late", 0.5, num_steps=3)
    assert differing(found, by_textbook(world, 0.5, num_steps=3)[0]) == []
    assert differing(found, by_textbook(world, 0.5, num_steps=3, stale=True)[0]) != []
    assert differing(found, by_textbook(world, None, num_steps=3)[0]) != []


@pytest.mark.parametrize("copying", [True, False])
def test_updates_by_torch_do_not_disturb_the_backward_of_other_blocks(copying: bool) -> None:
    """Weights of all blocks are one tensor; autograd must not take an update for a change of it."""
    world = world_of("llama of 5 layers")
    case = Case(sort="", steps=(), update="in_backward", copying=copying)
    states = []
    for kernel in (load_kernel(), TorchKernel()):
        optimizer = AdamW(learning_rate=LR, weight_decay=DECAY, kernel=kernel)
        with world.engine(case, optimizer=optimizer) as engine:
            for step in range(3):
                engine.step(batch_of(step))
        states.append(state_of(world))
    assert differing(*states) == []


@pytest.mark.few(3)
@pytest.mark.parametrize("sort", SORTS)
def test_updates_in_backward_are_late_updates_without_clipping(sort: str) -> None:
    world = world_of(sort)
    late, _ = by_engine(world, "late", None, num_steps=4)
    in_backward, norms = by_engine(world, "in_backward", None, num_steps=4)
    assert differing(in_backward, late) == []
    assert norms == [None] * 4
    clipped, _ = by_engine(world, "late", 0.1, num_steps=4)
    assert differing(in_backward, clipped) != []


def test_updates_in_backward_need_no_room_for_gradients() -> None:
    """12 bytes per bf16 param and not 14."""
    world = world_of("gemma, tied")
    expected, _ = by_engine(world, "in_backward", None, num_steps=3)
    world.rewind()
    small = Store(build_layout(world.decoder.blocks, WITHOUT_CLIP))
    for param in world.decoder.params:
        small.param(param.name, TensorKind.HI).copy_(world.store.param(param.name, TensorKind.HI))
    optimizer = AdamW(learning_rate=LR, weight_decay=DECAY)
    with make_engine(world.decoder, small, optimizer=optimizer, update="in_backward") as engine:
        for step in range(3):
            engine.step(batch_of(step))
    for name in trained(world):
        assert torch.equal(small.master(name), expected[f"{name} master"])


def test_late_updates_with_clipping_are_plain_pytorchs_within_rounding() -> None:
    """fp32: `clip_grad_norm_` and `torch.optim.AdamW` on the resident model, 20 steps."""
    world = world_of("llama in fp32")
    clip = 5.0
    plain, plain_norms = by_pytorch(world, clip)
    assert 0 < sum(norm > clip for norm in plain_norms) < NUM_STEPS
    found, norms = by_engine(world, "late", clip)
    assert norms == pytest.approx(plain_norms, rel=1e-5)
    for name, weight in plain.items():
        torch.testing.assert_close(found[f"{name} master"], weight, rtol=0, atol=1e-6)
    unclipped, _ = by_pytorch(world, math.inf)
    assert any(
        (found[f"{name} master"] - weight).abs().max() > 1e-4 for name, weight in unclipped.items()
    )


def by_pytorch(world: World, clip: float) -> tuple[State, list[float]]:
    world.rewind()
    model = AutoModelForCausalLM.from_config(world.decoder.config, dtype=torch.float32).train()
    with torch.no_grad():
        for param in world.decoder.params:
            model.get_parameter(param.name).copy_(world.store.param(param.name, TensorKind.HI))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
    norms = []
    for step in range(NUM_STEPS):
        batch = batch_of(step)
        num_valid_tokens = sum(micro.num_valid_tokens for micro in batch)
        optimizer.zero_grad()
        for micro in batch:
            logits = model(input_ids=micro.input_ids, use_cache=False).logits[:, :-1]
            targets = micro.labels[:, 1:].flatten()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
            torch.autograd.backward(loss / num_valid_tokens)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


# No gradient that is not finite reaches a weight.

Poison = Callable[..., None]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Poison:
    """Puts a value into the gradients of some blocks, in the second step."""
    table = StepActions.table

    def poison_(*blocks: int, value: float = math.nan) -> None:
        def drain(actions: StepActions, op: Op) -> int | None:
            if op.block in blocks and actions._step == 2:
                sums = actions.machine.gradients._sums
                assert isinstance(sums, SlotSums)
                next(iter(sums._sums[op.place("grad_sum")[1]].values())).view(-1)[5] = value
            return table(actions)[OpKind.DRAIN](op)

        monkeypatch.setattr(
            StepActions,
            "table",
            lambda self: table(self) | {OpKind.DRAIN: functools.partial(drain, self)},
        )

    return poison_


def play(world: World, update: Update, batches: list[int]) -> list[State]:
    """The state after each step."""
    optimizer = AdamW(learning_rate=LR, weight_decay=DECAY)
    case = Case(sort="", steps=(), update=update, tape="host")
    states = []
    with world.engine(case, optimizer=optimizer) as engine:
        for number in batches:
            engine.step(batch_of(number))
            engine.synchronize()
            states.append(state_of(world))
            assert not engine.weights_inconsistent
    return states


ALL_BLOCKS = (0, 1, 2, 3)
BOTH: tuple[Update, ...] = ("in_backward", "late")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("update", BOTH)
def test_a_step_whose_gradients_are_not_finite_is_as_if_it_had_never_been(
    update: Update, value: float, poison: Poison
) -> None:
    """Weights, moments, and the number of the next update too."""
    world = world_of("llama of 2 layers")
    good = play(world, update, [0, 2])
    poison(*ALL_BLOCKS, value=value)
    found = play(world, update, [0, 1, 2])
    assert differing(found[1], good[0]) == []
    assert differing(found[2], good[1]) == []
    assert differing(found[2], found[1]) != []


@pytest.mark.few(7)
@pytest.mark.parametrize("block", ALL_BLOCKS)
@pytest.mark.parametrize("update", BOTH)
def test_one_bad_block_stops_all_late_updates_but_only_its_own_in_backward(
    update: Update, block: int, poison: Poison
) -> None:
    """Without a global norm the blocks above it have had their update when it turns up."""
    world = world_of("llama of 2 layers")
    names = {param.name for param in world.decoder.blocks[block].params}
    good = play(world, update, [0, 2])
    poison(block)
    found = play(world, update, [0, 1, 2])
    for name in found[0]:
        stopped = update == "late" or name.rpartition(" ")[0] in names
        assert torch.equal(found[1][name], found[0][name]) == stopped, name
        assert found[2][name].isfinite().all()
        assert not torch.equal(found[2][name], found[1][name]), name
    assert (differing(found[2], good[1]) == []) == (update == "late")


@pytest.mark.parametrize("update", BOTH)
def test_an_optimizer_that_did_not_look_would_be_noticed(
    update: Update, poison: Poison, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AdamW, "squared_norm", lambda self, gradient: 1.0)
    poison(1)
    found = play(world_of("llama of 2 layers"), update, [0, 1])
    assert not all(part.isfinite().all() for part in found[1].values())
