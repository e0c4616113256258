"""Models and datasets by their id on the Hugging Face Hub, each at one commit.

    found = find_model("Qwen/Qwen3-8B")      # a folder of that name on this disk always wins
    found.folder, found.commit

A model goes to the Hugging Face cache, and its folder there is read by the same strict readers as
any other. Only its safetensors, config.json, tokenizer and generation files are downloaded,
never .bin or .py. config.json is fetched first: a model that cannot be trained is refused before
its weights are downloaded. Then all files come side by side (`snapshot_download`), if the disk has
room for them. Complete files are kept, and the next call downloads the others.

Laws (tests/test_hub.py)
    1. A commit that is complete in the cache needs no network.
    2. Without a network the call fails within seconds with one sentence and the way out.
    3. Only files that will be read are downloaded, all of one commit.
    4. Ctrl-C ends the call at once, and the downloads after the piece that they are at.
"""

from __future__ import annotations

import difflib
import json
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from logging import CRITICAL
from pathlib import Path
from typing import Any, Literal

from megatrain.errors import ConfigError, HubError, ModelConfigError, ModelFolderError, listing
from megatrain.fetched import local_path, url_of
from megatrain.files import is_too_long
from megatrain.model_files import ADAPTER_CONFIG_NAME, CARRIED, INDEX_NAME, SHARD_NAME, SINGLE_NAME
from megatrain.progress import Advance, byte_progress
from megatrain.text import size

Need = Literal["config", "tokenizer", "weights"]
"""The part of a model that is needed; each includes those before it."""

