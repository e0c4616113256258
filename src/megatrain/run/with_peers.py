"""A run among peers: its rounds, opened from its config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatrain.cache import writable_cache_folder
from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.peers.rounds import Rounds
from megatrain.peers.signing import Ed25519, Signer, Unsigned
from megatrain.places import open_place
from megatrain.progress import Say
from megatrain.run.evaluation.mean_loss import judged_loss
from megatrain.run.opening.opening import Opening
from megatrain.run.opening.training_data import TrainingData
from megatrain.run.state import RunState

RECIPE = ("model", "loss", "train", "optim")
"""The sections of a config that say how a peer trains; its member entry has them, for an audit."""


def open_rounds(
    now: Callable[[], tuple[Opening, RunState]],
    *,
    settle: Callable[[], None],
    changed: Callable[[], None],
    stops: Callable[[], bool],
    say: Say,
) -> Rounds:
    """Return the rounds of a run, which has joined its peers and is up to date with them.

    `now` returns what the run has opened and its state: it may open a smaller engine later.

    Raises ConfigError, MissingPackage, PeersError or PlaceError.
    """
    opened, state = now()
    config, folder = opened.config, opened.folder
    settings = config.peers
    assert settings.at is not None
    if not opened.ranks.owner.is_alone:
        raise ConfigError(
            "peers.at is given and the run has several ranks: a peer is one process with one GPU. "
            "Start a peer on each GPU, or train without peers."
        )
    rounds = Rounds(
        settings,
        opened.home.store,
        settle,
        folder=anchor_folder(config),
        place=open_place(settings.at),
        signer=signer_of(config),
        stops=stops,
    )
    rounds.say = say
    rounds.changed = changed
    rounds.note = lambda event: folder.append("events.jsonl", event)
    rounds.facts = lambda: _facts(*now())
    rounds.held_out_loss = lambda: held_out_loss(now()[0])
    rounds.begin(state.peers, state.step, member_facts(opened))
    return rounds


def _facts(opened: Opening, state: RunState) -> dict[str, Any]:
    """Return what a claim says of the steps so far."""
    return {"data": opened.data.state(), "total_tokens": state.total_tokens}


def held_out_loss(opened: Opening) -> float:
    """Return the mean loss of the weights in memory on the rows of the evaluation."""
    data = opened.data
    assert isinstance(data, TrainingData), "runs on rewards have no peers"
    found = judged_loss(opened.engine, data.eval_batches(), None, data.eval_names)
    assert found is not None, "data.eval is given"
    return found.loss


def anchor_folder(config: Config) -> Path:
    """Return the folder of a peer's anchor."""
    return Path(config.peers.dir or Path(config.run_dir) / "peers")


def signer_of(config: Config) -> Signer:
    """Return the signer of a peer. Raises MissingPackage, PeersError or DiskError."""
    settings, path = config.peers, config.peers.key
    if not settings.signed:
        return Unsigned()
    default = writable_cache_folder() / "peers" / f"{settings.name}.key"
    return Ed25519(default if path is None else Path(path))


def member_facts(opened: Opening) -> dict[str, Any]:
    """Return what a peer says of itself at the meeting place: rows, their order, and its recipe."""
    config = opened.config.model_dump(mode="json")
    return {
        "order": opened.data.state()["order"],
        "recipe": {section: config[section] for section in RECIPE},
        "inner_steps": opened.config.peers.inner_steps,
    }
