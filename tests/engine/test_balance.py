"""The load-balancing loss: a streamed step is the plain model's with `output_router_logits`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain import load_model
from megatrain.batch import MicroBatch
from megatrain.disk.hf.model import HostModel
from megatrain.engine.results import StepResult
from megatrain.engine.sampling import continue_texts
from megatrain.errors import ConfigError
from megatrain.losses.head import IGNORED
from megatrain.memory.kinds import TensorKind
from megatrain.models.balance import Routing
from testkit.engines import make_engine
from testkit.families import BALANCED, tiny_model

COEFFICIENT = 0.1
"""Large enough to move every bit."""
Gradients = dict[str, Tensor]


def _batch(*, padded: bool = False, packed: bool = False) -> MicroBatch:
    """Return three rows of 24 tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 300, (3, 24), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[:, :3] = IGNORED
    if padded:
        mask[1, 20:], mask[2, 11:] = 0, 0
        labels[mask == 0] = IGNORED
    places = torch.cat([torch.arange(10), torch.arange(14)]).repeat(3, 1)
    return MicroBatch(
        input_ids=ids,
        labels=labels,
        attention_mask=mask if padded else None,
        position_ids=places if packed else None,
    )


def _plain(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    name = "aux_loss_coef" if family == "jetmoe" else "router_aux_loss_coef"
    model = tiny_model(family, dtype, output_router_logits=True)
    setattr(model, name, COEFFICIENT)
    return model.train()


def _expected(model: PreTrainedModel, batch: MicroBatch) -> tuple[float, float, Gradients]:
    """Return the plain model's loss, its balancing part, and its gradients."""
    model.zero_grad()
    output = model(**batch.inputs, labels=batch.labels, use_cache=False)
    output.loss.backward()
    grads = {
        name: torch.zeros_like(param) if param.grad is None else param.grad
        for name, param in model.named_parameters()
    }
    return output.loss.item(), output.aux_loss.item(), grads


def _found(
    folder: Path, batch: Sequence[MicroBatch], dtype: Any = "fp32", **settings: Any
) -> tuple[StepResult, Gradients]:
    return _run(load_model(folder, dtype=dtype), batch, **settings)


def _run(
    home: HostModel, batch: Sequence[MicroBatch], **settings: Any
) -> tuple[StepResult, Gradients]:
    settings = {"router_aux_loss": COEFFICIENT, **settings}
    with make_engine(home.decoder, home.store, **settings) as engine:
        result = engine.step(batch)
        engine.synchronize()
        params = home.decoder.params
        return result, {p.name: home.store.param(p.name, TensorKind.GRAD).clone() for p in params}


def _total(result: StepResult) -> float:
    assert result.aux_loss is not None
    return result.loss + COEFFICIENT * result.aux_loss


def _far(expected: Gradients, found: Gradients) -> float:
    return max(
        float((expected[name] - grad).abs().max() / expected[name].abs().max().clamp_min(1e-9))
        for name, grad in found.items()
    )


@pytest.mark.few(5)
@pytest.mark.parametrize("family", BALANCED)
def test_loss_and_gradients_are_those_of_the_plain_model(family: str, tmp_path: Path) -> None:
    model = _plain(family)
    model.save_pretrained(tmp_path)
    for batch in (_batch(), _batch(padded=True)):
        loss, aux_loss, expected = _expected(model, batch)
        result, found = _found(tmp_path, [batch])
        assert _total(result) == pytest.approx(loss, rel=1e-6)
        assert result.aux_loss == aux_loss
        assert all(torch.equal(grad, expected[name]) for name, grad in found.items())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "granitemoe", "gpt_oss"])