MAIN = "main"
_CONFIG_NAME = "config.json"
_ANSWER_S = 10.0
"""How long the Hub may take to answer a question."""
_MARGIN_BYTES = 1 << 30
"""Disk space that a download must leave free."""
_PART = r"\w(?:[\w.\-]{0,94}\w)?"
_ID = re.compile(rf"(?:{_PART}/)?{_PART}", re.ASCII)
_REVISION = re.compile(r"\w[\w.\-/]{0,200}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TOKENIZER = re.compile(r"(tokenizer|spiece|sentencepiece|vocab).*")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model on this disk."""

    folder: Path
    commit: str | None
    """None for a folder of the user, which did not come from the Hub."""


class _NoAnswer(Exception):
    """The Hub did not answer; the text gives the reason."""


def is_id(name: str) -> bool:
    """Return whether `name` could be an id on the Hub."""
    odd = "--" in name or ".." in name or name.endswith(".git")
    return bool(_ID.fullmatch(name)) and not odd


def require_repository(name: str) -> None:
    """Raise ConfigError for a name that no repository on the Hub can have."""
    if not is_id(name) or "/" not in name:
        raise ConfigError(f"{name[:80]!r} is not an id like me/name.")


def is_commit(revision: str | None) -> bool:
    """Return whether a revision is a commit, which never changes."""
    return revision is not None and bool(_COMMIT.fullmatch(revision))


def find_model(name: str, revision: str | None = None, need: Need = "weights") -> LocalModel:
    """Return the folder of a model, downloaded if it is an id and not in the cache.

    Raises ModelFolderError if there is no such folder and it is not an id, ModelConfigError if the
    model cannot be trained, HubError if the Hub lacks it, ConfigError for a revision of a
    folder.
    """
    if is_too_long(name):
        raise ModelFolderError(f"{name[:60]}...: the name is too long for a folder and for an id.")
    if (url := url_of(name)) is not None:
        name = str(_by_url(url, need))
    if Path(name).is_dir():
        if revision is not None:
            raise ConfigError(
                f"model.revision is {revision}, but {name} is a local folder, which has no "
                "revisions. Remove model.revision."
            )
        _require_no_parent(Path(name))
        return LocalModel(folder=Path(name), commit=None)
    if Path(name).exists():
        raise ModelFolderError(f"{name} is a file. Give the folder that contains config.json.")
    if not is_id(name):
        raise ModelFolderError(_not_here(name))
    wanted = _checked(revision)
    if not _is_for_hub(name, wanted):
        raise ModelFolderError(_not_here(name))
    return _from_hub(name, wanted, need)


def folder_of(name: str) -> Path:
    """Return the path of a model's or adapters' folder; one at a URL is fetched."""
    return Path(name) if url_of(name) is None else find_model(name).folder


def _by_url(url: str, need: Need) -> Path:
    """Return the folder of the model or adapters at a URL, with the files that are needed."""

    def wanted(key: str) -> bool:
        is_small = key.endswith(".json") or CARRIED.fullmatch(key) is not None
        if "/" in key or (need == "config" and not key.endswith("config.json")):
            return False
        return is_small or (need == "weights" and SHARD_NAME.fullmatch(key) is not None)

    folder = local_path(url, wanted)
    names = (_CONFIG_NAME, ADAPTER_CONFIG_NAME)
    if not folder.is_file() and not any((folder / name).exists() for name in names):
        raise ModelFolderError(
            f"{url} has no {_CONFIG_NAME}. Give the URL of a model folder; that of a run is "
            f"{url}/model, once it has ended."
        )
    return folder


def _is_for_hub(name: str, revision: str) -> bool:
    """Return whether a name that is not here is to be looked for on the Hub.

    Names there are owner/name. If the folder of the owner is here, a path was meant, unless the
    Hugging Face cache has the model.
    """
    owner, _, rest = name.partition("/")
    if rest and not Path(owner).is_dir():
        return True
    return _cached("model", name, revision, _CONFIG_NAME) is not None


def _not_here(name: str) -> str:
    """Return the error for a folder that is missing, with the nearest of those that are here."""
    path = Path(name)
    others = _models_in(path.parent)
    near = difflib.get_close_matches(path.name, others, n=1)
    where = "here" if path.parent == Path() else f"in {path.parent}"
    has = f"; there are {listing(others)}" if others else ""
    meant = f" Did you mean {path.parent / near[0]}?" if near else ""
    return (
        f"{name}: no such folder, and no run or model of this name {where}{has}.{meant} A Hugging "
        "Face Hub id has the form owner/name, like Qwen/Qwen3-8B."
    )


def _require_no_parent(folder: Path) -> None:
    """Raise ModelFolderError for a folder that is no model, but holds models or runs."""
    if any((folder / name).exists() for name in (_CONFIG_NAME, "adapter_config.json")):
        return
    if inside := sorted(_models_in(folder)):
        given = listing([str(folder / each) for each in inside])
        raise ModelFolderError(f"{folder}: no model, but a folder with some. Give one: {given}.")


def _models_in(folder: Path) -> list[str]:
    """Return the names of runs and models in a folder."""
    marks = (_CONFIG_NAME, ".megatrain")
    try:
        return [each.name for each in folder.iterdir() if any((each / m).exists() for m in marks)]
    except (OSError, ValueError):  # ValueError: a name that no path can have
        return []


def dataset_commit(name: str, revision: str | None) -> tuple[str | None, bool]:
    """Return the commit of a dataset, and whether the Hub answers.

    Without an answer it is the commit that the cache has for this revision, or None.
    Raises HubError if the Hub answers and has no such dataset.
    """
    revision = _checked(revision)
    try:
        return _asked("dataset", name, revision).sha, True
    except _NoAnswer:
        cached = _cached("dataset", name, revision, "README.md")
        known = cached.name if cached else revision if is_commit(revision) else None
        return known, False


def _checked(revision: str | None) -> str:
    """Return the revision, main if none is given; it becomes a part of paths in the cache."""
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise ConfigError(f"revision {revision[:80]!r}: not a valid branch, tag or commit")
    return revision or MAIN


def _from_hub(name: str, revision: str, need: Need) -> LocalModel:
    cached = _cached("model", name, revision, _CONFIG_NAME)
    lacks = _lacks(cached, need) if cached else "all files"
    if cached and is_commit(revision) and not lacks:
        return LocalModel(folder=cached, commit=cached.name)
    try:
        info = _asked("model", name, revision)
    except (_NoAnswer, HubError) as reason:
        if cached is not None and not lacks:  # also if the model is gated or deleted by now
            _say(f"{name}: {reason}; using commit {cached.name[:12]} from the cache")
            return LocalModel(folder=cached, commit=cached.name)
        if isinstance(reason, HubError):
            raise
        raise HubError(_no_way(name, str(reason), lacks if cached else "")) from reason
    folder = _fetched(name, revision, info, need)
    return LocalModel(folder=folder, commit=folder.name)


def _no_way(name: str, reason: str, lacks: str) -> str:
    """Return the error for a model that is not on this machine and cannot be downloaded."""
    state = f"the cache lacks {lacks}" if lacks else "not in the Hugging Face cache"
    return (
        f"{name} is not a folder here and not complete on this machine ({state}), and {reason}. "
        f"Run `hf download {name}` on a machine with a network and copy its cache (HF_HOME) here, "
        "or give the path of a model folder. To use a mirror, set HF_ENDPOINT."
    )


def _cached(kind: str, name: str, revision: str, file: str) -> Path | None:
    """Return the folder of a revision in the Hugging Face cache if `file` is in it."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(name, file, revision=revision, repo_type=kind)
    return Path(path).parent if isinstance(path, str) else None


def _lacks(folder: Path, need: Need) -> str:
    """Return the name of what a folder in the cache lacks, or an empty string."""
    if need == "config":
        return ""
    if not any(_TOKENIZER.fullmatch(path.name) for path in folder.iterdir()):
        return "a tokenizer"
    if need == "tokenizer" or (folder / SINGLE_NAME).exists():
        return ""
    if not (folder / INDEX_NAME).exists():
        return "weights"
    shards = _shards(folder / INDEX_NAME)
    return next((shard for shard in shards if not (folder / shard).exists()), "")


def _shards(index: Path) -> list[str]:
    """Return the files that an index names. No name can lead out of the folder."""
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise HubError(f"{index}: cannot read it: {str(error)[:200]}") from error
    if odd := [str(name) for name in names if not SHARD_NAME.fullmatch(str(name))]:
        raise HubError(f"{index}: names files that are not weights: {listing(odd)}")
    return sorted(names)


def _asked(kind: Literal["model", "dataset"], name: str, revision: str) -> Any:
    """Return the Hub's entry for a repository. Raises _NoAnswer, or HubError if it refuses."""
    from huggingface_hub import HfApi, errors

    api = HfApi()
    try:
        with _quiet():
            if kind == "dataset":
                return api.dataset_info(name, revision=revision, timeout=_ANSWER_S)
            return api.model_info(name, revision=revision, timeout=_ANSWER_S, files_metadata=True)
    except errors.GatedRepoError as error:
        raise HubError(
            f"{name}: gated. Accept the terms on its Hub page, then run `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{name}: the Hub has no revision {revision}") from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{name}: no such folder here, and the Hub has no {kind} with this name. If it is "
            "private, run `hf auth login`"
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise _NoAnswer("HF_HUB_OFFLINE is set") from error
    except errors.HfHubHTTPError as error:
        raise _NoAnswer(f"the Hub answered {error.response.status_code}") from error
    except Exception as error:  # the failures of a network have no common base
        raise _NoAnswer(f"the Hub cannot be reached ({type(error).__name__})") from error


def _fetched(name: str, revision: str, info: Any, need: Need) -> Path:
    """Return the folder of a commit with every file that is needed."""
    _require(name, _sizes(info), _CONFIG_NAME, "it is not a transformers model")
    with _downloading(name):
        config = _download(name, _CONFIG_NAME, revision)
        if config.parent.name != info.sha:  # the branch moved between two requests
            info = _asked("model", name, config.parent.name)
        sizes = _sizes(info)
        if need == "weights":
            _check_config(name, config, sizes[_CONFIG_NAME])
        names = [] if need == "config" else [file for file in sizes if CARRIED.fullmatch(file)]
        if need == "weights":
            names += _weights(name, info.sha, sizes)
        missing = [file for file in names if not (config.parent / file).exists()]
        _fetch_all(name, revision, info.sha, {file: sizes[file] for file in missing})
    return config.parent


def _sizes(info: Any) -> dict[str, int]:
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _require(name: str, sizes: dict[str, int], file: str, why: str) -> None:
    if file not in sizes:
        others = f" It has {listing(sizes)}." if sizes else ""
        raise HubError(f"{name}: the Hub has no {file}: {why}.{others}")


def _check_config(name: str, path: Path, num_bytes: int) -> None:
    """Refuse a config that the strict reader refuses, before downloading weights."""
    from megatrain.models.config_json import MAX_CONFIG_BYTES, parse_config

    if num_bytes > MAX_CONFIG_BYTES:
        raise ModelConfigError(
            f"{name}: {_CONFIG_NAME} is larger than {MAX_CONFIG_BYTES >> 20} MiB"
        )
    try:
        parse_config(path.read_bytes())
    except ModelConfigError as error:
        raise ModelConfigError(f"{name}: {error}") from error


def _weights(name: str, commit: str, sizes: dict[str, int]) -> list[str]:
    """Return the files of the weights; other copies on the Hub are ignored."""
    if SINGLE_NAME in sizes:
        return [SINGLE_NAME]
    if INDEX_NAME not in sizes:
        raise HubError(
            f"{name}: the Hub has no safetensors weights; other formats are not read. It has "
            f"{listing(sizes)}."
        )
    shards = _shards(_download(name, INDEX_NAME, commit))
    for shard in shards:
        _require(name, sizes, shard, f"{INDEX_NAME} names it")
    return [INDEX_NAME, *shards]


def _fetch_all(name: str, revision: str, commit: str, sizes: dict[str, int]) -> None:
    """Download files, if the disk has room for them."""
    from huggingface_hub.constants import HF_HUB_CACHE

    if not sizes:
        return
    total = sum(sizes.values())
    free = shutil.disk_usage(_existing(Path(HF_HUB_CACHE))).free
    if total + _MARGIN_BYTES > free:
        raise HubError(
            f"{name}: the download needs {size(total)} in {HF_HUB_CACHE}, where {size(free)} are "
            "free. Set HF_HOME to a folder on a larger disk, or free some space."
        )
    of = "" if is_commit(revision) else f" of {revision}"
    _say(f"{name}: commit {commit[:12]}{of}, downloading {size(total)} to {HF_HUB_CACHE}")
    with byte_progress(f"downloading {name}", total) as advance:
        _download_together(name, commit, list(sizes), advance)


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())


