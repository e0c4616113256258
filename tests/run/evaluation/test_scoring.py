"""Laws of scoring.py."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import PreTrainedModel

from megatrain.cli.harness import require_harness
from megatrain.engine.compute.drawing import GREEDY
from megatrain.engine.engine import Engine
from megatrain.engine.sampling import continuations
from megatrain.errors import ConfigError, MissingPackage
from megatrain.run.evaluation import scoring
from megatrain.run.evaluation.scoring import Score, Scored, scores
from testkit.spoken import predicting, spoken_model

POSITIONS = 24


def model(family: str) -> PreTrainedModel:
    return spoken_model(family, seed=2, max_position_embeddings=POSITIONS)


@contextmanager
def engine(plain: PreTrainedModel) -> Iterator[Engine]:
    decoder, store = predicting(plain)
    with Engine(decoder, store) as made:
        yield made


def texts(plain: PreTrainedModel) -> list[Scored]:
    """Return texts of all lengths, up to one token more than the model reads; one is greedy."""
    draw = random.Random(1)
    found = []
    for length in (2, 3, 9, 9, 17, POSITIONS, POSITIONS + 1, POSITIONS + 1):
        tokens = [draw.randrange(5, 60) for _ in range(length)]
        found.append(Scored(tokens=tokens, num_scored=draw.randrange(1, length)))
    written = plain.generate(torch.tensor([[7, 8, 9]]), max_new_tokens=5, do_sample=False)
    longest = Scored(tokens=found[-1].tokens, num_scored=1)
    return [*found, longest, Scored(tokens=written[0].tolist(), num_scored=5)]


def by_transformers(plain: PreTrainedModel, text: Scored) -> Score:
    """Return a score from the logits of the text alone; its last token is not read."""
    ids = torch.tensor([list(text.tokens)])
    with torch.no_grad():
        logprobs = plain(ids[:, :-1]).logits[0, -text.num_scored :].log_softmax(1)
    wanted = ids[0, -text.num_scored :]
    total = logprobs.gather(1, wanted[:, None]).double().sum()
    return Score(logprob=float(total), is_greedy=bool((logprobs.argmax(1) == wanted).all()))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_scores_are_those_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model(family)
    asked = texts(plain)
    expected = [by_transformers(plain, text) for text in asked]
    limit = POSITIONS if family == "gpt2" else None
    with engine(plain) as ours:
        found = scores(ours, asked, limit)
        monkeypatch.setattr(scoring, "MICRO_TOKENS", 20)
        monkeypatch.setattr(scoring, "CALL_TOKENS", 40)
        apart = scores(ours, asked, limit)
    for given in (found, apart):
        assert [score.is_greedy for score in given] == [score.is_greedy for score in expected]
        assert [score.logprob for score in given] == pytest.approx(
            [score.logprob for score in expected], rel=1e-5
        )
    assert [score.is_greedy for score in expected].count(True) == 1


def test_a_score_of_the_next_place_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model("llama")
    asked = texts(plain)[2:4]
    score = scoring._score
    monkeypatch.setattr(scoring, "_score", lambda t, p, k: score(t, p.roll(1), k.roll(1)))
    with engine(plain) as ours:
        found = scores(ours, asked)
    expected = [by_transformers(plain, text).logprob for text in asked]
    assert [score.logprob for score in found] != pytest.approx(expected, rel=1e-2)


def test_a_text_ends_where_it_is_enough() -> None:
    with engine(model("llama")) as ours:
        prompts = ([5, 6, 7], [8, 9, 10])
        whole = continuations(ours, prompts, 6, frozenset(), GREEDY)
        stop = whole[0].tokens[2]
        cut = continuations(ours, prompts, 6, frozenset(), GREEDY, lambda made: stop in made)
    for one, other in zip(whole, cut, strict=True):
        ends = one.tokens.index(stop) + 1 if stop in one.tokens else 6
        assert other.tokens == one.tokens[:ends]
    assert len(cut[0].tokens) <= 3


def test_what_the_harness_may_not_be_given_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match="pip install lm_eval"):
        require_harness([])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    require_harness(["--tasks", "hellaswag"])
    with pytest.raises(ConfigError, match="--batch_size=4: MODEL says"):
        require_harness(["--batch_size=4"])
