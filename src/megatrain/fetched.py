"""Models, adapters and rows by URL: fetched into the cache, and read there as any other folder.

    local_path("s3://bucket/model")        # ~/.cache/megatrain/fetched/model-1f2e.../model

The folder in the cache is named after the sizes and marks of all objects below the URL. Objects
that change make another folder; those that do not are fetched once. Large ones come in ranges, some
at a time. A file appears when all its bytes are there and durable. What came is dropped if an
object has changed in the meantime. file:///folder is the folder itself.

Laws (tests/test_fetched.py)
    1. A file in the cache has every byte of its object, or it is not there.
    2. What is in the cache is not read again, and objects that changed are: also during a fetch.
    3. Only what is asked for is fetched.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from megatrain import files
from megatrain.cache import cache_full, writable_cache_folder
from megatrain.errors import DiskError, StorageError
from megatrain.places import Place, Stored, is_url, open_place, require_no_secret
from megatrain.progress import byte_progress
from megatrain.text import size

_RANGE_BYTES = 8 << 20
_AT_A_TIME = 4
_SHORTENED = re.compile(r"(s3|gs|az|file):/(?!/)")
"""A URL that was a path for a while, and lost a slash."""


def url_of(name: str | Path) -> str | None:
    """Return the URL that a name is, None if it is a path or an id.

    Raises ConfigError for a URL with a password in it.
    """
    require_no_secret(str(name))
    text = _SHORTENED.sub(lambda found: f"{found[1]}://", str(name), count=1)
    text = re.sub(r"^file://(?!/)", "file:///", text)
    return text.rstrip("/") if is_url(text) else None


def local_path(name: str | Path, wanted: Callable[[str], bool] = lambda key: True) -> Path:
    """Return the path of a name on this disk; what a URL names is fetched, as far as `wanted`.

    Raises StorageError, also if there is nothing below a URL, and DiskError.
    """
    url = url_of(name)
    if url is None:
        return Path(name)
    if url.startswith("file://"):
        return Path(url.removeprefix("file://"))
    above, _, last = url.rpartition("/")
    place, single = open_place(url), False
    found = place.listed()
    if not found and above.count("/") > 1:  # s3://bucket/name: a single object
        place, single = open_place(above), True
        found = _only(place, last)
    if not found:
        raise StorageError(f"{url}: there is nothing here.")
    folder = _folder(url, found)
    needed = [one for one in found if single or wanted(one.key)]
    missing = [one for one in needed if not (folder / one.key).exists()]
    if missing:
        _fetch(place, url, folder, missing)
        now = _only(place, last) if single else place.listed()
        if changed := [one for one in missing if one not in now]:
            for one in missing:
                files.remove(folder / one.key)
            raise StorageError(
                f"{url}: {changed[0].key} changed while it was fetched. Start again."
            )
    return folder / last if single else folder


def _only(place: Place, key: str) -> list[Stored]:
    return [one for one in [place.stat(key)] if one is not None]


def _folder(url: str, found: Sequence[Stored]) -> Path:
    marks = repr([(one.key, one.num_bytes, one.mark) for one in found])
    name = re.sub(r"[^A-Za-z0-9._-]", "_", url.rpartition("/")[2])[:80].lstrip(".")
    mark = hashlib.sha256(f"{url}\n{marks}".encode()).hexdigest()[:16]
    return writable_cache_folder() / "fetched" / f"{name}-{mark}"


def _fetch(place: Place, url: str, folder: Path, missing: Sequence[Stored]) -> None:
    """Write objects into a folder, each whole or not at all."""
    for parent in {(folder / one.key).parent for one in missing}:
        files.make_folder(parent)
        files.clear_remains(parent)
    total, free = sum(one.num_bytes for one in missing), shutil.disk_usage(folder).free
    if total + (1 << 30) > free:
        raise cache_full(
            f"{url}: {size(total)} are needed in {folder.parent}, where {size(free)} are free"
        )
    with byte_progress(f"fetching {url}", total) as advance:
        for one in missing:
            target = folder / one.key
            temporary = files.temporary_name(target)
            try:
                with (
                    files.write_chunks(temporary, one.num_bytes) as write,
                    ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="fetch") as pool,
                ):

                    def part(start: int, one: Stored = one) -> None:
                        span = range(start, min(start + _RANGE_BYTES, one.num_bytes))
                        data = place.read(one.key, span)
                        if data is None or len(data) != len(span):
                            raise StorageError(f"{place.url}/{one.key} changed while it was read")
                        write(data, start)
                        advance(len(data))

                    for _ in pool.map(part, range(0, one.num_bytes, _RANGE_BYTES)):
                        pass
                files.rename(temporary, target)
            except BaseException:
                with suppress(DiskError):  # the first failure is the one to report
                    files.remove(temporary)
                raise
