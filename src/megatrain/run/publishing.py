"""A run's model on the Hub: exported, with a model card, in one commit.

The card is README.md with front matter, made from what the run folder holds. It names nothing of
this machine: of files only their last names, of folders nothing. It states no license, because a
run does not know it.

Laws (tests/run/test_publishing.py)
    1. The Hub has every file of the export, byte for byte, and the card.
    2. A Hub that refuses or does not answer is a HubError that says what to do, before anything is
       exported; nothing stays on the disk.
    3. The front matter is YAML, whatever the names of models and rows are.
    4. Rows, settings, losses and versions are those of the run folder; no path of the machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatrain import files
from megatrain.config import Config
from megatrain.config.load import write_yaml
from megatrain.errors import ConfigError, DiskError, HubError
from megatrain.hub import is_commit, is_id, require_repository
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.folder import RunFolder, machine_facts
from megatrain.run.state import RunState
from megatrain.text import counted, size

PLACE = ".hub"
"""The folder in a run that an export is written to before it is sent."""
_ADAPTER = "adapter_config.json"
_COUNTS = ("rows", "kept", "tokens", "trained_tokens")


def push(
    folder: RunFolder,
    config: Config,
    state: RunState,
    rows: Mapping[str, Any],
    export: Callable[[Path], str],
    repo_id: str,
    *,
    private: bool | None,
    ranks: Ranks,
) -> str:
    """Commit the model of a run and its card to `repo_id`; return the address of the commit.

    `rows` is the data card. All ranks call it; rank 0 uploads, and the others return an empty text.
    Raises HubError, and ConfigError for a name that is not an id.
    """
    if ranks.decide(lambda: folder.is_dry):
        raise ConfigError("push_to_hub: a dry run has nothing to push.")

    def card(is_adapter: bool) -> str:
        return model_card(repo_id, config, state, rows, is_adapter=is_adapter)

    return upload_export(folder.path / PLACE, repo_id, export, card, private=private, ranks=ranks)


def upload_export(
    place: Path,
    repo_id: str,
    export: Callable[[Path], str],
    card: Callable[[bool], str],
    *,
    private: bool | None,
    ranks: Ranks = ALONE,
    say: Callable[[str], None] = lambda _: None,
) -> str:
    """Export to `place`, add the card, commit both; return the address. `place` is removed.

    The repository is made first: a Hub that refuses does so before anything is written. `card`
    takes whether adapters were exported; `say` gets the files with their sizes before the upload.
    """
    require_repository(repo_id)

    def clear() -> None:
        if place.exists():
            files.remove_folder(place)

    def upload() -> str:
        text = card((place / _ADAPTER).exists())
        files.write_file(place / "README.md", text.encode("utf-8", "replace"))
        for line in _sizes(place):
            say(line)
        with _explained(repo_id):
            return _committed(repo_id, place, f"MegaTrain: {said}")

    ranks.on_first(lambda: _create(repo_id, private=private))
    ranks.on_first(clear)  # the remains of a push that was killed
    try:
        said = export(place)
        address = ranks.on_first(upload) or ""
    except BaseException:
        with suppress(DiskError):  # the first failure is the one to report
            ranks.on_first(clear)
        raise
    ranks.on_first(clear)
    return address


def _sizes(folder: Path) -> Iterator[str]:
    found = sorted((path.name, path.stat().st_size) for path in folder.iterdir())
    yield from (f"  {name}  {size(num_bytes)}" for name, num_bytes in found)
    total = sum(num_bytes for _, num_bytes in found)
    yield f"uploading {counted(len(found), 'file')}, {size(total)}"


def _create(repo_id: str, *, private: bool | None) -> None:
    from huggingface_hub import HfApi

    with _explained(repo_id):
        HfApi().create_repo(repo_id, private=private, exist_ok=True)


def _committed(repo_id: str, folder: Path, message: str) -> str:
    from huggingface_hub import HfApi

    api: Any = HfApi()
    found = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message)
    return str(found.commit_url)


@contextmanager
def _explained(repo_id: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into a HubError that says what to do."""
    from huggingface_hub import errors, get_token

    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise HubError(f"{repo_id}: HF_HUB_OFFLINE is set. Unset it to push.") from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        repair = "Push again later"
        if status in (401, 403):
            who = "the token here may not write there" if get_token() else "there is no token here"
            repair = f"{who}: run `hf auth login` with one that may, or set HF_TOKEN"
        raise HubError(f"{repo_id}: the Hub answered {status} to the push; {repair}.") from error
    except Exception as error:  # the failures of a network have no common base
        raise HubError(
            f"{repo_id}: the push failed ({type(error).__name__}: {str(error)[:300]}). The run "
            "folder is unchanged; push again."
        ) from error


