"""Laws of a step in two phases: the bits and the traffic of one, and any loss over its leaves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.batch import MicroBatch
from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.engine.engine import Engine
from megatrain.engine.open_step import ForwardPass
from megatrain.engine.results import StepResult
from megatrain.errors import BatchError
from megatrain.losses.head import IGNORED
from megatrain.losses.leaves import LOGPROBS_ALONE, TokenOutputs, TokenOutputSpec
from megatrain.losses.loss import Loss, LossInputs, LossValue
from megatrain.memory.kinds import TensorKind
from megatrain.ranks.ranks import Ranks
from testkit.pair_loss import with_pairs
from testkit.rank_threads import Together
from testkit.rank_training import RankCase, differing, engine_of, ranks_of, state_of
from testkit.simulated.accelerator import Simulator
from testkit.simulated.watched import WatchedOptimizer, watched
from testkit.virtual_ranks import State
from testkit.worlds import SORTS, Case, Outcome, World, dawdling_lanes, make_batch, world_of

SHAPES = ((2, 6), (3, 5))
WANTED = TokenOutputSpec(entropy=True, logsumexp=True, mean_logits=True, top_k=3, hidden=True)
WAYS: tuple[dict[str, Any], ...] = (
    {"update": "late", "tape": "host"},
    {"update": "late", "tape": "device", "kept_layers": 1, "slots": 3},
    {"update": "late", "copying": False},
    {"update": "late", "tier": "states"},
    {"update": "in_backward", "tape": "host", "tier": "states"},
    {"update": "second_backward", "tape": "host"},
    {"update": "late", "tile_tokens": 4},
)


def next_token(part: ForwardPass, batch: Sequence[MicroBatch]) -> Tensor:
    """Return the loss of fine-tuning, of all micro-batches."""
    count = sum(micro.num_valid_tokens for micro in batch)
    return sum((-leaves.logprobs.sum() for leaves in part.outputs), torch.zeros(())) / count


def in_phases(engine: Engine, batch: Sequence[MicroBatch]) -> StepResult:
    part = engine.forward(batch)
    return part.backward(next_token(part, batch))


def outcome(
    world: World, case: Case, take: Callable[[Engine, Sequence[MicroBatch]], StepResult],
    **changes: Any,
) -> Outcome:  # fmt: skip
    """Return norms and states of three steps, of which an evaluation follows the second."""
    found = Outcome()
    with world.engine(case, **changes) as engine:
        for seed in range(3):
            batch = make_batch(SHAPES, seed=seed, form=case.form)
            result = take(engine, batch)
            found.numbers += [result.grad_norm, result.aux_loss, float(result.applied)]
            if seed == 1:
                found.numbers += [*engine.evaluate(batch)]
    tier: Any = "none" if case.update == "none" else case.tier
    found.states = world.bytes_of(TensorKind.HI, TensorKind.LO, tier=tier)
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("sort", SORTS)
def test_two_phases_have_the_bits_of_one(sort: str, way: dict[str, Any]) -> None:
    world, case = world_of(sort), Case(sort=sort, steps=(), **way)
    expected = outcome(world, case, Engine.step, reference=True)
    assert outcome(world, case, in_phases, reference=True).differences(expected) == []
    for timing in range(2):
        lanes = dawdling_lanes(timing)
        assert outcome(world, case, in_phases, lanes=lanes).differences(expected) == []


def test_another_loss_would_be_noticed() -> None:
    world, case = world_of("llama in fp32"), Case(sort="", steps=(), update="late")

    def another(engine: Engine, batch: Sequence[MicroBatch]) -> StepResult:
        part = engine.forward(batch)
        return part.backward(next_token(part, batch) + 1e-3 * part.outputs[1].logprobs.sum())

    expected = outcome(world, case, Engine.step)
    assert outcome(world, case, another).differences(expected)


def test_the_loss_is_that_of_the_step() -> None:
    world, batch = world_of("llama in fp32"), make_batch(SHAPES, seed=0)
    case = Case(sort="", steps=(), update="late")
    with world.engine(case) as engine:
        expected = engine.step(batch)
    with world.engine(case) as engine:
        found = in_phases(engine, batch)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.micro_losses == ()
    assert (found.num_tokens, found.num_valid_tokens) == (
        expected.num_tokens,
        expected.num_valid_tokens,
    )


def test_leaves_without_a_step_are_those_of_one_without_dropout() -> None:
    case, batch = Case(sort="", steps=(), update="late"), make_batch(SHAPES, seed=0)
    for sort, is_same in {"llama in fp32": True, "gpt2, tied, with dropout": False}.items():
        with world_of(sort).engine(case) as engine:
            part = engine.forward(batch, WANTED)
            expected = [one.mapped(Tensor.detach) for one in part.outputs]
            part.discard()
            for found, one in zip(engine.token_outputs(batch, WANTED), expected, strict=True):
                assert found.named().keys() == one.named().keys()
                same = {n: torch.equal(t, one.named()[n]) for n, t in found.named().items()}
                assert all(same.values()) is is_same, same


# Weights cross the link as often as in one phase.


def traffic(take: Callable[[Engine, Sequence[MicroBatch]], object], num_micro: int) -> Counter[str]:
    """Return the bytes of each kind of copy, and the fetches of each block, in a step."""
    world = world_of("llama of 5 layers")
    case = Case(sort="", steps=(), update="late", tape="host")
    with world.engine(case, trace=True) as engine:
        take(engine, make_batch(((2, 6),) * num_micro, seed=0))
        engine.synchronize()
        assert engine.trace is not None
        found: Counter[str] = Counter()
        for span in (one for one in engine.trace.spans if one.awaited is None):
            if span.op.kind in ("fetch", "drain"):
                found[f"{span.op.kind} of block {span.op.block}"] += 1
            found[f"bytes on lane {span.op.lane}"] += span.num_bytes or 0
    return found


@pytest.mark.parametrize("num_micro", [1, 4])
def test_weights_cross_twice_and_gradients_once(num_micro: int) -> None:
    found = traffic(in_phases, num_micro)
    assert found == traffic(Engine.step, num_micro)
    blocks = [found[f"fetch of block {block}"] for block in range(7)]
    assert blocks == [1, 2, 2, 2, 1, 1, 1]  # the last two layers stay in their slots
    assert [found[f"drain of block {block}"] for block in range(7)] == [1] * 7


# Any loss over the leaves.


class OfLeaves(Loss):
    """A loss over every leaf, as a step in one phase has it."""

    output_spec = WANTED

    def num_items(self, inputs: LossInputs) -> int:
        return int((inputs.targets != IGNORED).sum())

    def compute_loss(self, inputs: LossInputs, logprobs: Tensor) -> LossValue:
        assert inputs.outputs is not None
        return LossValue(loss_sum=over_all(inputs.outputs), metrics={"seen": logprobs.sum()})


class OfNamed(OfLeaves):
    """The same over the logits of tokens that the batch names, at another temperature."""

    output_spec = replace(WANTED, top_k=0, tokens="mine", temperature=2.0)
    required_tensors = ("mine",)


def over_all(leaves: TokenOutputs) -> Tensor:
    """Return a sum over trained positions in which each leaf has a gradient of its own."""
    assert leaves.entropy is not None
    assert leaves.logsumexp is not None
    assert leaves.mean_logits is not None
    assert leaves.logits is not None
    assert leaves.hidden is not None
    terms = -leaves.logprobs - 0.3 * leaves.entropy + 0.1 * leaves.logsumexp.square()
    terms = terms + 0.2 * leaves.mean_logits + (leaves.logits * 0.1).square().sum(-1)
    return terms.sum() + 0.01 * leaves.hidden.float().square().sum()


def plain_gradients(world: World, batch: Sequence[MicroBatch], loss: OfLeaves) -> dict[str, Tensor]:
    """Return gradients of ordinary autograd through the resident model."""
    model = world.plain()
    count = sum(loss.num_items(micro.loss_inputs()) for micro in batch)
    for micro in batch:
        inputs = micro.loss_inputs()
        hidden = model.model(**micro.inputs).last_hidden_state
        logits = model.lm_head(hidden).float() / loss.output_spec.temperature
        logprobs = logits.log_softmax(-1)
        trained = inputs.targets != IGNORED
        chosen = micro.loss_tensors.get("mine", logits.topk(3, dim=-1).indices)
        leaves = TokenOutputs(
            logprobs=logprobs.gather(-1, inputs.targets.clamp(min=0)[..., None])[..., 0],
            entropy=-(logprobs.exp() * logprobs).sum(-1),
            logsumexp=logits.logsumexp(-1),
            mean_logits=logits.mean(-1),
            logits=logits.gather(-1, chosen),
        )
        kept = TokenOutputs(
            **{name: _where(trained, leaf) for name, leaf in leaves.named().items()}
        )
        (over_all(replace(kept, hidden=hidden)) / count).backward()  # type: ignore[no-untyped-call]
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _where(trained: Tensor, leaf: Tensor) -> Tensor:
    return torch.where(trained.view(*trained.shape, *[1] * (leaf.dim() - 2)), leaf, 0.0)


def with_named(batch: Sequence[MicroBatch]) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(1)
    return [
        m.with_loss_tensors(mine=torch.randint(64, (*m.labels.shape, 4), generator=generator))
        for m in batch
    ]


@pytest.mark.parametrize("loss", [OfLeaves(), OfNamed()])
@pytest.mark.parametrize("way", [{}, {"tile_tokens": 4}], ids=str)
@pytest.mark.parametrize("phases", [1, 2])
def test_a_loss_over_leaves_has_the_gradients_of_autograd(
    phases: int, way: dict[str, Any], loss: OfLeaves
) -> None:
    world, batch = world_of("llama in fp32"), make_batch(SHAPES, seed=0)
    batch = with_named(batch) if isinstance(loss, OfNamed) else batch
    with world.engine(Case(sort="", steps=(), update="none", **way), loss=loss) as engine:
        expected = plain_gradients(world, batch, loss)
        if phases == 1:
            result = engine.step(batch)
            assert result.metrics["seen"] < 0
            total, units = engine.evaluate(batch)
            assert result.loss == pytest.approx(total / units, rel=1e-5)
        else:
            part = engine.forward(batch, loss.output_spec)
            count = sum(loss.num_items(micro.loss_inputs()) for micro in batch)
            part.backward(torch.stack([over_all(one) for one in part.outputs]).sum() / count)
    for name, gradient in expected.items():
        found = world.store.param(name, TensorKind.GRAD).view(gradient.shape)
        apart = float((found.double() - gradient.double()).norm() / gradient.double().norm())
        assert apart < 3e-6, name


def test_a_loss_may_span_micro_batches() -> None:
    """Pairs whose answers are in two micro-batches: no loss of one phase can see both."""
    world = world_of("llama in fp32")
    (both,) = make_batch(((4, 6),), seed=0)
    halves = [both.mapped(lambda one: one[:2]), both.mapped(lambda one: one[2:])]
    case = Case(sort="", steps=(), update="none")

    def of(chosen: Tensor, rejected: Tensor) -> Tensor:
        return -(chosen.sum(1) - rejected.sum(1)).sigmoid().log().mean()

    found = []
    for batch in ([both], halves):
        with world.engine(case) as engine:
            part = engine.forward(batch)
            logprobs = torch.cat([leaves.logprobs for leaves in part.outputs])
            part.backward(of(logprobs[:2], logprobs[2:]))
        found.append(world.bytes_of(TensorKind.GRAD))
    for name, gradient in found[0].items():
        one, other = (tensor.view(torch.float32) for tensor in (gradient, found[1][name]))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


# On a device, among ranks.


@pytest.mark.parametrize("policy", ["late", "random"])
def test_an_accelerator_gives_the_same_without_a_race(policy: Any) -> None:
    world = world_of("llama of 2 layers")
    case = Case(sort="", steps=(), update="late", tape="host")

    def take(engine: Engine, batch: Sequence[MicroBatch]) -> StepResult:
        part = engine.forward(batch, WANTED)
        return part.backward(torch.stack([over_all(one) for one in part.outputs]).sum() / 20)

    expected = outcome(world, case, take, reference=True)
    simulator = Simulator(1, policy)
    optimizer = WatchedOptimizer(world.optimizer(), simulator)
    with watched(simulator):
        found = outcome(world, case, take, device=AcceleratorDevice(simulator), optimizer=optimizer)
    assert found.differences(expected) == []
    assert (simulator.races, simulator.failures) == ([], [])


@pytest.mark.parametrize("num_micro", [1, 3])
def test_ranks_have_the_bits_of_one_phase(num_micro: int) -> None:
    case = RankCase(shapes=((2, 6), (3, 5), (1, 4))[:num_micro])
    model = case.model()

    def trained(ranks: Ranks) -> State:
        engine, store = engine_of(case, ranks, model)
        with engine:
            for batch in case.batches:
                part = engine.forward(batch)
                assert len(part.outputs) == len(batch[ranks.owner.rank :: 2])
                part.backward(next_token(part, batch))
        return state_of(store)

    found, expected = Together(2).run(trained), ranks_of(case)
    assert all(not differing(one, other.state) for one, other in zip(found, expected, strict=True))


# What is refused, and what a step that is not taken leaves behind.


@pytest.fixture
def engine() -> Any:
    world = world_of("llama in fp32")
    with world.engine(Case(sort="", steps=(), update="late", tape="host")) as made:
        yield made


def test_no_state_is_saved_or_taken_up_while_a_step_is_open(engine: Engine) -> None:
    """A step that is discarded would be counted, and the next ones would draw other numbers."""
    part = engine.forward(make_batch(SHAPES, seed=0))
    with pytest.raises(BatchError, match=r"^a step is open"):
        engine.snapshot()
    with pytest.raises(BatchError, match=r"^a step is open"):
        engine.restore(0, engine.num_updates)
    part.discard()
    assert engine.snapshot().num_steps == 0


def test_nothing_else_is_computed_while_a_step_is_open(engine: Engine) -> None:
    batch = make_batch(SHAPES, seed=0)
    part = engine.forward(batch)
    for call in (
        engine.step,
        engine.forward,
        engine.evaluate,
        engine.logprobs,
        engine.next_token_logits,
    ):
        with pytest.raises(BatchError, match=r"^a step is open: call `backward` .* or `discard`$"):
            call(batch)
    part.backward(next_token(part, batch))
    engine.step(batch)
    with pytest.raises(BatchError, match=r"^the step has gone back, or was discarded, before$"):
        part.backward(next_token(part, batch))


@pytest.mark.few(2)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_step_that_is_discarded_leaves_no_trace(way: dict[str, Any]) -> None:
    sort = "gpt2, tied, with dropout"
    world, case = world_of(sort), Case(sort=sort, steps=(), **way)

    def hesitates(engine: Engine, batch: Sequence[MicroBatch]) -> StepResult:
        engine.forward(batch).discard()
        return engine.step(batch)

    expected = outcome(world, case, Engine.step)
    assert outcome(world, case, hesitates).differences(expected) == []


def test_a_step_that_is_left_open_is_closed_with_its_engine() -> None:
    world = world_of("llama in fp32")
    with world.engine(Case(sort="", steps=(), update="late")) as engine:
        engine.step(make_batch(SHAPES, seed=0))
        engine.synchronize()
        before = world.bytes_of(TensorKind.HI, TensorKind.LO)
        engine.forward(make_batch(SHAPES, seed=1))
    after = world.bytes_of(TensorKind.HI, TensorKind.LO)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_loss_that_is_none_is_refused_and_the_step_stays_open(engine: Engine) -> None:
    batch = make_batch(SHAPES, seed=0)
    part = engine.forward(batch)
    with pytest.raises(BatchError, match=r"^the loss of a step must be a tensor with one number$"):
        part.backward(part.outputs[0].logprobs)
    with pytest.raises(BatchError, match=r"^the loss does not depend on any of the step's leaves$"):
        part.backward(torch.tensor(1.0))
    assert part.backward(next_token(part, batch)).applied


def test_tokens_that_are_missing_or_of_another_shape_are_refused(engine: Engine) -> None:
    batch, wanted = make_batch(SHAPES, seed=0), TokenOutputSpec(tokens="mine")
    with pytest.raises(BatchError, match=r"^micro-batch 0: loss_tensors has no 'mine'; "):
        engine.forward(batch, wanted)
    flat = [micro.with_loss_tensors(mine=micro.input_ids) for micro in batch]
    with pytest.raises(BatchError, match=r"^micro-batch 0: mine is \(2, 6\), .* length, k\)$"):
        engine.forward(flat, wanted)
    with pytest.raises(BatchError, match=r"^micro-batch 0: loss_tensors has 'answers'; "):
        engine.forward(with_pairs(make_batch(((2, 6),), seed=0)), LOGPROBS_ALONE)


def test_a_gradient_that_is_not_finite_names_the_micro_batch(engine: Engine) -> None:
    batch = make_batch(SHAPES, seed=0)
    part = engine.forward(batch)
    result = part.backward(next_token(part, batch) + math.inf * part.outputs[1].logprobs.sum())
    assert result.nonfinite is not None
    assert (result.nonfinite.micro, result.nonfinite.repeated, result.applied) == (1, True, False)
    assert in_phases(engine, batch).nonfinite is None
