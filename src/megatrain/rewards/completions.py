"""Answers from an outside generator: a server with OpenAI's completions API, such as vLLM's.

    server = CompletionsServer(url="http://localhost:8000/v1", model="policy")
    rollouts = server.generate(prompts, max_new_tokens=256, num_samples=8)

Each prompt is a request of its own, as tokens and with its own seed. Many are sent at once, and the
server computes them together. Answers must come back as tokens too, with the log-probability of
each: vLLM gives them if asked by `return_tokens_as_token_ids`. The server is not trusted: what it
sends is limited in size and checked, and nothing is made of texts.

Laws (tests/rewards/test_completions.py)
    1. A server that our own `generate` is behind gives what `generate` gives.
    2. Answers to different prompts are drawn by different numbers.
    3. Whatever else a server sends is one GeneratorError, which says what was wrong.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from megatrain.config.value_types import is_loopback
from megatrain.engine.compute.drawing import SamplingParams
from megatrain.errors import ConfigError, GeneratorError
from megatrain.rewards.generation import require_request
from megatrain.rewards.rollouts import Rollout

_TOKEN = "token_id:"
"""The prefix that vLLM writes before a token's number, where OpenAI has its text."""
_ROUNDING = 1e-3
"""Most that a log-probability may be above 0."""
_WHOLE = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling that vLLM takes from generation_config.json unless a request says otherwise."""
_MOST_REQUESTS = 256
"""At once; a server has a queue of its own."""
_BYTES_PER_TOKEN = 1024
_MOST_OTHER_BYTES = 1 << 20
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Without the proxy of the environment, to which this host's loopback would be its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionsServer:
    """A server that completes texts."""

    url: str
    """With the version, as OpenAI's clients want it: http://localhost:8000/v1"""
    model: str
    """Its name there."""
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{self.url} is not the address of a server: http://localhost:8000/v1 is one"
            )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        num_samples: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
        eos_token_ids: Collection[int] = (),
    ) -> list[Rollout]:
        """Return `num_samples` answers to each prompt, as `megatrain.generate` does.

        Besides the server's own, `eos_token_ids` end an answer. If some are given, an answer that
        ended without one is an error: a model that is never shown the end never learns to stop.
        Raises GeneratorError, ConfigError or BatchError.
        """
        SamplingParams(
            temperature=temperature, top_p=top_p, seed=seed
        )  # refuses what cannot be drawn by
        require_request(prompts, max_new_tokens, num_samples)
        shared = {
            "model": self.model,
            "max_tokens": max_new_tokens,
            "n": num_samples,
            "temperature": temperature,
            "top_p": top_p,
            **_WHOLE,
            "stop_token_ids": sorted(eos_token_ids),
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
        }
        num_bytes = _MOST_OTHER_BYTES + _BYTES_PER_TOKEN * num_samples * max_new_tokens

        def answers(number: int) -> list[Rollout]:
            prompt = tuple(prompts[number])
            request = {**shared, "prompt": [list(prompt)], "seed": seed_of(seed, number)}
            choices = _choices(self._answer("completions", request, num_bytes), num_samples)
            return [_rollout(choice, prompt, frozenset(eos_token_ids)) for choice in choices]

        # Prompts of one request would share its seed, and so the numbers that tokens are drawn by.
        with ThreadPoolExecutor(min(len(prompts), _MOST_REQUESTS)) as pool:
            found = pool.map(answers, range(len(prompts)))
            return [answer for some in found for answer in some]

    def reports_tempered(self, token: int) -> bool:
        """Return whether log-probabilities are those of the distribution that is drawn from.

        vLLM's are by default those before temperature and masks. One token is asked for, the only
        one allowed: its log-probability is 0 if masks count.
        """
        request = {
            "model": self.model,
            "prompt": [[token]],
            "max_tokens": 1,
            "n": 1,
            "allowed_token_ids": [token],
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
        }
        (choice,) = _choices(self._answer("completions", request, _MOST_OTHER_BYTES), 1)
        return _rollout(choice, (token,), frozenset()).logprobs[0] == 0

    def _answer(self, path: str, request: Mapping[str, Any], most_bytes: int) -> Any:
        """Return what the server answers, as JSON says it."""
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        address = f"{self.url.rstrip('/')}/{path}"
        return asked(address, request, headers, timeout_s=self.timeout_s, most_bytes=most_bytes)