_SHOWN = {
    "data": ("max_length", "train_on", "packing", "overlong"),
    "train": ("steps", "epochs", "batch_tokens", "batch_rows", "max_grad_norm", "seed"),
    "optim": ("name", "learning_rate", "schedule", "warmup", "weight_decay", "betas"),
    "model": ("dtype", "frozen"),
    "loss": ("name", "beta"),
}
"""The settings that decide what was learned; docs/config.md explains them."""


def model_card(
    repo_id: str, config: Config, state: RunState, card: Mapping[str, Any], *, is_adapter: bool
) -> str:
    """Return the text of README.md. `card` is the data card of the run."""
    base = _shown(config.model.name_or_path, config.model.revision)
    lines = [
        "---",
        *_front_matter(config, is_adapter=is_adapter),
        "---",
        f"# {repo_id.rpartition('/')[2]}",
        "",
        f"{'An adapter for' if is_adapter else 'Trained from'} {base} with MegaTrain, "
        f"{state.step:,} steps, {state.total_tokens:,} tokens.",
        "",
        "## Losses",
        "",
        *_table({"first step": state.first_loss, "last step": state.last_loss}),
        *_rows({"evaluation, lowest": state.evaluations.best_loss}),
        "",
        "## Rows",
        "",
        *_table({name: card[name] for name in _COUNTS if name in card}),
        *_rows({"source": _sources(config)}),
        "",
        "## Settings",
        "",
        *_table(dict(_settings(config))),
        "",
        "## Limits",
        "",
        _LIMITS,
        "",
        "## Versions",
        "",
        *_table({name: value for name, value in machine_facts().items() if name in _VERSIONS}),
    ]
    return "\n".join(lines) + "\n"


_LIMITS = (
    "Losses are means per trained token on the rows of this run. Nothing else was measured, "
    "neither other tasks nor safety. What the model that it began with got wrong may still be "
    "there."
)
_VERSIONS = ("megatrain", "torch", "transformers", "python")


def _front_matter(config: Config, *, is_adapter: bool) -> Iterator[str]:
    yield f"library_name: {'peft' if is_adapter else 'transformers'}"
    yield "pipeline_tag: text-generation"
    yield "tags: [megatrain]"
    if _is_on_hub(base := config.model.name_or_path, config.model.revision):
        yield f"base_model: {json.dumps(base)}"
    ids = [s.path for s in config.data.train if _is_on_hub(s.path, s.revision)]
    if ids:
        yield f"datasets: {json.dumps(ids)}"


def _settings(config: Config) -> Iterator[tuple[str, str]]:
    for section, keys in _SHOWN.items():
        for key in keys:
            if (value := getattr(getattr(config, section), key)) not in (None, (), []):
                yield f"{section}.{key}", write_yaml(value)


def _sources(config: Config) -> str:
    return ", ".join(_shown(source.path, source.revision) for source in config.data.train)


def _is_on_hub(name: str, revision: str | None) -> bool:
    """Return whether a name of a run's config is an id on the Hub: a run pins those to a commit."""
    return is_id(name) and is_commit(revision)


def _shown(name: str, revision: str | None) -> str:
    """Return a Hub id as it is, and only the last name of a path."""
    if _is_on_hub(name, revision):
        return name
    return name.strip("<>").rstrip("/").rpartition("/")[2]


def _table(values: Mapping[str, Any]) -> list[str]:
    return ["| name | value |", "|---|---|", *_rows(values)]


def _rows(values: Mapping[str, Any]) -> list[str]:
    return [f"| {name} | {_cell(value)} |" for name, value in values.items() if value is not None]


def _cell(value: Any) -> str:
    text = (
        f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if type(value) is int else ""
    )
    return text or " ".join(str(value).replace("|", "\\|").split())
