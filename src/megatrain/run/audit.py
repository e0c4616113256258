"""`megatrain audit`: whether a peer has trained as it claims, by doing it again.

    found = audit("runs/theirs", range(3, 6), scratch)

The steps of a peer are repeated from the model that the meeting began with, on the rows of its run,
by the recipe that it has declared at the meeting place: learning rate, batch, optimizer and loss.
The rows must be those that it has declared, too. After each round the weights, the position in the
data and the difference are compared with its signed claim, by their hashes; then the anchor is
taken through the record of the exchange, as the peer did.

A run that repeats bit for bit is needed: the same version, the same kind of device, and there
train.deterministic. Elsewhere `tolerance` compares the norm of the difference alone, which is weak.

The run and what it has declared may be a stranger's: no function, command or program that they name
is run, no key of theirs is read or made, and all that is written is in the folder of the audit.

Laws (tests/run/test_audit.py)
    1. An honest round is found true, and a round with a step skipped, other rows, another rate or
       stale weights is found false. So is a claim of steps that the recipe does not lead to.
    2. Nothing is written to the meeting place or to the run.
    3. No code that the run or its peer names is run, and nothing is written where they say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.config import Config, load_config
from megatrain.config.load import file_of_run
from megatrain.errors import ConfigError, PeersError, RunFolderError
from megatrain.peers.rounds import Rounds
from megatrain.peers.signing import Ed25519, Unsigned
from megatrain.places import open_place
from megatrain.progress import Say
from megatrain.run.trainer import Trainer
from megatrain.run.with_peers import RECIPE


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A round that was repeated."""

    number: int
    reason: str | None
    """What is false; None: the claim is true."""
    is_claimed: bool = True
    """Whether the peer took part at all."""

    def __str__(self) -> str:
        if not self.is_claimed:
            return f"exchange {self.number}: the peer took no part"
        return f"exchange {self.number}: " + (
            "true" if self.reason is None else f"FALSE: {self.reason}"
        )


class _Done(Exception):
    """All rounds were repeated."""


def audit(
    run: Path, numbers: range, scratch: Path, say: Say, *, tolerance: float | None = None
) -> list[Verdict]:
    """Repeat the rounds of a run up to the last of `numbers`; return verdicts on these.

    It ends with the first false round: what comes after builds on it. With a `tolerance`, of
    another kind of device, norms are compared, within so much of them. Raises ConfigError,
    RunFolderError, PeersError or what training raises.
    """
    config = _config_of(run)
    settings = config.peers
    assert settings.at is not None
    if settings.parts != 1 or settings.late:
        raise ConfigError(
            f"{run}: peers.parts is {settings.parts} and peers.late is {settings.late}: a round "
            "can be repeated alone if it is waited for and is about the whole model."
        )
    repeated = _replay_config(config, run, scratch)
    with Trainer(repeated) as trainer:
        rounds = Rounds(
            settings,
            trainer.home.store,
            trainer.engine.settle,
            folder=scratch / "anchor",
            place=open_place(settings.at),
            signer=Ed25519(scratch / "key") if settings.signed else Unsigned(),
        )
        rounds.changed = trainer.engine.seal_memory
        rounds.observe()
        found: list[Verdict] = []
        with suppress(_Done):
            trainer._rounds = _Repeat(  # type: ignore[assignment]
                rounds, trainer, numbers, found, say, tolerance
            )
            trainer.train()
        return found