def seed_of(seed: int, number: int) -> int:
    """Return the seed of a prompt: far from those of all others, for a server counts up from it."""
    data = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(data, "little") >> 2


def asked(
    address: str,
    request: Mapping[str, Any] | None,
    headers: Mapping[str, str] | None = None,
    *,
    timeout_s: float,
    most_bytes: int = _MOST_OTHER_BYTES,
) -> Any:
    """Return what a server answers, as JSON says it. Without a `request` it is asked by GET.

    An answer without content is None. Raises GeneratorError.
    """
    data = None if request is None else json.dumps(request).encode()
    try:
        sent = urllib.request.Request(
            address, data, {"Content-Type": "application/json", **(headers or {})}
        )
        opened = _DIRECT.open if is_loopback(address) else urllib.request.urlopen
        with opened(sent, timeout=timeout_s) as answer:
            found = answer.read(most_bytes + 1)
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(500).decode(errors="replace")
        raise GeneratorError(f"{address} refused with {error.code}: {said}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise GeneratorError(
            f"{address} does not answer ({error}). Is the server running, and the url right?"
        ) from None
    if len(found) > most_bytes:
        raise GeneratorError(f"{address} sent more than {most_bytes:,} bytes")
    return answered(address, found)


def answered(address: str, found: bytes) -> Any:
    """Return an answer as JSON says it; None: it has no content. Raises GeneratorError."""
    try:
        return json.loads(found) if found else None
    except (ValueError, RecursionError):
        raise GeneratorError(f"{address} sent no JSON: {found[:200]!r}") from None


def _choices(answer: Any, num_answers: int) -> list[Any]:
    """Return one choice for each answer that was asked for, in order."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise GeneratorError(f"the server's answer has no choices: {str(answer)[:200]}")
    by_index = {choice.get("index"): choice for choice in choices if _is_count(choice.get("index"))}
    if len(choices) != num_answers or set(by_index) != set(range(num_answers)):
        raise GeneratorError(
            f"the server sent {len(choices)} answers, {num_answers} were asked for"
        )
    return [by_index[number] for number in range(num_answers)]


def _rollout(choice: Mapping[str, Any], prompt: tuple[int, ...], ends: frozenset[int]) -> Rollout:
    where = f"answer {choice['index']} of the server"
    found = choice.get("logprobs")
    tokens, logprobs = (
        found.get(name) if isinstance(found, dict) else None
        for name in ("tokens", "token_logprobs")
    )
    if not isinstance(tokens, list) or not isinstance(logprobs, list):
        raise GeneratorError(f"{where} has no log-probabilities: {str(found)[:200]}")
    if not tokens or len(tokens) != len(logprobs):
        raise GeneratorError(f"{where} has {len(tokens)} tokens, {len(logprobs)} log-probabilities")
    numbers = tuple(_token_number(token, where) for token in tokens)
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise GeneratorError(
            f"{where} was not finished: finish_reason is {str(reason)[:80]!r}, which is neither "
            "'stop' nor 'length'. It is no answer of the model"
        )
    ended = reason == "stop"
    if ended and ends and numbers[-1] not in ends:
        raise GeneratorError(
            f"{where} has ended with token {numbers[-1]}, which is none of eos_token_ids: "
            f"{sorted(ends)}. Give all tokens that end an answer on the server"
        )
    return Rollout(
        prompt=prompt,
        tokens=numbers,
        logprobs=tuple(_logprob(logprob, where) for logprob in logprobs),
        ended=ended,
    )


def _token_number(token: Any, where: str) -> int:
    number = token.removeprefix(_TOKEN) if isinstance(token, str) else ""
    if not isinstance(token, str) or not token.startswith(_TOKEN) or not _is_digits(number):
        raise GeneratorError(
            f"{where} has the token {str(token)[:80]!r}, not {_TOKEN}5 or such: the server does "
            "not know return_tokens_as_token_ids. vLLM's does"
        )
    return int(number)


def _logprob(value: Any, where: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:  # JSON also has longer integers
        raise GeneratorError(f"{where} has {str(value)[:80]} for a log-probability")
    if value > _ROUNDING:
        raise GeneratorError(f"{where} has {value:g} for a log-probability: none is above 0")
    return min(float(value), 0.0)


def _is_digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _is_count(value: Any) -> bool:
    return type(value) is int
