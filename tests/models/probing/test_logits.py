"""Laws of logits.py: a trace is the model's own way, or it is not used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatrain.models.build import build_decoder
from megatrain.models.probing.dispatch import intercepted
from megatrain.models.probing.logits import Function, TracedScores, Tracer, examined
from megatrain.models.template import Template
from testkit.families import tiny_config
from tests.models.test_template import CHANGE_LOGITS, CHANGES

NUM_TOKENS = 64
BUFFER = torch.linspace(1, 2, NUM_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What a model might do to its logits (1, rows, vocabulary), and what must be found of it."""

    of: Callable[[Tensor], Tensor]
    traced: bool


WAYS = {
    "a soft-cap": Way(of=lambda x: torch.tanh(x / 30.0) * 30.0, traced=True),
    "a scale": Way(of=lambda x: x * 0.0625, traced=True),
    "a cast": Way(of=lambda x: x.double(), traced=True),
    "two ways that meet": Way(of=lambda x: x.clamp(-3, 3) + x / 7, traced=True),
    "the largest token": Way(of=lambda x: x - x.amax(-1, keepdim=True), traced=True),
    "tokens that are left out": Way(
        of=lambda x: torch.cat([x[..., :-5] * 2, x[..., -5:]], -1), traced=True
    ),
    "a tensor of the model": Way(of=lambda x: x * BUFFER, traced=False),
    "a write in place": Way(of=lambda x: x.clone().mul_(2), traced=False),
    "a mean over rows": Way(of=lambda x: x - x.mean(1, keepdim=True) / 2 - x / 4, traced=False),
    "a number of rows": Way(of=lambda x: x / (x.shape[1] + 1), traced=False),
    "a device by name": Way(of=lambda x: x.to("cpu", torch.double), traced=False),
    "a question": Way(of=lambda x: x * float(x.max() + 2), traced=False),
}


def examine(way: Callable[[Tensor], Tensor]) -> TracedScores:
    def trace(logits: Tensor) -> Function | None:
        given = logits[None]
        tracer = Tracer()
        with intercepted(tracer):
            tracer.begin(given)
            result = way(given)
        found = tracer.trace(result)
        return None if found is None else lambda logits: found(logits[None])[0]

    return examined(lambda logits: way(logits[None])[0], trace, NUM_TOKENS, torch.float32)


@pytest.mark.parametrize("name", WAYS)
def test_a_way_is_traced_only_if_its_trace_is_the_same_way(name: str) -> None:
    way = WAYS[name]
    found = examine(way.of)
    assert found.changes
    assert (found.function is not None) == way.traced
    if found.function is not None:
        logits = torch.randn(7, NUM_TOKENS) * 40
        assert torch.equal(found.function(logits), way.of(logits[None])[0])


def test_logits_that_are_left_alone_need_no_trace() -> None:
    found = examine(lambda logits: logits)
    assert found == TracedScores(changes=False, function=None)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("family", CHANGE_LOGITS)
def test_families_that_change_logits_are_traced(family: str, dtype: str) -> None:
    template = Template(build_decoder(tiny_config(family, **CHANGES.get(family, {})), dtype))  # type: ignore[arg-type]
    assert (template.changes_logits, template.scores_traced) == (True, True)
    logits = torch.randn(5, 320).to(template.model.dtype) * 40
    with torch.no_grad():
        expected = template._own_scores(logits)
    found = template.scores(logits)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["gemma2", "cohere"])
def test_a_trace_holds_no_tensor_and_runs_anywhere(family: str) -> None:
    template = Template(build_decoder(tiny_config(family), "bf16"))
    placed = template.placed(lambda tensor: tensor.to("meta"))
    logits = torch.empty(3, 320, dtype=torch.bfloat16, device="meta")
    assert placed.scores(logits).device.type == "meta"


def test_a_trace_does_not_run_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    template = Template(build_decoder(tiny_config("gemma2"), "fp32"))
    monkeypatch.setattr(Template, "_run_tail", lambda *args: pytest.fail("the model was run"))
    template.scores(torch.randn(2, 320))
