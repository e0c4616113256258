"""A run's model on the Hub: exported, with a model card, in one commit.

Laws (tests/run/publishing/test_push.py)
    1. The Hub has every file of the export, byte for byte, and the card.
    2. A Hub that refuses or does not answer is a HubError that says what to do; nothing stays on
       the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatrain import files
from megatrain.errors import ConfigError, HubError
from megatrain.hub import is_id
from megatrain.run.opening.opening import Opening
from megatrain.run.publishing.model_card import model_card
from megatrain.run.state import RunState

_ADAPTER = "adapter_config.json"


def push(
    opened: Opening,
    state: RunState,
    export: Callable[[Path], str],
    repo_id: str,
    *,
    private: bool | None,
) -> str:
    """Commit the model and its card to `repo_id`; return the address of the commit.

    All ranks call it; the one that leads uploads. Raises HubError, and ConfigError
    for a name that is not an id.
    """
    if not is_id(repo_id) or "/" not in repo_id:
        raise ConfigError(f"push_to_hub: {repo_id[:80]!r} is not an id like me/name.")
    if opened.folder.is_dry and opened.ranks.owner.is_alone:
        raise ConfigError("push_to_hub: a dry run has nothing to push.")
    place = opened.folder.path / ".hub"
    if opened.ranks.owner.leads and place.exists():
        files.remove_folder(place)  # of a push that was killed
    try:
        said = export(place)
        if not opened.ranks.owner.leads:
            return ""
        is_adapter = (place / _ADAPTER).exists()
        text = model_card(repo_id, opened.config, state, opened.data.card, is_adapter=is_adapter)
        files.write_file(place / "README.md", text.encode("utf-8", "replace"))
        return _uploaded(place, repo_id, f"MegaTrain: {said}", private=private)
    finally:
        if opened.ranks.owner.leads and place.exists():
            files.remove_folder(place)


def _uploaded(folder: Path, repo_id: str, message: str, *, private: bool | None) -> str:
    from huggingface_hub import HfApi, errors

    api: Any = HfApi()
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        found = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message)
    except errors.OfflineModeIsEnabled as error:
        raise HubError(f"{repo_id}: HF_HUB_OFFLINE is set. Unset it to push.") from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        repair = (
            "Run `hf auth login` with a token that may write there"
            if status in (401, 403)
            else "Push again later"
        )
        raise HubError(f"{repo_id}: the Hub answered {status} to the push. {repair}.") from error
    except Exception as error:  # the failures of a network have no common base
        raise HubError(
            f"{repo_id}: the push failed ({type(error).__name__}: {str(error)[:300]}). The run "
            "folder is unchanged; push again."
        ) from error
    return str(found.commit_url)
