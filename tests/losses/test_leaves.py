"""Laws of leaves.py: leaves and gradients of ordinary autograd, in chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatrain.errors import ConfigError
from megatrain.losses import leaves as leaves_module
from megatrain.losses.head import IGNORED, head_gradients, head_logprobs, trained_rows
from megatrain.losses.leaves import Notes, TokenOutputs, TokenOutputSpec
from megatrain.losses.loss import Loss, LossInputs, LossValue, SmoothedNextToken
from tests.losses.test_head import VOCABULARY, World, make, soft_cap

ALL = TokenOutputSpec(entropy=True, logsumexp=True, mean_logits=True, top_k=3)
NAMES = ("logprobs", "entropy", "logsumexp", "mean_logits", "logits")
CLOSE = 2e-6


def loss_of(leaves: TokenOutputs) -> Tensor:
    """Return a loss in which every leaf has a gradient of its own, linear in none."""
    found = leaves.named()
    terms = [
        (at + 1) * found[name].sin().square().sum()
        for at, name in enumerate(NAMES)
        if name in found
    ]
    return torch.stack(terms).sum()


def by_autograd(
    world: World, wanted: TokenOutputSpec, tokens: Tensor | None
) -> tuple[TokenOutputs, list[Tensor]]:
    """Return leaves of all rows, and the gradients of rows and weight, through all logits."""
    rows = world.rows.clone().requires_grad_()
    kept = (world.targets != IGNORED).nonzero()[:, 0]
    logits = F.linear(rows[kept], world.weight, world.bias)
    logits = (logits if world.scores is None else world.scores(logits)).float()
    logprobs = logits.log_softmax(1)
    chosen = logits.topk(wanted.top_k, 1).indices if tokens is None else tokens[kept]
    of_kept = TokenOutputs(
        logprobs=logprobs.gather(1, world.targets[kept, None])[:, 0],
        entropy=-(logprobs.exp() * logprobs).sum(1),
        logsumexp=logits.logsumexp(1),
        mean_logits=logits.mean(1),
        logits=logits.gather(1, chosen),
        tokens=chosen,
    )
    empty = (len(rows),)
    found = of_kept.mapped(
        lambda one: one.new_zeros((*empty, *one.shape[1:])).index_copy(0, kept, one)
    )
    grads = torch.autograd.grad(loss_of(found), [rows, world.weight])
    return found.mapped(Tensor.detach), list(grads)


def in_chunks(
    world: World, wanted: TokenOutputSpec, tokens: Tensor | None, chunk: int
) -> tuple[TokenOutputs, list[Tensor]]:
    trained = trained_rows(world.targets, chunk)
    notes = Notes(wanted, torch.zeros(len(world.rows)), tokens)
    head_logprobs(world.rows, trained, world.projection, notes=notes)
    leaves = notes.leaves().detached()
    given = leaves.gradients(loss_of(leaves))
    d_weight = torch.zeros_like(world.weight)

    def add(first: int, weight: Tensor | None, bias: Tensor | None) -> None:
        assert weight is not None
        d_weight.data += weight

    result = head_gradients(world.rows, trained, given.logprobs, world.projection, add, given)
    return leaves.mapped(Tensor.detach), [result.rows, d_weight.detach()]


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def distances(
    ours: tuple[TokenOutputs, list[Tensor]], expected: tuple[TokenOutputs, list[Tensor]]
) -> dict[str, float]:
    found = {n: distance(ours[0].named()[n], expected[0].named()[n]) for n in NAMES}
    for name, one, other in zip(("rows", "weight"), ours[1], expected[1], strict=True):
        found[name] = distance(one, other)
    return found


def some_tokens(world: World) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(VOCABULARY, (len(world.rows), 4), generator=generator)


CASES = [(scores, named) for scores in (None, soft_cap) for named in (False, True)]


@pytest.mark.parametrize(("scores", "named"), CASES)
@pytest.mark.parametrize("chunk", [1, 7, 99])
def test_chunks_give_leaves_and_gradients_of_autograd(
    chunk: int, scores: Callable[[Tensor], Tensor] | None, named: bool
) -> None:
    world = make(scores=scores)
    tokens = some_tokens(world) if named else None
    wanted = replace(ALL, top_k=0, tokens="tokens") if named else ALL
    expected = by_autograd(world, wanted, tokens)
    found = in_chunks(world, wanted, tokens, chunk)
    assert max(distances(found, expected).values()) < CLOSE


def test_a_gradient_left_out_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    world, real = make(), leaves_module.turn_logprobs
    expected = by_autograd(world, ALL, None)
    for name in NAMES[1:]:

        def forgets(logprobs: Tensor, found: TokenOutputs, *more: object, leaf: str = name) -> None:
            real(logprobs, replace(found, **{leaf: None}), *more)  # type: ignore[arg-type]

        monkeypatch.setattr("megatrain.losses.head.turn_logprobs", forgets)
        assert distances(in_chunks(world, ALL, None, 7), expected)["rows"] > 1e-2


def test_a_token_that_cannot_be_adds_nothing_to_entropy() -> None:
    def masked(logits: Tensor) -> Tensor:
        return torch.cat([logits[:, :-1], torch.full_like(logits[:, -1:], -torch.inf)], 1)

    world = make(scores=masked)
    world.targets.clamp_(max=VOCABULARY - 2)
    wanted = TokenOutputSpec(entropy=True)
    leaves, grads = in_chunks(world, wanted, None, 7)
    assert leaves.entropy is not None
    assert all(bool(one.isfinite().all()) for one in (leaves.entropy, *grads))


# A loss that wants leaves.


class Both(Loss):
    """Reads entropies beside log-probabilities."""

    output_spec = TokenOutputSpec(entropy=True)

    def num_items(self, inputs: LossInputs) -> int:
        return int((inputs.targets != IGNORED).sum())

    def compute_loss(self, inputs: LossInputs, logprobs: Tensor) -> LossValue:
        assert inputs.outputs is not None
        assert inputs.outputs.entropy is not None
        return LossValue(loss_sum=(inputs.outputs.entropy * logprobs).sum())


def test_a_loss_has_a_gradient_for_each_leaf() -> None:
    targets = torch.tensor([[5, 7], [IGNORED, 2]])
    logprobs, entropy = -torch.rand(2, 2), torch.rand(2, 2)
    leaves = TokenOutputs(logprobs=logprobs, entropy=entropy)
    found = Both().logprob_grads(
        LossInputs(targets=targets, loss_tensors={}, outputs=leaves), logprobs, 3
    )
    torch.testing.assert_close(found.logprob_grads, entropy / 3)
    assert found.others is not None
    assert found.others.entropy is not None
    torch.testing.assert_close(found.others.entropy, logprobs / 3)
    assert not entropy.requires_grad


def test_a_leaf_that_is_not_read_has_no_gradient() -> None:
    leaves = TokenOutputs(logprobs=-torch.rand(2, 2), entropy=torch.rand(2, 2)).detached()
    assert leaves.gradients(leaves.logprobs.sum()).is_plain
    assert leaves.entropy is not None
    found = leaves.gradients(leaves.entropy.sum())
    assert torch.equal(found.logprobs, torch.zeros(2, 2))


# Fine-tuning with label smoothing.

TERMS = [{"label_smoothing": 0.1}, {"label_smoothing": 0.3}]


def tempered(world: World, terms: dict[str, float], chunk: int = 7) -> tuple[Tensor, Tensor]:
    """Return the loss and the gradient of the rows, as a step has them."""
    loss, trained = SmoothedNextToken(**terms), trained_rows(world.targets, chunk)
    notes = Notes(loss.output_spec, torch.zeros(len(world.rows)))
    logprobs = head_logprobs(world.rows, trained, world.projection, notes=notes)
    shape = torch.Size((1, len(world.rows)))
    targets, leaves = world.targets.view(shape), notes.leaves().shaped(shape)
    inputs = LossInputs(targets=targets, loss_tensors={}, outputs=leaves)
    found = loss.logprob_grads(inputs, logprobs.view(shape), loss.num_items(inputs))
    assert found.loss is not None
    assert found.others is not None
    others = found.others.shaped(shape[1:])
    result = head_gradients(
        world.rows, trained, others.logprobs, world.projection, lambda *_: None, others
    )
    return found.loss, result.rows


def by_torch(world: World, terms: dict[str, float]) -> tuple[Tensor, Tensor]:
    """Return the same by torch's own functions."""
    rows = world.rows.clone().requires_grad_()
    logits = F.linear(rows, world.weight)[world.targets != IGNORED]
    targets = world.targets[world.targets != IGNORED]
    smoothing = terms.get("label_smoothing", 0.0)
    loss = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    return loss.detach(), torch.autograd.grad(loss, rows)[0]


@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_label_smoothing_is_that_of_torch(terms: dict[str, float]) -> None:
    world = make()
    for found, expected in zip(tempered(world, terms), by_torch(world, terms), strict=True):
        assert distance(found, expected) < CLOSE


@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_another_share_would_be_noticed(terms: dict[str, float]) -> None:
    world = make()
    other = {name: 1.1 * weight for name, weight in terms.items()}
    for found, expected in zip(tempered(world, other), by_torch(world, terms), strict=True):
        assert distance(found, expected) > 100 * CLOSE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": -1}, "top_k is -1 and tokens None; give a number above 0, .*"),
        ({"top_k": 2, "tokens": "mine"}, "top_k is 2 and tokens 'mine'; give .* not both."),
        ({"temperature": 0.0}, "temperature is 0; give a number above 0."),
    ],
)
def test_what_cannot_be_wanted_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        TokenOutputSpec(**changes)  # type: ignore[arg-type]