def _download(name: str, file: str, revision: str) -> Path:
    """Return the path of a small file."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import silent_tqdm

    return Path(hf_hub_download(name, file, revision=revision, tqdm_class=silent_tqdm))


def _download_together(name: str, commit: str, files: list[str], advance: Advance) -> None:
    """Download files side by side. Ctrl-C reaches this thread, which only waits."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    done, is_left = Future[str](), threading.Event()

    class Bar(tqdm):
        """Takes the place of the bars of huggingface_hub, and shows nothing."""

        def __init__(self, *_: object, name: str = "", **__: object) -> None:
            super().__init__(disable=True)  # type: ignore[no-untyped-call]
            self._counts = name == "huggingface_hub.snapshot_download"  # bytes that are on the disk

        def update(self, n: float | None = 1) -> None:
            if is_left.is_set():
                raise InterruptedError("nobody waits for this download any more")
            if self._counts:
                advance(int(n or 0))

    def download() -> None:
        try:
            done.set_result(
                snapshot_download(name, revision=commit, allow_patterns=files, tqdm_class=Bar)
            )
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=download, name="download", daemon=True).start()
    try:
        done.result()
    finally:
        is_left.set()


@contextmanager
def _downloading(name: str) -> Iterator[None]:
    """Turn any failure of a download into a HubError with one sentence."""
    try:
        with _quiet():
            yield
    except (HubError, ModelConfigError):
        raise
    except _NoAnswer as error:
        raise HubError(f"{name}: {error}. Run the same command again.") from error
    except Exception as error:  # the failures of a network have no common base
        raise HubError(
            f"{name}: the download failed: {type(error).__name__}: {str(error)[:300]}\n"
            "Complete files are kept. Run the same command again to download the others."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's own messages: we report an error once."""
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
