"""What the engine computes: evaluations, sums of micro-batches, frozen parts, random numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import PreTrainedModel

from megatrain.batch import MicroBatch
from megatrain.devices.device import CpuDevice
from megatrain.errors import BatchError
from megatrain.memory.kinds import TensorKind
from megatrain.step.ops import OpKind
from testkit.plain import plain_logprobs
from testkit.states import (
    LATE,
    MICRO_BATCHES,
    same,
    state_after,
    state_of,
    steps_of,
    threads_end,
)
from testkit.worlds import SORTS, Case, Sort, World, make_batch, world_of


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    with threads_end():
        yield


# Evaluation.


def plain_evaluation(model: PreTrainedModel, batch: list[MicroBatch]) -> tuple[float, int]:
    total, count = 0.0, 0
    for micro in batch:
        with torch.no_grad():
            logits = model(**micro.inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
        targets = micro.labels[:, 1:].flatten()
        losses = F.cross_entropy(logits.float(), targets, reduction="none")
        total += float(losses.double().sum())
        count += int((targets != -100).sum())
    return total, count


@pytest.mark.parametrize("sort", SORTS)
def test_evaluate_gives_the_plain_loss(sort: str) -> None:
    world = world_of(sort)
    case = Case(sort=sort, steps=steps_of(3), update="late", tape="host")
    batch = make_batch(MICRO_BATCHES, seed=5)
    with world.engine(case) as engine:
        assert engine.evaluate(batch) == pytest.approx(
            plain_evaluation(world.plain().eval(), batch), rel=1e-12
        )
        engine.step(make_batch(case.steps[0], seed=0))
        engine.step(make_batch(case.steps[1], seed=1))
        found = engine.evaluate(batch)  # the plain model then reads settled weights
        assert found == pytest.approx(plain_evaluation(world.plain().eval(), batch), rel=1e-12)


def test_training_goes_on_with_dropout_behind_an_evaluation_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = world_of("gpt2, tied, with dropout")
    case = Case(sort="gpt2, tied, with dropout", steps=(), update="none")
    with world.engine(case) as engine:
        assert isinstance(engine.device, CpuDevice)
        monkeypatch.setattr(engine.device.meter, "add", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.evaluate(make_batch(((1, 4),), seed=0))
    assert world.decoder.model.training


# Log-probabilities of given tokens.


@pytest.mark.parametrize("sort", ["llama in fp32", "gemma, tied", "gpt2, tied, with dropout"])
@pytest.mark.parametrize("copying", [True, False])
def test_logprobs_are_those_of_the_plain_model_bit_by_bit(sort: str, copying: bool) -> None:
    """Also right after a step whose updates are late, with tensors that only a loss reads."""
    world = world_of(sort)
    case = Case(sort=sort, steps=steps_of(1), update="late", tape="host", copying=copying)
    batch = [
        replace(micro, loss_tensors={"advantages": torch.ones(micro.labels.shape)})
        for micro in make_batch(MICRO_BATCHES, seed=5)
    ]
    batch[0].labels[:, 1:3] = -100
    with world.engine(case) as engine:
        engine.step(make_batch(case.steps[0], seed=0))
        found = engine.logprobs(batch)
        plain = world.plain().eval()
    with torch.no_grad():
        expected = [plain_logprobs(plain, micro) for micro in batch]
    assert all(map(torch.equal, found, expected))
    assert (found[0][:, :2] == 0).all()
    assert all((logprobs[:, -1] == 0).all() for logprobs in found)


def test_logprobs_of_another_token_would_be_noticed() -> None:
    world = world_of("llama in fp32")
    batch = make_batch(MICRO_BATCHES, seed=5)
    with world.engine(Case(sort="", steps=(), update="none")) as engine:
        before = engine.logprobs(batch)
        batch[0].labels[0, 3] = (batch[0].labels[0, 3] + 1) % 8
        after = engine.logprobs(batch)
    assert (before[0] != after[0]).nonzero().tolist() == [[0, 2]]


# Micro-batches.


@pytest.mark.parametrize("cut", [(1, 1, 1, 1), (1, 3), (2, 2)])
def test_micro_batches_add_up_to_one_batch(cut: tuple[int, ...]) -> None:
    """fp32, unequal numbers of trained tokens: the mean is over the tokens of the step."""
    world = world_of("llama in fp32")
    (whole,) = make_batch(((4, 6),), seed=3)
    whole.labels[0, :5] = -100
    rows = torch.split(torch.tensor(range(4)), list(cut))
    parts = [MicroBatch(input_ids=whole.input_ids[r], labels=whole.labels[r]) for r in rows]
    found = []
    for batch in ([whole], parts):
        with world.engine(Case(sort="", steps=(), update="none", tape="host")) as engine:
            loss = engine.step(batch).loss
            engine.synchronize()
            found.append(
                (loss, {n: world.store.param(n, TensorKind.GRAD).clone() for n in trained(world)})
            )
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, rtol=0, atol=1e-6)


# What a step gives back, and what it leaves alone.


def test_a_step_tells_what_it_did() -> None:
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, 4:] = 0
    ids = torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    padded = MicroBatch(input_ids=ids, labels=ids.where(mask > 0, -100), attention_mask=mask)
    whole = MicroBatch(input_ids=ids, labels=ids)
    with world_of(LATE.sort).engine(LATE) as engine:
        result = engine.step([padded, whole])
    assert (result.num_tokens, result.num_valid_tokens) == (10 + 12, 8 + 10)
    assert result.loss == sum(result.micro_losses)
    assert result.grad_norm is not None
    assert result.grad_norm > 0
    model = world_rewound(LATE.sort).plain().eval()
    total = sum(plain_evaluation(model, [micro])[0] for micro in (padded, whole))
    assert result.loss == pytest.approx(total / 18, rel=1e-6)


def world_rewound(sort: str) -> World:
    world = world_of(sort)
    world.rewind()
    return world


def test_a_bad_batch_is_refused_before_anything_is_touched() -> None:
    world = world_of(LATE.sort)
    good = make_batch(LATE.steps[0], seed=0)
    ids = torch.full((1, 4), 64)
    with world.engine(LATE) as engine:
        engine.step(good)
        with pytest.raises(BatchError, match="token 64 in input_ids is outside"):
            engine.step([MicroBatch(input_ids=ids, labels=ids)])
        with pytest.raises(BatchError, match="at least one micro-batch"):
            engine.evaluate([])
        assert not engine.weights_inconsistent
        engine.step(make_batch(LATE.steps[1], seed=1))
    assert same(state_of(world), state_after(LATE, 2))


def draws_around_a_step(reference: bool) -> list[float]:
    case = Case(sort="gpt2, tied, with dropout", steps=(), update="none")
    batch = make_batch(((1, 4),), seed=0)
    with world_of(case.sort).engine(case, reference=reference) as engine:
        torch.manual_seed(3)
        before = torch.rand(2).tolist()
        engine.step(batch)
        engine.evaluate(batch)
        return before + torch.rand(2).tolist()


@pytest.mark.parametrize("reference", [True, False])
def test_the_callers_random_numbers_are_not_disturbed(
    reference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    alone = [*torch.rand(2).tolist(), *torch.rand(2).tolist()]
    assert draws_around_a_step(reference) == alone
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)
    assert draws_around_a_step(reference) != alone


def test_dropout_differs_by_step_micro_batch_and_seed_and_is_off_without() -> None:
    sort = "gpt2, tied, with dropout"
    case = Case(sort=sort, steps=(), update="none")
    twins = make_batch(((1, 5),), seed=0) * 2
    losses: list[float] = []
    for seed in (7, 8):
        with world_of(sort).engine(case, seed=seed) as engine:
            for _ in range(2):
                losses += engine.step(twins).micro_losses
    assert len(set(losses)) == 8
    with world_of(LATE.sort).engine(case) as engine:
        assert len({*engine.step(twins).micro_losses, *engine.step(twins).micro_losses}) == 1


FROZEN = {
    "embedding": (SORTS["llama of 2 layers"].config, ("model.embed_tokens.*",)),
    "head": (SORTS["llama of 2 layers"].config, ("model.norm.*", "lm_head.*")),
    "all but the head": (SORTS["llama of 5 layers"].config, ("model.embed*", "model.layers.*")),
    "all but one layer": (
        SORTS["llama of 5 layers"].config,
        ("model.embed*", "model.layers.[0134].*", "model.norm.*", "lm_head.*"),
    ),
    "matrices": (SORTS["llama of 5 layers"].config, ("*proj.weight", "lm_head.*", "*embed*")),
    "tied table": (SORTS["gemma, tied"].config, ("model.embed_tokens.*",)),
    "tied table beside trained positions": (
        SORTS["gpt2, tied, with dropout"].config,
        ("transformer.wte.*",),
    ),
    "tied table's neighbors": (
        SORTS["gpt2, tied, with dropout"].config,
        ("transformer.wpe.*", "transformer.ln_f.*"),
    ),
}


@pytest.mark.few(7)
@pytest.mark.parametrize("what", FROZEN)
def test_freezing_changes_no_other_gradient_and_no_frozen_weight(what: str) -> None:
    config, frozen = FROZEN[what]
    whole, part = World(Sort(config=config)), World(Sort(config=config, frozen=frozen))
    case = Case(sort="", steps=steps_of(2), update="none", tape="host")
    gradients = []
    for world in (whole, part):
        with world.engine(case) as engine:
            for number in range(2):  # the second finds what the first left in its places
                engine.step(make_batch(case.steps[number], seed=number))
            engine.synchronize()
            gradients.append(
                {name: world.store.param(name, TensorKind.GRAD) for name in trained(world)}
            )
    assert 0 < len(gradients[1]) < len(gradients[0])
    for name, gradient in gradients[1].items():
        assert gradient.any(), name
        assert torch.equal(gradient, gradients[0][name]), name

    before = {p.name: part.store.param(p.name, TensorKind.HI).clone() for p in part.decoder.params}
    with part.engine(Case(sort="", steps=(), update="late")) as engine:
        engine.step(make_batch(case.steps[0], seed=0))
    for name, weight in before.items():
        moved = not torch.equal(part.store.param(name, TensorKind.HI), weight)
        assert moved == (name in gradients[1]), name


def trained(world: World) -> list[str]:
    return [param.name for param in world.decoder.params if param.trained]


def test_a_trace_shows_every_kind_of_op_of_one_process_in_memory(tmp_path: Path) -> None:
    case = Case(sort=LATE.sort, steps=steps_of(2), update="late", tape="host")
    with world_of(case.sort).engine(case, trace=True) as engine:
        engine.step(make_batch(case.steps[0], seed=0))
        engine.synchronize()
        engine.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())
    names = json.dumps(events)
    others = {OpKind.MOMENTUM, OpKind.SEND, OpKind.ORTHOGONALIZE, OpKind.RETURN}
    in_memory = [kind for kind in OpKind if kind.spec.lane not in ("disk", "comm")]
    kinds = [kind for kind in in_memory if kind not in others]  # of Muon
    assert all(f'"{kind.name}(' in names or f'"{kind.name}"' in names for kind in kinds)


@pytest.mark.parametrize("copying", [False, True])
@pytest.mark.parametrize("sort", ["llama of 2 layers", "gemma, tied", "gpt2, tied, with dropout"])
def test_predictions_are_the_plain_logits_behind_the_last_token(sort: str, copying: bool) -> None:
    world = world_of(sort)
    case = Case(sort=sort, steps=(), update="none", copying=copying)
    batch = make_batch(((2, 5), (1, 3)), seed=1, form="padded")
    with world.engine(case) as engine:
        found = engine.next_token_logits(batch)
        model = world.plain().eval()
        for micro, logits in zip(batch, found, strict=True):
            with torch.no_grad():
                expected = model(**micro.inputs).logits.float()
            last = micro.attention_mask.sum(1) - 1  # type: ignore[union-attr]
            for row, position in enumerate(last.tolist()):
                torch.testing.assert_close(logits[row], expected[row, position])
        assert not torch.allclose(found[0][0], expected[0, 0])