class _Repeat:
    """Stands for the rounds of a run: compares, and puts nothing."""

    def __init__(
        self,
        rounds: Rounds,
        trainer: Trainer,
        numbers: range,
        found: list[Verdict],
        say: Say,
        tolerance: float | None,
    ) -> None:
        self._rounds, self._trainer, self._numbers = rounds, trainer, numbers
        self._say, self._tolerance = say, tolerance
        self._number, self._began = 1, 0
        self.found = found
        self._member = rounds.meeting.member(str(rounds.settings.name))
        self._claim = self._next_claim()
        self._begin_round(0)

    def after(self, step: int, *, is_last: bool = False) -> dict[str, Any]:
        """Compare if the peer has claimed after this step."""
        if step == self._claim["steps"][1]:
            self._compare(self._claim)
            self._rounds.replay(self._number, takes=True)
            self._number, self._began = self._number + 1, step
            self._claim = self._next_claim()
        self._begin_round(step)
        if is_last:
            reason = (
                f"it ends at step {self._claim['steps'][1]}, and the run of its recipe at {step}"
            )
            self._note(Verdict(number=int(self._claim["number"]), reason=reason))
            raise _Done
        return {}

    def close(self) -> None:
        """Nothing is under way."""

    def _next_claim(self) -> Mapping[str, Any]:
        """Return the peer's next claim that entered; end if none of the numbers has one."""
        meeting = self._rounds.meeting
        for number in range(self._number, self._numbers.stop):
            record = meeting.record(number)
            if record is None:
                raise PeersError(f"the meeting has no exchange {number} yet")
            claim = meeting.claim_in(record, str(self._rounds.settings.name))
            if claim is not None:
                steps = claim.get("steps")
                if not (isinstance(steps, list) and [type(one) for one in steps] == [int, int]):
                    self._note(Verdict(number=number, reason="it does not say which steps it took"))
                    raise _Done
                return claim
            if number in self._numbers:
                self._note(Verdict(number=number, reason=None, is_claimed=False))
        raise _Done

    def _begin_round(self, step: int) -> None:
        """Take the anchor of the next claim where the peer did, if it has missed exchanges."""
        number, began = int(self._claim["number"]), int(self._claim["steps"][0])
        if number > self._number and began < step:
            raise PeersError(
                f"exchange {number}: the peer was started again from step {began}, so its round "
                "cannot be repeated from the first one"
            )
        if number > self._number and began == step:
            for missed in range(self._number, number):
                self._rounds.replay(missed, takes=missed == number - 1)
            self._number, self._began = number, step

    def _compare(self, claim: Mapping[str, Any]) -> None:
        self._trainer.engine.settle()
        here = self._rounds.claim_here(self._number, {})
        reason = self._difference(claim, here)
        if self._number in self._numbers or reason is not None:
            self._note(Verdict(number=self._number, reason=reason))
        if reason is not None:
            raise _Done

    def _difference(self, claim: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
        """Return what is false in a claim, if anything is."""
        position = self._trainer.data.state()
        declared = None if self._member is None else self._member.get("order")
        if position["order"] != declared:
            return "the rows of the run are not those that the peer has declared"
        if claim["steps"][0] != self._began:
            return f"it began after step {claim['steps'][0]}, and the anchor after {self._began}"
        if claim.get("data") != position:
            return f"it was at {claim.get('data')} of its rows, and these steps end at {position}"
        if self._tolerance is not None:
            far = abs(float(claim["norm"]) / float(here["norm"]) - 1)
            return None if far <= self._tolerance else f"its norm is {far:.2%} off"
        if claim.get("weights") != here["weights"]:
            return "its weights are not those that these steps lead to"
        if claim["sha256"] != here["sha256"]:
            return "its difference is not that of the anchor from its weights"
        return None

    def _note(self, verdict: Verdict) -> None:
        self.found.append(verdict)
        self._say(str(verdict))


def _config_of(run: Path) -> Config:
    path = file_of_run(run)
    if not path.exists():
        raise RunFolderError(f"{run}: no run here: it has no config.yaml")
    config = load_config(path)
    if config.peers.at is None or config.peers.name is None:
        raise ConfigError(f"{run}: the run has no peers, so it has claimed nothing")
    return config


def _replay_config(config: Config, run: Path, scratch: Path) -> Config:
    """Return the config of a peer as it has declared it, without peers, saves and evaluations."""
    settings = config.peers
    assert settings.at is not None
    place = open_place(settings.at)
    data = place.read(f"members/{settings.name}.json")
    if data is None:
        raise PeersError(f"{place.url} has no member {settings.name}, the peer of {run}")
    values = config.model_dump(mode="json") | _recipe(data, f"{place.url}: {settings.name}")
    values |= {
        "rewards": {},
        "rollouts": {},
        "peers": {},
        "save": {"dir": str(scratch / "run"), "every": None},
        "eval": {"every": None, "samples": 0},
        "log": {"every": 1_000_000},
    }
    if values["memory"]["disk"] is not None:
        values["memory"]["disk"] = str(scratch / "disk")
    return Config.model_validate(values)


def _recipe(data: bytes, who: str) -> dict[str, Any]:
    """Return the sections of a config that a peer has declared. Raises PeersError."""
    try:
        recipe = json.loads(data)["recipe"]
        return {section: recipe[section] for section in RECIPE}
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise PeersError(f"{who} has declared no recipe: {str(error)[:100]}") from None
