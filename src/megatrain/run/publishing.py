"""A run's model on the Hub: exported, with a model card, in one commit.

The card names nothing of this machine: of files only their last names, of folders nothing. It
states no license, because a run does not know it.

Laws (tests/run/test_publishing.py)
    1. The Hub has every file of the export, byte for byte, and the card.
    2. A Hub that refuses or does not answer is a HubError that says what to do, before anything is
       exported; nothing stays on the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatrain import files
from megatrain.config import Config
from megatrain.config.load import write_yaml
from megatrain.errors import DiskError, HubError
from megatrain.hub import is_commit, is_id, require_repository
from megatrain.model_files import ADAPTER_CONFIG_NAME
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.folder import settings_by_key

PLACE = ".hub"
"""The folder in a run that an export is written to before it is sent."""
_SHOWN = ("loss.name", "optim.learning_rate", "train.batch_tokens", "train.epochs", "train.steps",
          "data.max_length", "data.train_on")  # fmt: skip
"""Settings that decide what was learned."""


def push_to_hub(
    run: Path,
    config: Config,
    repo_id: str,
    export: Callable[[Path], str],
    *,
    private: bool | None,
    ranks: Ranks = ALONE,
) -> str:
    """Commit the model of a run with a model card to `repo_id`; return the address of the commit.

    `export` writes the model, and returns which one it is. All ranks call it; rank 0 uploads, and
    the others return an empty text. Raises HubError, and ConfigError for a name that is not an id.
    """
    from huggingface_hub import HfApi

    require_repository(repo_id)
    place, api = run / PLACE, HfApi()

    def clear() -> None:
        if place.exists():
            files.remove_folder(place)

    def create() -> None:  # first, so that a Hub that refuses does so before anything is written
        with _explained(repo_id):
            api.create_repo(repo_id, private=private, exist_ok=True)
        clear()  # the remains of a push that was killed

    def upload() -> str:
        is_adapter = (place / ADAPTER_CONFIG_NAME).exists()
        card = model_card(repo_id, config, said, is_adapter=is_adapter)
        files.write_file(place / "README.md", card.encode("utf-8", "replace"))
        with _explained(repo_id):
            found: Any = api.upload_folder(
                repo_id=repo_id, folder_path=place, commit_message=f"MegaTrain: {said}"
            )
        return str(found.commit_url)

    ranks.on_first(create)
    try:
        said = export(place)
        return ranks.on_first(upload) or ""
    finally:
        with suppress(DiskError):  # the next push removes it
            ranks.on_first(clear)


def model_card(repo_id: str, config: Config, said: str, *, is_adapter: bool) -> str:
    """Return the text of README.md; `said` is which model of the run it is."""
    from huggingface_hub import ModelCardData

    model, rows, settings = config.model, config.data.train, settings_by_key(config)
    base = _hub_id(model.name_or_path, model.revision)
    data = [_hub_id(one.path, one.revision) for one in rows]
    head = ModelCardData(
        base_model=base,
        datasets=[name for name in data if name is not None] or None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["megatrain"],
    )
    names = [known or _last_name(one.path) for known, one in zip(data, rows, strict=True)]
    facts = {key: write_yaml(settings[key]) for key in _SHOWN if settings[key] is not None}
    return (
        f"---\n{head.to_yaml()}\n---\n# {_last_name(repo_id)}\n\n"
        f"{'An adapter for' if is_adapter else 'Trained from'} "
        f"{base or _last_name(model.name_or_path)} with MegaTrain: {said}.\n\n"
        "| name | value |\n|---|---|\n"
        + "".join(f"| {key} | {text.strip()} |\n" for key, text in facts.items())
        + f"| data.train | {', '.join(names)} |\n"
    )


def _hub_id(name: str, revision: str | None) -> str | None:
    """Return a name of a run's config if it is an id on the Hub: a run pins those to a commit."""
    return name if is_id(name) and is_commit(revision) else None


def _last_name(path: str) -> str:
    return path.strip("<>").rstrip("/").rpartition("/")[2]


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
