"""Names of a config: they lead to files here, or to commits on the Hub.

A relative path is relative to the working directory. A name on the Hub becomes a commit before a
run begins, and RUN/hub.json keeps it: a resumed run asks for that commit, whatever main is by then.

    {"models": {"Qwen/Qwen3-8B@main": "b968826d9c46..."}, "datasets": {"openai/gsm8k@main": ...}}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain import files
from megatrain.cache import writable_cache_folder
from megatrain.config import Config, load_config
from megatrain.config.load import CONFIG_NAME, USED_NAME
from megatrain.config.sections import DataSource
from megatrain.errors import ConfigError, RunFolderError
from megatrain.fetched import url_of
from megatrain.hub import MAIN, dataset_commit, find_model, is_commit, is_id
from megatrain.places import open_place
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.folder import has_run, require_idle, require_new, require_usable
from megatrain.run.sinks import check_sinks

FILE = "hub.json"
Pins = dict[str, dict[str, str]]


def read_config(path: Path, overrides: Sequence[str]) -> Config:
    """Return the config of a run, its names checked. Needs no torch, so errors appear at once."""
    config = load_config(path, list(overrides))
    check_places(config, path)
    return config


def config_at(name: str) -> Path:
    """Return the file of a config: a path, or fetched from the run at a URL.

    Raises StorageError, RunFolderError if there is no run, ConfigError if it has no checkpoint yet.
    """
    if (url := url_of(name)) is None:
        return Path(name)
    from megatrain.disk.remote.download import run_file  # imports torch

    place = open_place(url)
    found = run_file(place, USED_NAME) or run_file(place, CONFIG_NAME)
    if found is None:
        raise ConfigError(f"{url}: the run has no checkpoint yet. Give the config it began with.")
    folder = writable_cache_folder() / "configs"
    files.make_folder(folder)
    path = folder / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.yaml"
    files.write_file(path, found, durable=False)
    return path


def check_places(config: Config, config_file: Path) -> None:
    """Raise ConfigError for a relative path that leads somewhere from the config file alone."""
    for key, name in _names(config):
        beside = config_file.parent / name
        if not Path(name).exists() and beside.exists():
            raise ConfigError(
                f"{config_file}: {key} is {name}, which is not in the working directory "
                f"{Path.cwd()} but beside this file. Give {beside}, or change to "
                f"{config_file.parent}: relative paths start at the working directory."
            )


def check_before_loading(config: Config, *, resumes: bool) -> None:
    """Refuse a run that cannot begin, by checks that need no torch.

    Raises MissingPackage for a tracker that is not installed, RunFolderError for a folder that has
    a run already or is not a run folder.
    """
    check_sinks(config.log.to)
    folder = Path(config.run_dir)
    if resumes:
        require_usable(folder)
        return
    if has_run(folder):
        require_idle(folder)
    require_new(folder)


def require_no_run(config: Config) -> None:
    """Raise RunFolderError if the run folder or the bucket of a config has a run already."""
    require_new(Path(config.run_dir))
    if config.bucket is not None:
        from megatrain.disk.remote.history import last_entry  # imports torch

        last = last_entry(open_place(config.bucket))
        if last is not None and last.live:
            raise RunFolderError(
                f"{config.bucket} already has a run. Continue it with --resume, or set save.dir to "
                "another place."
            )


def pin_commits(config: Config, *, ranks: Ranks = ALONE) -> tuple[Config, Pins]:
    """Return the config with commits in place of branches, and which commit each of them was.

    A run takes the commits that its folder names already, and all `ranks` those that rank 0 finds.
    Raises HubError.
    """

    def find() -> Pins:
        return _pinned(config, _known(config), asks=True)[1]

    return _pinned(config, ranks.decide(find), asks=False)


def _pinned(config: Config, pins: Pins, *, asks: bool) -> tuple[Config, Pins]:
    """Return the config with the commits of `pins`; if it `asks` the Hub, more are added."""
    model = config.model
    revision = model.revision
    if not Path(model.name_or_path).exists() and is_id(model.name_or_path):
        revision = _pin(
            pins, "models", model.name_or_path, revision, _model_commit if asks else None
        )
    loss = config.loss
    commit = loss.teacher_revision
    if loss.teacher is not None and not Path(loss.teacher).exists() and is_id(loss.teacher):
        commit = _pin(pins, "models", loss.teacher, commit, _model_commit if asks else None)
    data: dict[str, Any] = {
        key: tuple(_pinned_source(pins, source, asks=asks) for source in sources)
        for key, sources in (("train", config.data.train), ("eval", config.data.eval))
        if isinstance(sources, tuple)
    }
    changes = {
        "model": model.model_copy(update={"revision": revision}),
        "data": config.data.model_copy(update=data),
        "loss": loss.model_copy(update={"teacher_revision": commit}),
    }
    return config.model_copy(update=changes), pins


def commits_in_words(pins: Pins) -> list[str]:
    """Return which commits are used, a line for each."""
    return [
        f"{name}: commit {commit[:12]}" for names in pins.values() for name, commit in names.items()
    ]


def _names(config: Config) -> Iterator[tuple[str, str]]:
    yield "model", config.model.name_or_path
    if config.lora.path is not None:
        yield "lora.path", config.lora.path
    if config.loss.teacher is not None:
        yield "loss.teacher", config.loss.teacher
    for key, sources in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if isinstance(sources, tuple):
            yield from ((key, source.path) for source in sources)


def _pinned_source(pins: Pins, source: DataSource, *, asks: bool) -> DataSource:
    if Path(source.path).exists() or not is_id(source.path):
        return source
    ask = _dataset_commit if asks else None
    commit = _pin(pins, "datasets", source.path, source.revision, ask)
    return source.model_copy(update={"revision": commit})


def _pin(
    pins: Pins,
    kind: str,
    name: str,
    revision: str | None,
    ask: Callable[[str, str | None], str | None] | None,
) -> str | None:
    """Return the commit of a name, from the Hub unless it is known; record it.

    Without `ask` the Hub is not asked.
    """
    if is_commit(revision):
        return revision
    key = f"{name}@{revision or MAIN}"
    commit = pins.get(kind, {}).get(key)
    if commit is None and ask is not None:
        commit = ask(name, revision)
    if commit is None:  # unknown; the cache decides
        return revision
    pins.setdefault(kind, {})[key] = commit
    return commit


def _model_commit(name: str, revision: str | None) -> str | None:
    return find_model(name, revision, need="config").commit


def _dataset_commit(name: str, revision: str | None) -> str | None:
    return dataset_commit(name, revision)[0]


def _known(config: Config) -> Pins:
    """Return the commits of a run: those of its folder, or of its bucket on an empty machine."""
    try:
        return _read((Path(config.run_dir) / FILE).read_bytes())
    except OSError:
        pass
    if config.bucket is None:
        return {}
    from megatrain.disk.remote.download import run_file  # imports torch
    from megatrain.disk.remote.history import last_entry

    place = open_place(config.bucket)
    return {} if last_entry(place) is None else _read(run_file(place, FILE) or b"{}")


def _read(data: bytes) -> Pins:
    """Return the commits in a file of a run; none if it is not as we write it."""
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return {
        kind: {key: commit for key, commit in names.items() if is_commit(str(commit))}
        for kind, names in (found.items() if isinstance(found, Mapping) else ())
        if isinstance(names, Mapping)
    }
