"""Laws of completions.py: against a server on the loopback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import megatrain as mt
from megatrain.errors import ConfigError, GeneratorError
from megatrain.rewards.completions import CompletionsServer
from testkit.completions_on_loopback import Completions, answered_by, choice, drawn_apart, serving
from testkit.families import save_tiny

PROMPTS = [[5, 6, 7, 8], [9, 10]]
ASKED: dict[str, Any] = {
    "max_new_tokens": 7,
    "num_samples": 4,
    "temperature": 1.3,
    "top_p": 0.95,
    "seed": 11,
    "eos_token_ids": range(100, 140),
}


def test_a_server_that_generate_is_behind_gives_what_generate_gives(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    home = mt.load_model(tmp_path, dtype="fp32")
    with mt.Engine(home.decoder, home.store) as engine:
        expected = drawn_apart(engine, PROMPTS, **ASKED)
        with serving(Completions(answer=answered_by(engine))) as served:
            server = CompletionsServer(url=served.url, model="policy", api_key="secret")
            found = server.generate(PROMPTS, **ASKED)
    assert found == expected
    assert {one.ended for one in found} == {True, False}
    (path, headers, request), (_, _, other) = served.asked
    assert {str(one["prompt"]) for one in (request, other)} == {str([one]) for one in PROMPTS}
    assert (path, headers["Authorization"]) == ("/v1/completions", "Bearer secret")
    assert request["model"] == "policy"
    assert request["return_tokens_as_token_ids"] is True
    assert "secret" not in repr(server)
    assert (request["top_k"], request["min_p"], request["repetition_penalty"]) == (0, 0.0, 1.0)


def test_equal_prompts_are_answered_by_different_numbers(tmp_path: Path) -> None:
    """A server draws by the seed of a request: with one for all, learning would see one draw."""
    save_tiny(tmp_path, "llama")
    home = mt.load_model(tmp_path, dtype="fp32")
    with (
        mt.Engine(home.decoder, home.store) as engine,
        serving(Completions(answer=answered_by(engine))) as served,
    ):
        server = CompletionsServer(url=served.url, model="policy")
        first, second = server.generate([PROMPTS[0]] * 2, max_new_tokens=7)
    assert first.tokens != second.tokens
    assert len({request["seed"] for _, _, request in served.asked}) == 2


GOOD = mt.Rollout(prompt=(5,), tokens=(7, 8), logprobs=(-0.5, -0.25), ended=True)


def answered(body: Any, status: int = 200, **settings: Any) -> list[mt.Rollout]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with serving(Completions(answer=lambda request: (status, data))) as served:
        server = CompletionsServer(url=served.url, model="policy")
        return server.generate([[5]], max_new_tokens=2, **settings)


def changed(**changes: Any) -> dict[str, Any]:
    """Return an answer with other log-probabilities."""
    one = choice(0, GOOD)
    return {"choices": [{**one, "logprobs": {**one["logprobs"], **changes}}]}


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>", "sent no JSON: b'<html>'"),
        (b"[" * 100_000, "sent no JSON"),
        (b" " * (2 << 20), "sent more than 1,050,624 bytes"),
        ([1], "the server's answer has no choices"),
        ({"choices": [1]}, "the server's answer has no choices"),
        ({"choices": []}, "the server sent 0 answers, 1 were asked for"),
        ({"choices": [choice(1, GOOD)]}, "the server sent 1 answers, 1 were asked for"),
        ({"choices": [{**choice(0, GOOD), "index": [0]}]}, "sent 1 answers, 1 were asked for"),
        ({"choices": [{**choice(0, GOOD), "logprobs": None}]}, "answer 0 .* no log-probabilities"),
        ({"choices": [{**choice(0, GOOD), "finish_reason": "abort"}]}, "reason is 'abort', which"),
        ({"choices": [{**choice(0, GOOD), "finish_reason": None}]}, "answer 0 .* not finished"),
        (changed(tokens=["token_id:7"]), "answer 0 of the server has 1 tokens, 2 log-prob"),
        (changed(tokens=[], token_logprobs=[]), "has 0 tokens, 0 log-probabilities"),
        (changed(tokens=["the", " end"]), "'the', not token_id:5 .* return_tokens_as_token_ids"),
        (changed(tokens=["token_id:-7", "token_id:8"]), "has the token 'token_id:-7'"),
        (changed(tokens=[f"token_id:{'9' * 5000}", "token_id:8"]), "has the token 'token_id:999"),
        (changed(token_logprobs=[None, -1.0]), "has None for a log-probability"),
        (changed(token_logprobs=[float("nan"), -1.0]), "has nan for a log-probability"),
        (changed(token_logprobs=[-(10**400), -1.0]), "has -1000000.* for a log-probability"),
        (changed(token_logprobs=[0.5, -1.0]), "has 0.5 for a log-probability: none is above 0"),
    ],
)
def test_other_answers_are_refused(body: Any, message: str) -> None:
    with pytest.raises(GeneratorError, match=message):
        answered(body)


def test_an_answer_without_its_end_is_refused() -> None:
    with pytest.raises(GeneratorError, match=r"ended with token 8, which is none of .* \[1\]"):
        answered({"choices": [choice(0, GOOD)]}, eos_token_ids=[1])


def test_a_refusal_and_silence_are_told() -> None:
    with pytest.raises(GeneratorError, match=r"refused with 404: .*no model named policy"):
        answered({"error": "no model named policy"}, status=404)
    gone = CompletionsServer(url="http://127.0.0.1:1/v1", model="policy")
    with pytest.raises(GeneratorError, match=r"127.0.0.1:1/v1/completions does not answer"):
        gone.generate([[5]], max_new_tokens=2)


def test_a_proxy_of_the_environment_is_for_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    data = json.dumps({"choices": [choice(0, GOOD)]}).encode()
    with serving(Completions(answer=lambda request: (200, data))) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
        monkeypatch.setattr("urllib.request._opener", None)  # it keeps the environment's
        assert answered({"choices": [choice(0, GOOD)]}) == [GOOD]
        assert proxy.asked == []
        far = CompletionsServer(url="http://far.example/v1", model="policy")
        assert far.generate([[5]], max_new_tokens=2) == [GOOD]
    assert [path for path, _, _ in proxy.asked] == ["http://far.example/v1/completions"]
    monkeypatch.setattr("urllib.request._opener", None)


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="file:///etc/passwd is not the address of a server"):
        CompletionsServer(url="file:///etc/passwd", model="policy")
