"""Places for bytes that outlive a machine: buckets, and folders that stand for one.

    place = open_place("s3://bucket/run")          # also gs://, az://, and file:///folder
    place.write_new("history/00000001.json", data)   # False: somebody else has made it

One seam for all of them: objects by key, read whole or in ranges, written whole, made only if they
are absent, listed and deleted. A listing may lag behind, so nothing that must be right depends on
one. Buckets are spoken to by obstore (`pip install megatrain[bucket]`), which tries failed requests
again; credentials are those of its environment variables, of a profile of AWS, or of the machine.

Laws (tests/test_places.py)
    1. Readers see the whole of an object or nothing of it, at every instant.
    2. Of those that call `write_new` for one key, one gets True.
    3. A failure is a StorageError that names the object and the reason; an absent object is None.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from megatrain import files
from megatrain.errors import ConfigError, DiskError, MissingPackage, StorageError

BUCKETS = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
"""Schemes, and the classes of obstore that speak them."""
_URL = re.compile(r"([a-z][a-z0-9+.-]{1,9})://(.+)", re.DOTALL)
_SECRET = re.compile(r"\s*[a-z][a-z0-9+.-]*://([^/@]*|[^/@:]+:(?!\d+(/|$))[^@]*)@", re.IGNORECASE)
"""`user@` or `user:password@` in a URL; a secret key of AWS may have slashes."""
_KEY = re.compile(r"[^\s/\\.][^/\\\x00-\x1f]*(/[^\s/\\.][^/\\\x00-\x1f]*)*")
"""Names between slashes: none is hidden, or leads out of the place."""
ANSWER_S, RETRY_S = 60, 60
"""Longest time of one request, and of all tries of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An object, as a listing has it."""

    key: str
    num_bytes: int
    mark: str
    """Changes with the bytes of the object."""


class Place(Protocol):
    """Objects under one URL, by key. All calls may come from several threads."""

    @property
    def url(self) -> str: ...

    def read(self, key: str, span: range | None = None) -> bytes | None:
        """Return the bytes of an object, or those of a span; None if it is absent."""

    def write(self, key: str, data: bytes | memoryview) -> None:
        """Make or replace an object. When it returns, the object is durable."""

    def send(self, key: str, path: Path) -> None:
        """Make or replace an object with the bytes of a file, of any size."""

    def write_new(self, key: str, data: bytes) -> bool:
        """Make an object unless it exists; return whether this call has made it.

        False is also possible for a call that has made it and did not hear the answer: compare.
        Raises ConfigError for storage that would replace it.
        """

    def delete(self, key: str) -> None:
        """Remove an object if it exists."""

    def stat(self, key: str) -> Stored | None:
        """Return an object without its bytes; None if it is absent."""

    def listed(self, prefix: str = "") -> list[Stored]:
        """Return the objects whose keys begin with `prefix`, a folder; it may be out of date.

        Hidden ones are left out, as .DS_Store, and empty ones that only mark a folder.
        """


def is_url(name: str) -> bool:
    """Return whether a name is that of a place, and not of a path or a model of the Hub."""
    match = _URL.fullmatch(name)
    return match is not None and match[1] in (*BUCKETS, "file")


def require_no_secret(url: str, what: str = "") -> None:
    """Raise ConfigError for a URL with a name or a password in it; the message does not have them.

    `what` the URL is, for the message: a key of the config.
    """
    if _SECRET.match(url):
        scheme = url.strip().partition("://")[0]
        raise ConfigError(
            f"{what or 'a name'} is a URL, {scheme}://..., with a name or a password before an @. "
            "They would be printed, and kept in the run folder. Remove them from the URL. Buckets "
            "take them from the environment: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
            "AWS_PROFILE, for s3://; the Hub takes HF_TOKEN."
        )


def is_key(name: str) -> bool:
    """Return whether a name can be that of an object, which stays inside its place."""
    return _KEY.fullmatch(name) is not None


def open_place(url: str) -> Place:
    """Return the place of a URL; nothing is asked of it yet.

    Raises ConfigError for a URL that is none, and MissingPackage without obstore.
    """
    require_no_secret(url)
    match = _URL.fullmatch(url.rstrip("/"))
    scheme, rest = (match[1], match[2]) if match else ("", "")
    if scheme == "file" and rest.startswith("/"):
        return FolderPlace(Path(rest))
    if scheme not in BUCKETS or rest.startswith("/"):
        raise ConfigError(
            f"{url[:200]}: not a place. Give s3://bucket/name, gs://bucket/name, "
            "az://container/name or file:///folder."
        )
    return BucketPlace(scheme, *(rest.split("/", 1) if "/" in rest else (rest, "")))


class FolderPlace:
    """A folder as a place: a mounted file system, or a disk of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def url(self) -> str:
        return f"file://{self._folder}"

    def read(self, key: str, span: range | None = None) -> bytes | None:
        path = self._path(key)
        try:
            with path.open("rb") as file:
                if span is None:
                    return file.read()
                file.seek(span.start)
                return file.read(len(span))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}") from error

    def write(self, key: str, data: bytes | memoryview) -> None:
        path = self._path(key)
        with _of_folder():
            files.make_folder(path.parent)
            files.write_file(path, data)

    def send(self, key: str, path: Path) -> None:
        target = self._path(key)
        with _of_folder():
            files.make_folder(target.parent)
            files.copy_file(path, target)

    def write_new(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        with _of_folder():
            files.make_folder(path.parent)
            return files.write_new(path, data)

    def delete(self, key: str) -> None:
        with _of_folder():
            files.remove(self._path(key))

    def stat(self, key: str) -> Stored | None:
        path = self._path(key)
        try:
            return self._stored(path)
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}") from error

    def listed(self, prefix: str = "") -> list[Stored]:
        top = self._folder / prefix
        try:
            below = os.walk(top, onerror=_raise_unless_gone)
            found = [self._stored(Path(at, name)) for at, _, names in below for name in names]
        except OSError as error:
            raise StorageError(f"cannot list {top}: {error.strerror}") from error
        return _shown(filter(None, found))

    def _stored(self, path: Path) -> Stored | None:
        """Return the object that a file is; None if it is gone, as files of writers under way."""
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        key, mark = path.relative_to(self._folder).as_posix(), status.st_mtime_ns
        return Stored(key=key, num_bytes=status.st_size, mark=f"{status.st_size}-{mark}")

    def _path(self, key: str) -> Path:
        return self._folder / _checked(key)


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