def test_in_bf16_too(family: str, tmp_path: Path) -> None:
    model = _plain(family, torch.bfloat16)
    model.save_pretrained(tmp_path)
    _, aux_loss, expected = _expected(model, _batch(padded=True))
    result, found = _found(tmp_path, [_batch(padded=True)], "bf16")
    assert result.aux_loss == aux_loss
    assert all(torch.equal(grad, expected[name]) for name, grad in found.items())


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    _plain("mixtral").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["one layer", "padding", "coefficient"])
def test_a_difference_would_be_noticed(
    kind: str, mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = load_model(mixtral, dtype="fp32")  # it would not take a Routing that is wrong
    own, num_calls = Routing.add, 0

    def add(routing: Routing, logits: Any, mask: Any, num_tokens: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if kind == "one layer" and num_calls == 2:
            return
        own(routing, logits, None if kind == "padding" else mask, num_tokens)

    monkeypatch.setattr(Routing, "add", add)
    _, aux_loss, expected = _expected(_plain("mixtral"), _batch(padded=True))
    coefficient = COEFFICIENT * (1.01 if kind == "coefficient" else 1.0)
    result, found = _run(home, [_batch(padded=True)], router_aux_loss=coefficient)
    assert (result.aux_loss != aux_loss) == (kind != "coefficient")
    assert _far(expected, found) > 1e-5


def test_any_micro_batches_give_the_loss_of_the_whole_step(mixtral: Path) -> None:
    """As for the loss: means are over the step, not over each of its parts."""
    whole = _batch(padded=True)
    loss, aux_loss, expected = _expected(_plain("mixtral"), whole)
    parts = [whole.mapped(lambda tensor: tensor[:1]), whole.mapped(lambda tensor: tensor[1:])]
    parts[0] = MicroBatch(input_ids=parts[0].input_ids, labels=parts[0].labels)
    result, found = _found(mixtral, parts)
    assert result.aux_loss == pytest.approx(aux_loss, rel=1e-6)
    assert _total(result) == pytest.approx(loss, rel=1e-6)
    assert _far(expected, found) < 2e-5


def test_packed_rows(mixtral: Path) -> None:
    loss, aux_loss, expected = _expected(_plain("mixtral"), _batch(packed=True))
    result, found = _found(mixtral, [_batch(packed=True)])
    assert _total(result) == pytest.approx(loss, rel=1e-6)
    assert result.aux_loss == aux_loss
    assert all(torch.equal(grad, expected[name]) for name, grad in found.items())


@pytest.mark.parametrize(
    "settings",
    [{"reference": True}, {"tape": "host"}, {"reference": True, "tape": "host", "slots": 3}],
)
def test_every_way_to_play_a_step_gives_the_same_bits(
    settings: dict[str, Any], mixtral: Path
) -> None:
    batch = [_batch(padded=True), _batch(packed=True)]
    expected_result, expected = _found(mixtral, batch)
    result, found = _found(mixtral, batch, **settings)
    assert result == expected_result
    assert all(torch.equal(grad, expected[name]) for name, grad in found.items())


def test_frozen_layers_are_counted_and_pass_the_gradient_on(tmp_path: Path) -> None:
    model = _plain("mixtral")
    model.save_pretrained(tmp_path)
    home = load_model(tmp_path, dtype="fp32", frozen=("model.layers.2.*", "model.embed_tokens.*"))
    _, aux_loss, expected = _expected(model, _batch())
    with make_engine(home.decoder, home.store, router_aux_loss=COEFFICIENT) as engine:
        assert engine.step([_batch()]).aux_loss == aux_loss
        trained = [param.name for param in home.decoder.params if param.trained]
        assert all(
            torch.equal(home.store.param(name, TensorKind.GRAD), expected[name]) for name in trained
        )


def test_an_evaluation_has_it_too(mixtral: Path) -> None:
    home = load_model(mixtral, dtype="fp32")
    model = _plain("mixtral").eval()
    batch = _batch(padded=True)
    with torch.no_grad():
        expected = model(**batch.inputs, use_cache=False).aux_loss.item()
    with make_engine(home.decoder, home.store, router_aux_loss=COEFFICIENT) as engine:
        assert engine.aux_loss is None
        engine.evaluate([batch])
        assert engine.aux_loss == expected


def test_texts_are_drawn_as_without_it(mixtral: Path) -> None:
    """Several at once, after keys: a router then sees a token of each, the mask all of them."""
    home = load_model(mixtral, dtype="fp32")
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12], [13, 14]]
    found = []
    for coefficient in (0.0, COEFFICIENT):
        with make_engine(home.decoder, home.store, router_aux_loss=coefficient) as engine:
            found.append(continue_texts(engine, prompts, 5, frozenset()))
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "doge"])
def test_models_without_such_a_loss_are_refused(family: str, tmp_path: Path) -> None:
    tiny_model(family, torch.bfloat16).save_pretrained(tmp_path)
    home = load_model(tmp_path)
    with pytest.raises(ConfigError, match=rf"router_aux_loss is 0\.01: the code of {family} has"):
        make_engine(home.decoder, home.store, router_aux_loss=0.01)