@contextmanager
def _of_folder() -> Iterator[None]:
    try:
        yield
    except (DiskError, OSError) as error:
        raise StorageError(str(error)) from error


class BucketPlace:
    """A prefix of a bucket, by obstore."""

    def __init__(self, scheme: str, bucket: str, prefix: str) -> None:
        """Raises MissingPackage, or ConfigError for what obstore refuses."""
        self._store = _opened(scheme, bucket)
        self._prefix = _checked(prefix) if prefix else ""
        self._url = f"{scheme}://{bucket}/{prefix}".rstrip("/")
        self._keeps_objects = False
        """Whether a second object under one key was refused before."""

    @property
    def url(self) -> str:
        return self._url

    def read(self, key: str, span: range | None = None) -> bytes | None:
        import obstore

        with self._explained("read", key):
            try:
                if span is not None:
                    if not span:
                        return b""
                    found = obstore.get_range(
                        self._store, self._key(key), start=span.start, end=span.stop
                    )
                    return bytes(found)
                return bytes(obstore.get(self._store, self._key(key)).bytes())
            except FileNotFoundError:
                return None

    def write(self, key: str, data: bytes | memoryview) -> None:
        import obstore

        with self._explained("write", key):
            obstore.put(self._store, self._key(key), data)

    def send(self, key: str, path: Path) -> None:
        import obstore

        with self._explained("write", key):
            obstore.put(self._store, self._key(key), path)

    def write_new(self, key: str, data: bytes) -> bool:
        made = self._put_new(key, data)
        if made and not self._keeps_objects and self._put_new(key, data):
            raise ConfigError(
                f"{self._url}: this storage replaces objects although it is asked not to (it "
                "ignores If-None-Match: *), so two machines could write one run. Keep runs in one "
                "that has conditional puts, or in a folder."
            )
        self._keeps_objects = True
        return made

    def _put_new(self, key: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._explained("write", key):
            try:
                obstore.put(self._store, self._key(key), data, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

    def delete(self, key: str) -> None:
        import obstore

        with self._explained("delete", key):
            try:
                obstore.delete(self._store, self._key(key))
            except FileNotFoundError:
                return

    def stat(self, key: str) -> Stored | None:
        import obstore

        with self._explained("read", key):
            try:
                return self._stored(obstore.head(self._store, self._key(key)))
            except FileNotFoundError:
                return None

    def listed(self, prefix: str = "") -> list[Stored]:
        import obstore

        top = self._key(prefix) if prefix else self._prefix
        with self._explained("list", prefix):
            found = [one for page in obstore.list(self._store, prefix=top or None) for one in page]
        return _shown(map(self._stored, found))

    def _stored(self, found: Mapping[str, Any]) -> Stored:
        begin = len(self._prefix) + 1 if self._prefix else 0
        mark = str(found["e_tag"] or found["last_modified"])
        return Stored(key=found["path"][begin:], num_bytes=found["size"], mark=mark)

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{_checked(key)}" if self._prefix else _checked(key)

    @contextmanager
    def _explained(self, action: str, key: str) -> Iterator[None]:
        """Turn what obstore raises into a StorageError that says what was asked."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:  # the failures of a network have no common base
            text = " ".join(str(error).split())[:300]
            raise StorageError(f"cannot {action} {self._url}/{key}: {text}") from error


def _shown(found: Iterable[Stored]) -> list[Stored]:
    """Return the objects that a listing shows, by key."""
    by_key = {one.key: one for one in found if not f"/{one.key}".count("/.")}
    folders = {str(above) for key in by_key for above in PurePosixPath(key).parents}
    return [
        by_key[key]
        for key in sorted(by_key)
        if key and not (by_key[key].num_bytes == 0 and key in folders)
    ]


def _checked(key: str) -> str:
    """Return a key that stays inside its place. Raises StorageError."""
    if not is_key(key):
        raise StorageError(f"{key[:200]!r} is not a name for an object")
    return key


def _opened(scheme: str, bucket: str) -> Any:
    """Return the store of obstore for a bucket. Raises MissingPackage or ConfigError."""
    try:
        from obstore import store
    except ImportError:
        raise MissingPackage(
            f"{scheme}://{bucket}: buckets need obstore. Run `pip install megatrain[bucket]`."
        ) from None
    client = {"timeout": timedelta(seconds=ANSWER_S), "connect_timeout": timedelta(seconds=10)}
    endpoints = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AZURE_STORAGE_ENDPOINT")
    if any(os.environ.get(name, "").startswith("http://") for name in endpoints):
        client["allow_http"] = True  # type: ignore[assignment]
    settings: dict[str, Any] = {
        "client_options": client,
        "retry_config": {"max_retries": 10, "retry_timeout": timedelta(seconds=RETRY_S)},
    }
    try:
        if scheme == "s3":
            settings |= _profile(bucket)
        return getattr(store, BUCKETS[scheme]).from_url(f"{scheme}://{bucket}", **settings)
    except MissingPackage:
        raise
    except Exception as error:
        raise ConfigError(f"{scheme}://{bucket}: {str(error)[:300]}") from error


def _profile(bucket: str) -> dict[str, Any]:
    """Return the setting with credentials of a profile of AWS, as its own tools would take it.

    Variables with a key come first, and the role of the machine last. Raises MissingPackage.
    """
    path = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser()
    is_asked = "AWS_PROFILE" in os.environ or path.exists()
    if "AWS_ACCESS_KEY_ID" in os.environ or not is_asked:
        return {}
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise MissingPackage(
            f"s3://{bucket}: AWS_PROFILE or {path} has the credentials, and boto3 reads them. Run "
            "`pip install boto3`, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        ) from None
    return {"credential_provider": Boto3CredentialProvider()}
